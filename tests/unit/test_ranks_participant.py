# SPDX-License-Identifier: Apache-2.0
"""A mapper's side: what it performs, in which order, once, and what it answers."""

import pytest

from kvcached.ranks.actions import (
    AbortRuns,
    AcquireHandles,
    CommitRuns,
    MapFresh,
    MapHeld,
    PrepareRuns,
    ReleaseHandles,
    UnmapKeep,
    UnmapRelease,
)
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.operations import Op, OpKind
from kvcached.ranks.participant import AwaitStep, Participant, Perform, Reply
from kvcached.ranks.transactions import (
    HISTORY,
    Abort,
    Acquire,
    Commit,
    MapNow,
    Phase,
    Prepare,
    Query,
    Release,
    Revert,
)

DONE = Outcome(Verdict.DONE)
EXHAUSTED = Outcome(Verdict.EXHAUSTED, 7, reason="leased", ticket=3)
UNKNOWN = Outcome(Verdict.UNKNOWN, pages=(5,))
RUNS = ((5, 1),)
CLASSES = ((1, 2),)
ACQUIRE = Acquire(1, CLASSES, False, 0)
PREPARE = Prepare(1, RUNS, 9)


class Mapper:
    """A participant and the effects that it has left."""

    def __init__(self):
        self.participant = Participant()
        self.effects = []

    def receive(self, message):
        self.effects += self.participant.received(message)
        return self

    def step(self, *ops):
        self.effects += self.participant.step_ops(ops)
        return self

    def perform(self, outcome=DONE):
        """The oldest action that waits. Returns it."""
        effect = next(effect for effect in self.effects if isinstance(effect, Perform))
        self.effects.remove(effect)
        self.effects += self.participant.performed(effect.id, outcome)
        return effect.action

    def pass_step(self, ok=True):
        effect = next(effect for effect in self.effects if isinstance(effect, AwaitStep))
        self.effects.remove(effect)
        self.effects += self.participant.step_passed(effect.id, ok)
        return effect.step

    def answers(self):
        """(transaction, phase, verdict) of what was answered since the last time."""
        told = [effect.answer for effect in self.effects if isinstance(effect, Reply)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, Reply)]
        return [(answer.tx, answer.phase, answer.outcome.verdict) for answer in told]

    def actions(self):
        return [effect.action for effect in self.effects if isinstance(effect, Perform)]


@pytest.fixture
def mapper():
    return Mapper()


@pytest.mark.parametrize(
    ("opening", "begin", "begun", "ending", "end", "ended"),
    [
        (ACQUIRE, AcquireHandles(CLASSES, False, 0), Phase.DONE, Revert(1), ReleaseHandles(CLASSES), Phase.REVERTED),
        (MapNow(1, RUNS, True, 4), MapFresh(RUNS, True, 4), Phase.DONE, Revert(1), UnmapRelease(RUNS, 4), Phase.REVERTED),
        (PREPARE, PrepareRuns(1, RUNS), Phase.PREPARED, Commit(1), CommitRuns(1), Phase.COMMITTED),
        (PREPARE, PrepareRuns(1, RUNS), Phase.PREPARED, Abort(1), AbortRuns(1), Phase.ABORTED),
    ],
)
def test_a_transaction_begins_and_ends(mapper, opening, begin, begun, ending, end, ended):
    mapper.receive(opening)
    if isinstance(opening, Prepare):
        assert mapper.pass_step() == 9
    assert mapper.perform() == begin
    assert mapper.answers() == [(1, begun, Verdict.DONE)]
    mapper.receive(ending)
    assert mapper.perform() == end
    assert mapper.answers() == [(1, ended, Verdict.DONE)]


def test_a_release_ends_as_it_begins(mapper):
    mapper.receive(Release(1, CLASSES))
    assert mapper.perform() == ReleaseHandles(CLASSES)
    assert mapper.answers() == [(1, Phase.DONE, Verdict.DONE)]


def test_a_failure_is_answered_with_what_it_was(mapper):
    mapper.receive(ACQUIRE)
    mapper.perform(EXHAUSTED)
    answer = mapper.effects[0].answer
    assert (answer.phase, answer.outcome, answer.ticket) == (Phase.FAILED, EXHAUSTED, 3)


@pytest.mark.parametrize("opening", [ACQUIRE, MapNow(1, RUNS, False, 0), Release(1, CLASSES)])
def test_a_repeat_is_answered_and_never_performed_again(mapper, opening):
    mapper.receive(opening)
    mapper.perform()
    mapper.answers()
    mapper.receive(opening)
    assert mapper.actions() == []
    assert mapper.answers() == [(1, Phase.DONE, Verdict.DONE)]


def test_a_repeated_commit_is_answered_and_never_performed_again(mapper):
    mapper.receive(PREPARE)
    mapper.pass_step()
    mapper.perform()
    mapper.receive(Commit(1))
    mapper.perform()
    mapper.answers()
    mapper.receive(Commit(1))
    assert mapper.actions() == []
    assert mapper.answers() == [(1, Phase.COMMITTED, Verdict.DONE)]


@pytest.mark.parametrize(("ending", "opening", "phase"), [(Revert(1), ACQUIRE, Phase.REVERTED), (Abort(1), PREPARE, Phase.ABORTED)])
def test_what_arrives_after_its_end_is_refused(mapper, ending, opening, phase):
    mapper.receive(ending)
    mapper.receive(opening)
    assert mapper.actions() == []
    assert mapper.answers() == [(1, phase, Verdict.DONE)] * 2


def test_a_commit_of_what_never_was_prepared_is_refused(mapper):
    assert mapper.receive(Commit(1)).answers() == [(1, Phase.FAILED, Verdict.REFUSED)]


def test_a_revert_waits_for_what_it_reverts(mapper):
    mapper.receive(ACQUIRE).receive(Revert(1))
    assert mapper.actions() == [AcquireHandles(CLASSES, False, 0)]
    mapper.perform()
    assert mapper.perform() == ReleaseHandles(CLASSES)
    assert mapper.answers() == [(1, Phase.RUNNING, Verdict.DONE), (1, Phase.REVERTED, Verdict.DONE)]


def test_a_revert_of_what_failed_does_nothing_and_still_tells_why(mapper):
    mapper.receive(ACQUIRE).receive(Revert(1))
    mapper.perform(EXHAUSTED)
    assert mapper.actions() == []
    assert mapper.answers()[1:] == [(1, Phase.FAILED, Verdict.EXHAUSTED), (1, Phase.REVERTED, Verdict.DONE)]


def test_a_revert_of_what_left_pages_unknown_says_so(mapper):
    mapper.receive(MapNow(1, RUNS, False, 0))
    mapper.perform(UNKNOWN)
    mapper.answers()
    assert mapper.receive(Revert(1)).answers() == [(1, Phase.REVERTED, Verdict.UNKNOWN)]


def test_an_undo_that_fails_is_never_success(mapper):
    mapper.receive(MapNow(1, RUNS, False, 0))
    mapper.perform()
    mapper.receive(Revert(1))
    mapper.answers()
    mapper.perform(UNKNOWN)
    assert mapper.answers() == [(1, Phase.REVERTED, Verdict.UNKNOWN)]


def test_an_abort_does_not_wait_for_the_step(mapper):
    mapper.receive(PREPARE).receive(Abort(1))
    assert mapper.answers() == [(1, Phase.ABORTED, Verdict.DONE)]
    mapper.pass_step()
    assert mapper.actions() == []


def test_a_prepare_gives_up_when_the_step_does_not_pass(mapper):
    mapper.receive(PREPARE)
    mapper.pass_step(ok=False)
    assert mapper.answers() == [(1, Phase.FAILED, Verdict.BUSY)]


def test_a_query_tells_how_far_it_is(mapper):
    assert mapper.receive(Query(1)).answers() == [(1, Phase.UNHEARD, Verdict.DONE)]
    mapper.receive(ACQUIRE)
    assert mapper.receive(Query(1)).answers() == [(1, Phase.RUNNING, Verdict.DONE)]
    mapper.perform()
    mapper.answers()
    assert mapper.receive(Query(1)).answers() == [(1, Phase.DONE, Verdict.DONE)]


def test_the_history_is_bounded_and_what_is_older_is_refused(mapper):
    for tx in range(1, 2 * HISTORY + 2):
        mapper.receive(Acquire(tx, CLASSES, False, 0))
        mapper.perform()
    assert len(mapper.participant._history) <= HISTORY + 1
    mapper.answers()
    mapper.receive(ACQUIRE)
    assert mapper.actions() == []
    assert mapper.answers() == [(1, Phase.FAILED, Verdict.REFUSED)]
    mapper.receive(Acquire(HISTORY + 2, CLASSES, False, 0))
    assert mapper.answers() == [(HISTORY + 2, Phase.DONE, Verdict.DONE)]


def test_what_is_prepared_is_never_forgotten(mapper):
    mapper.receive(PREPARE)
    mapper.pass_step()
    mapper.perform()
    for tx in range(2, 2 * HISTORY - 1):
        mapper.receive(Revert(tx))
    mapper.answers()
    mapper.receive(Commit(1))
    assert mapper.perform() == CommitRuns(1)


# ---------------------------------------------------------------------- in band


def test_a_map_of_a_step_is_performed_before_the_step_and_acknowledged_once(mapper):
    mapper.step(Op(1, OpKind.MAP, ((1, 1),)), Op(2, OpKind.MAP, ((2, 1),)))
    assert mapper.participant.maps_pending == 2
    assert mapper.perform() == MapHeld(((1, 1),))
    assert mapper.answers() == []
    mapper.perform()
    assert mapper.participant.maps_pending == 0
    (answer,) = [effect.answer for effect in mapper.effects]
    assert (answer.tx, answer.applied, answer.completed) == (0, 2, 2)


def test_operations_on_a_message_come_with_what_it_asks(mapper):
    mapper.receive(Release(1, CLASSES, (Op(1, OpKind.MAP, RUNS),)))
    assert mapper.actions() == [MapHeld(RUNS), ReleaseHandles(CLASSES)]


def test_an_operation_that_both_channels_bring_is_applied_once(mapper):
    op = Op(1, OpKind.MAP, RUNS)
    mapper.step(op).receive(Query(0, (op,)))
    assert mapper.actions() == [MapHeld(RUNS)]


def test_an_unmap_is_applied_at_once_and_complete_after_its_step(mapper):
    mapper.step(Op(1, OpKind.UNMAP, RUNS, 4))
    (answer,) = [effect.answer for effect in mapper.effects if isinstance(effect, Reply)]
    assert (answer.applied, answer.completed) == (1, 0)
    assert mapper.pass_step() == 4
    mapper.effects = [effect for effect in mapper.effects if not isinstance(effect, Reply)]
    assert mapper.perform() == UnmapKeep(RUNS)
    assert mapper.effects[0].answer.completed == 1


def test_an_unmap_waits_as_long_as_it_takes(mapper):
    mapper.step(Op(1, OpKind.UNMAP, RUNS, 4))
    for _ in range(3):
        assert mapper.pass_step(ok=False) == 4
    mapper.pass_step()
    assert mapper.actions() == [UnmapKeep(RUNS)]


def test_a_map_is_applied_when_it_is_performed(mapper):
    """So its operation rides on every step until then, and no step misses it."""
    mapper.step(Op(1, OpKind.MAP, RUNS)).receive(Query(7))
    assert mapper.effects[-1].answer.applied == 0
    mapper.perform()
    assert mapper.effects[-1].answer.applied == 1


def test_an_unmap_never_overtakes_a_map_that_came_before(mapper):
    mapper.step(Op(1, OpKind.MAP, ((7, 1),))).receive(Prepare(1, RUNS, 0, (Op(2, OpKind.MAP, RUNS),)))
    mapper.pass_step()
    assert mapper.actions() == [MapHeld(((7, 1),)), MapHeld(RUNS)]
    mapper.perform()
    assert mapper.actions() == [MapHeld(RUNS)]
    mapper.perform()
    assert mapper.actions() == [PrepareRuns(1, RUNS)]


def test_a_map_that_was_taken_back_is_complete_without_a_call(mapper):
    mapper.step(Op(1, OpKind.MAP, ()))
    assert mapper.actions() == []
    assert mapper.effects[0].answer.completed == 1


def test_an_owner_that_repeats_old_operations_is_told_again(mapper):
    op = Op(1, OpKind.UNMAP, RUNS, 4)
    mapper.step(op).answers()
    assert mapper.step(op).answers() == [(0, Phase.DONE, Verdict.DONE)]
    assert mapper.step().answers() == []


def test_a_promised_map_that_fails_breaks_the_rank_for_good(mapper):
    mapper.step(Op(1, OpKind.MAP, RUNS), Op(2, OpKind.UNMAP, ((6, 1),), 4))
    mapper.perform(EXHAUSTED)
    assert "promised" in mapper.participant.broken.reason
    assert mapper.answers() == [(0, Phase.FAILED, Verdict.BROKEN)]
    assert mapper.receive(ACQUIRE).answers() == [(1, Phase.FAILED, Verdict.BROKEN)]
    assert mapper.step(Op(3, OpKind.MAP, RUNS)).answers() == [(0, Phase.FAILED, Verdict.BROKEN)]
    mapper.pass_step()
    assert mapper.answers() == [(0, Phase.FAILED, Verdict.BROKEN)]
    assert mapper.actions() == []


def test_a_promised_unmap_that_fails_is_complete_and_every_answer_names_it(mapper):
    mapper.step(Op(1, OpKind.UNMAP, RUNS, 4), Op(2, OpKind.UNMAP, ((6, 1),), 4))
    mapper.pass_step()
    mapper.pass_step()
    mapper.perform(UNKNOWN)
    mapper.perform()
    mapper.receive(ACQUIRE).perform()
    answers = [effect.answer for effect in mapper.effects if isinstance(effect, Reply)]
    assert [(answer.completed, answer.stranded) for answer in answers[1:]] == [(1, (1,)), (2, (1,)), (2, (1,))]
    assert answers[0].stranded == ()
    assert mapper.participant.broken is None


def test_a_promised_unmap_that_fails_without_naming_its_pages_breaks_the_rank(mapper):
    mapper.step(Op(1, OpKind.UNMAP, RUNS, 4)).pass_step()
    mapper.perform(Outcome(Verdict.UNKNOWN))
    assert "promised" in mapper.participant.broken.reason


def test_a_rank_that_lets_too_many_pages_down_is_broken(mapper):
    mapper.step(*(Op(number, OpKind.UNMAP, ((number, 1),), 4) for number in range(1, 66)))
    for _ in range(65):
        mapper.pass_step()
    for _ in range(64):
        mapper.perform(UNKNOWN)
    assert mapper.participant.broken is None
    mapper.perform(UNKNOWN)
    assert mapper.participant.broken is not None


def test_without_an_owner_nothing_is_begun_and_queued_steps_still_get_their_pages(mapper):
    mapper.receive(PREPARE)
    mapper.participant.owner_lost()
    assert mapper.receive(ACQUIRE).answers() == []
    mapper.pass_step()
    mapper.step(Op(1, OpKind.MAP, RUNS))
    assert mapper.actions() == [MapHeld(RUNS)]
