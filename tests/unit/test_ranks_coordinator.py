# SPDX-License-Identifier: Apache-2.0
"""The owner's side: all ranks or none, nothing unknown is success, and each transaction settles once."""

import pytest

from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.coordinator import LONGEST_PAUSE_S, Coordinator, Fail, Remind, Send, Settle
from kvcached.ranks.operations import MAX_OPEN_OPS
from kvcached.ranks.transactions import (
    HISTORY,
    MAX_RUNS,
    Abort,
    Acquire,
    Answer,
    Commit,
    MapNow,
    Phase,
    Prepare,
    Query,
    Release,
    Revert,
)

DONE = Outcome(Verdict.DONE)
UNKNOWN = Outcome(Verdict.UNKNOWN, pages=(5,))
BUSY = Outcome(Verdict.BUSY, reason="a step is running")
RUNS = ((5, 1), (6, 1))
CLASSES = ((1, 2),)


def exhausted(size_bytes, ticket=0):
    return Outcome(Verdict.EXHAUSTED, size_bytes, reason="leased", ticket=ticket)


class Owner:
    """A coordinator of `ranks` ranks, and what it has sent, settled and asked to be reminded of."""

    def __init__(self, ranks=2, page_bytes=()):
        self.coordinator = Coordinator(ranks, page_bytes, [f"socket-{rank}" for rank in range(ranks)])
        self.effects = []

    def ask(self, asked):
        tx, effects = asked
        self.effects += effects
        return tx

    def answer(self, rank, tx, phase, outcome=DONE, applied=0, completed=0, stranded=()):
        self.effects += self.coordinator.answered(rank, Answer(tx, phase, outcome, applied, completed, outcome.ticket, stranded))

    def all_answer(self, tx, phase):
        for rank in range(self.coordinator.ranks):
            self.answer(rank, tx, phase)

    def remind(self):
        """The newest reminder comes. Returns its pause."""
        reminder = [effect for effect in self.effects if isinstance(effect, Remind)][-1]
        self.effects = self.coordinator.reminded(reminder.tx, reminder.attempt)
        return reminder.after_s

    def sent(self):
        """(rank, kind) of the messages since the last time."""
        sends = [(effect.rank, type(effect.message)) for effect in self.effects if isinstance(effect, Send)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, Send)]
        return sends

    def settled(self):
        return [(effect.tx, effect.outcome.verdict) for effect in self.effects if isinstance(effect, Settle)]

    def failures(self):
        return [effect.reason for effect in self.effects if isinstance(effect, Fail)]

    def grow(self, classes=CLASSES):
        tx = self.ask(self.coordinator.grow_credit(classes))
        self.all_answer(tx, Phase.DONE)
        self.effects.clear()


@pytest.fixture
def owner():
    return Owner()


# ---------------------------------------------------------------------- grow and map


@pytest.mark.parametrize(
    ("ask", "kind"), [(lambda c: c.grow_credit(CLASSES), Acquire), (lambda c: c.map_now(RUNS), MapNow)], ids=["credit", "map"]
)
def test_it_is_done_when_every_rank_has_done_it(owner, ask, kind):
    tx = owner.ask(ask(owner.coordinator))
    assert owner.sent() == [(0, kind), (1, kind)]
    owner.answer(0, tx, Phase.DONE)
    assert owner.settled() == []
    owner.answer(1, tx, Phase.DONE)
    assert owner.settled() == [(tx, Verdict.DONE)]


def test_one_failure_takes_it_back_everywhere_before_it_settles():
    owner = Owner(3)
    tx = owner.ask(owner.coordinator.map_now(RUNS))
    owner.answer(0, tx, Phase.DONE)
    owner.sent()
    owner.answer(1, tx, Phase.FAILED, exhausted(0))
    assert owner.sent() == [(0, Revert), (2, Revert)]  # rank 2 has not been heard of
    owner.answer(2, tx, Phase.DONE)  # said before it heard of the revert
    owner.answer(0, tx, Phase.REVERTED)
    assert owner.settled() == []
    owner.answer(2, tx, Phase.REVERTED)
    assert owner.settled() == [(tx, Verdict.EXHAUSTED)]
    assert owner.coordinator.credits() == ()


def test_of_several_refusals_the_tightest_counts_in_pages():
    owner = Owner(2, page_bytes=(1, 10))
    tx = owner.ask(owner.coordinator.map_now(RUNS))
    owner.answer(0, tx, Phase.FAILED, exhausted(30))
    owner.answer(1, tx, Phase.FAILED, exhausted(40))
    owner.answer(1, tx, Phase.REVERTED)
    settle = next(effect for effect in owner.effects if isinstance(effect, Settle))
    assert (settle.rank, settle.outcome.size_bytes) == (1, 40)
    assert settle.outcome.reason.startswith("rank 1 (socket-1)")


def test_an_undo_that_failed_quarantines_everywhere(owner):
    tx = owner.ask(owner.coordinator.map_now(RUNS))
    owner.answer(0, tx, Phase.FAILED, exhausted(0))
    owner.answer(1, tx, Phase.REVERTED, UNKNOWN)
    assert owner.settled() == [(tx, Verdict.UNKNOWN)]
    assert next(effect for effect in owner.effects if isinstance(effect, Settle)).outcome.pages == (5,)


@pytest.mark.parametrize("outcome", [Outcome(Verdict.UNKNOWN), Outcome(Verdict.BROKEN), Outcome(Verdict.BUSY)])
def test_an_undo_of_which_nobody_knows_what_it_left_fails_the_pool(owner, outcome):
    tx = owner.ask(owner.coordinator.map_now(RUNS))
    owner.answer(0, tx, Phase.FAILED, exhausted(0))
    owner.answer(1, tx, Phase.REVERTED, outcome)
    assert owner.settled() == [(tx, Verdict.BROKEN)]
    assert len(owner.failures()) == 1


def test_a_wish_is_repeated_with_the_least_ticket_until_it_is_granted(owner):
    tx = owner.ask(owner.coordinator.grow_credit(CLASSES, urgent=True))
    owner.answer(0, tx, Phase.FAILED, exhausted(0, ticket=9))
    owner.answer(1, tx, Phase.FAILED, exhausted(0, ticket=4))
    owner.answer(1, tx, Phase.REVERTED)
    _, effects = owner.coordinator.grow_credit(CLASSES)
    assert effects[0].message.ticket == 0  # not urgent: it waits in no queue
    tx, effects = owner.coordinator.map_now(RUNS, urgent=True)
    assert effects[0].message.ticket == 4
    owner.all_answer(tx, Phase.DONE)
    assert owner.coordinator.map_now(RUNS, urgent=True)[1][0].message.ticket == 0


# ---------------------------------------------------------------------- shrink


def test_all_prepare_then_all_commit(owner):
    tx = owner.ask(owner.coordinator.shrink(RUNS, 3))
    assert owner.sent() == [(0, Prepare), (1, Prepare)]
    owner.answer(0, tx, Phase.PREPARED)
    assert owner.sent() == []
    owner.answer(1, tx, Phase.PREPARED)
    assert owner.sent() == [(0, Commit), (1, Commit)]
    owner.all_answer(tx, Phase.COMMITTED)
    assert owner.settled() == [(tx, Verdict.DONE)]


def test_one_that_cannot_prepare_aborts_all(owner):
    tx = owner.ask(owner.coordinator.shrink(RUNS, 3))
    owner.sent()
    owner.answer(1, tx, Phase.FAILED, BUSY)
    assert owner.sent() == [(0, Abort)]
    owner.answer(0, tx, Phase.ABORTED)
    assert owner.settled() == [(tx, Verdict.BUSY)]


def test_a_commit_is_repeated_and_never_aborted(owner):
    tx = owner.ask(owner.coordinator.shrink(RUNS, 3))
    owner.all_answer(tx, Phase.PREPARED)
    owner.answer(0, tx, Phase.COMMITTED)
    owner.sent()
    kinds = []
    for _ in range(6):
        owner.remind()
        kinds += owner.sent()
    assert kinds == [(1, Query), (1, Commit)] * 3
    owner.answer(1, tx, Phase.COMMITTED)
    assert owner.settled() == [(tx, Verdict.DONE)]


def test_after_a_commit_began_all_its_pages_are_in_doubt_when_one_is(owner):
    tx = owner.ask(owner.coordinator.shrink(RUNS, 3))
    owner.all_answer(tx, Phase.PREPARED)
    owner.answer(0, tx, Phase.COMMITTED)
    owner.answer(1, tx, Phase.COMMITTED, UNKNOWN)
    assert next(effect for effect in owner.effects if isinstance(effect, Settle)).outcome.pages == (5, 6)


def test_a_rank_that_does_not_know_what_it_prepared_fails_the_pool(owner):
    tx = owner.ask(owner.coordinator.shrink(RUNS, 3))
    owner.all_answer(tx, Phase.PREPARED)
    owner.answer(1, tx, Phase.FAILED, Outcome(Verdict.REFUSED, reason="never prepared here"))
    assert owner.failures() == ["rank 1 (socket-1): answered FAILED where COMMITTED was due: never prepared here"]


# ---------------------------------------------------------------------- lost, late and repeated answers


def test_a_lost_answer_is_settled_by_a_query(owner):
    tx = owner.ask(owner.coordinator.grow_credit(CLASSES))
    owner.answer(0, tx, Phase.DONE)
    owner.remind()
    assert owner.sent() == [(1, Query)]
    owner.answer(1, tx, Phase.UNHEARD)
    assert owner.sent() == [(1, Acquire)]
    owner.answer(1, tx, Phase.DONE)
    assert owner.settled() == [(tx, Verdict.DONE)]


def test_a_slow_rank_is_waited_for_with_growing_pauses_and_without_end(owner):
    owner.ask(owner.coordinator.grow_credit(CLASSES))
    pauses = [owner.remind() for _ in range(20)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert owner.settled() == owner.failures() == []


def test_a_reminder_that_is_no_longer_needed_does_nothing(owner):
    tx = owner.ask(owner.coordinator.shrink(RUNS, 3))
    owner.all_answer(tx, Phase.PREPARED)
    assert owner.coordinator.reminded(tx, 1) == []
    owner.all_answer(tx, Phase.COMMITTED)
    assert owner.coordinator.reminded(tx, 3) == []


def test_a_late_answer_is_never_taken_for_the_next_transaction(owner):
    first = owner.ask(owner.coordinator.grow_credit(CLASSES))
    owner.all_answer(first, Phase.DONE)
    second = owner.ask(owner.coordinator.grow_credit(CLASSES))
    owner.all_answer(first, Phase.DONE)
    assert owner.settled() == [(first, Verdict.DONE)]
    owner.all_answer(second, Phase.DONE)
    owner.all_answer(second, Phase.DONE)
    assert owner.settled() == [(first, Verdict.DONE), (second, Verdict.DONE)]
    assert owner.coordinator.credit(1) == 4


def test_a_transaction_waits_while_one_is_a_whole_history_older(owner):
    owner.ask(owner.coordinator.grow_credit(CLASSES))
    for _ in range(HISTORY):
        owner.ask(owner.coordinator.grow_credit(CLASSES))
    assert owner.settled() == [(HISTORY + 1, Verdict.BUSY)]


def test_more_runs_than_a_message_holds_are_refused(owner):
    tx = owner.ask(owner.coordinator.map_now([(0, 1)] * (MAX_RUNS + 1)))
    assert owner.settled() == [(tx, Verdict.REFUSED)]


# ---------------------------------------------------------------------- a rank that is gone


def test_a_lost_rank_fails_the_pool_once_and_by_name(owner):
    first = owner.ask(owner.coordinator.grow_credit(CLASSES))
    second = owner.ask(owner.coordinator.shrink(RUNS, 3))
    owner.effects += owner.coordinator.lost(1, "its process ended")
    owner.effects += owner.coordinator.lost(0, "its process ended")
    assert owner.settled() == [(first, Verdict.BROKEN), (second, Verdict.BROKEN)]
    assert owner.failures() == ["rank 1 (socket-1): its process ended"]
    third = owner.ask(owner.coordinator.map_now(RUNS))
    assert owner.settled()[-1] == (third, Verdict.BROKEN)
    owner.answer(0, first, Phase.DONE)
    assert len(owner.settled()) == 3


def test_nothing_is_promised_after_a_failure(owner):
    owner.grow()
    owner.answer(0, 0, Phase.FAILED, Outcome(Verdict.BROKEN, reason="a promised map failed"))
    assert owner.coordinator.credit(1) == 0
    assert not owner.coordinator.promise(((0, 1),))
    assert owner.coordinator.recall(((0, 1),), 0) is None
    assert owner.coordinator.flush() == []


def test_an_acknowledgement_of_what_nobody_sent_fails_the_pool(owner):
    owner.answer(1, 0, Phase.DONE, applied=3)
    assert "acknowledged operation 3" in owner.failures()[0]


# ---------------------------------------------------------------------- credit


def test_only_what_every_rank_holds_is_promised(owner):
    tx = owner.ask(owner.coordinator.grow_credit(CLASSES))
    owner.answer(0, tx, Phase.DONE)
    assert not owner.coordinator.promise(((0, 1),))
    owner.answer(1, tx, Phase.DONE)
    assert owner.coordinator.promise(((0, 1),))
    assert owner.coordinator.credit(1) == 1
    assert not owner.coordinator.promise(((1, 4),))  # another class
    assert [op.runs for op in owner.coordinator.tail()] == [((0, 1),)]


def test_recalled_pages_are_credit_when_every_rank_has_unmapped_them(owner):
    owner.grow()
    owner.coordinator.promise(((0, 1),))
    owner.coordinator.tail()
    number = owner.coordinator.recall(((0, 1),), 7)
    owner.answer(0, 0, Phase.DONE, applied=2, completed=2)
    assert owner.coordinator.credit(1) == 1
    assert not owner.coordinator.promise(((0, 1),))  # still mapped on rank 1
    assert owner.settled() == []
    owner.answer(1, 0, Phase.DONE, applied=2, completed=2)
    assert owner.coordinator.completed_everywhere == number
    assert owner.coordinator.credit(1) == 2
    assert owner.coordinator.promise(((0, 1),))


def test_what_one_rank_could_not_unmap_is_nobodys_credit_and_is_told(owner):
    owner.grow(((1, 2),))
    owner.coordinator.promise(RUNS)
    owner.coordinator.tail()
    bad, good = owner.coordinator.recall(RUNS[:1], 7), owner.coordinator.recall(RUNS[1:], 7)
    owner.answer(1, 0, Phase.DONE, applied=3, completed=2, stranded=(2,))
    owner.answer(0, 0, Phase.DONE, applied=3, completed=3)
    assert owner.coordinator.completed_everywhere == bad
    assert owner.coordinator.credit(1) == 0
    assert "rank 1 (socket-1)" in owner.coordinator.stranded(bad)
    owner.answer(1, 0, Phase.DONE, applied=3, completed=3, stranded=(2,))
    assert owner.coordinator.credit(1) == 1
    assert owner.coordinator.stranded(good) == ""
    assert owner.failures() == []


def test_a_promise_that_nobody_was_sent_is_taken_back_at_once(owner):
    owner.grow()
    owner.coordinator.promise(((0, 1),))
    assert owner.coordinator.recall(((0, 1),), 7) == 0
    assert owner.coordinator.credit(1) == 2


def test_a_page_on_its_way_out_is_not_mapped_out_of_band_either(owner):
    owner.coordinator.recall(((5, 1),), 7)
    tx = owner.ask(owner.coordinator.map_now(RUNS))
    assert owner.settled() == [(tx, Verdict.BUSY)]


def test_released_credit_is_gone_before_the_ranks_hear_of_it(owner):
    owner.grow()
    tx = owner.ask(owner.coordinator.release_credit(((1, 1),)))
    assert owner.sent() == [(0, Release), (1, Release)]
    assert owner.coordinator.credits() == ((1, 1),)
    owner.answer(0, tx, Phase.FAILED, BUSY)
    owner.answer(1, tx, Phase.DONE)
    assert owner.settled() == [(tx, Verdict.BUSY)]
    assert owner.coordinator.credits() == ((1, 1),)
    tx = owner.ask(owner.coordinator.release_credit(((1, 2),)))
    assert owner.settled()[-1] == (tx, Verdict.REFUSED)


def test_operations_reach_ranks_without_a_step_and_are_asked_for_until_they_are_finished(owner):
    owner.grow()
    owner.coordinator.promise(((0, 1),))
    owner.effects += owner.coordinator.flush()
    assert owner.sent() == [(0, Query), (1, Query)]
    owner.answer(0, 0, Phase.DONE, applied=1, completed=1)
    first = owner.remind()
    assert owner.sent() == [(1, Query)]
    assert owner.remind() > first
    owner.answer(1, 0, Phase.DONE, applied=1, completed=1)
    owner.effects += owner.coordinator.flush()
    assert owner.sent() == [(1, Query)]  # of the reminder before
    assert owner.coordinator.is_idle


def test_what_is_under_way_and_why_work_is_refused_can_be_seen(owner):
    tx = owner.ask(owner.coordinator.grow_credit(CLASSES))
    assert (owner.coordinator.is_idle, owner.coordinator.failed, owner.coordinator.newest_operation) == (False, "", 0)
    owner.all_answer(tx, Phase.DONE)
    owner.coordinator.promise(((0, 1),))
    assert (owner.coordinator.is_idle, owner.coordinator.newest_operation) == (False, 1)
    owner.coordinator.lost(0, "killed")
    assert owner.coordinator.failed == "rank 0 (socket-0): killed"


def test_a_recall_of_some_that_nobody_was_sent_waits_for_the_rest(owner):
    owner.grow()
    owner.coordinator.promise(((0, 1),))
    owner.coordinator.tail()
    owner.coordinator.promise(((1, 1),))
    number = owner.coordinator.recall(((0, 1), (1, 1)), 7)
    assert number == 3
    assert owner.coordinator.credit(1) == 1
    assert [op.runs for op in owner.coordinator.tail()] == [((0, 1),), (), ((0, 1),)]


def test_the_credit_of_a_failed_release_is_not_promised_again(owner):
    owner.grow()
    owner.coordinator.lost(0, "killed")
    tx = owner.ask(owner.coordinator.release_credit(((1, 1),)))
    assert owner.settled() == [(tx, Verdict.BROKEN)]


def test_an_answer_that_contradicts_the_end_fails_the_pool(owner):
    tx = owner.ask(owner.coordinator.shrink(RUNS, 3))
    owner.all_answer(tx, Phase.PREPARED)
    owner.answer(0, tx, Phase.PREPARED)  # late
    assert owner.failures() == []
    owner.answer(0, tx, Phase.ABORTED)
    assert "ABORTED where COMMITTED was due" in owner.failures()[0]


def test_a_rank_that_is_too_far_behind_stops_promises(owner):
    owner.grow(((1, MAX_OPEN_OPS + 1),))
    for page in range(MAX_OPEN_OPS):
        assert owner.coordinator.promise(((page, 1),))
    assert not owner.coordinator.promise(((MAX_OPEN_OPS, 1),))
    assert owner.coordinator.recall(((0, 1),), 0) is None
