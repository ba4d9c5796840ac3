# SPDX-License-Identifier: Apache-2.0
"""The owner's account of credit: what is asked for, when, and what goes back. The coordinator is real; ranks answer by hand."""

import math
import time

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.coordinator import Coordinator, Send, Settle
from kvcached.ranks.credit import CreditAccount
from kvcached.ranks.group import RankGroup
from kvcached.ranks.transactions import Acquire, Answer, Phase, Query, Release
from kvcached.testing.ranks import HELLO, FakeRank
from kvcached.units import MIB
from kvcached.vmm.api import Call

DONE = Outcome(Verdict.DONE)
PAGE = 2 * MIB
WAIT_S = 60
EXHAUSTED = Outcome(Verdict.EXHAUSTED, 3)


class Desk:
    """An account over one rank. `asked`: what the rank was asked and has not answered; `ended`: what claims came to."""

    def __init__(self, ahead_pages):
        self.now_s = 100.0
        self.coordinator = Coordinator(1)
        self.account = CreditAccount(self.coordinator, self.begin, lambda: self.now_s, unit_bytes=10, ahead_pages=ahead_pages)
        self.then = {}
        self.asked = []
        self.ended = []

    def begin(self, asked, then):
        tx, effects = asked
        self.then[tx] = then
        self.follow(effects)

    def follow(self, effects):
        for effect in effects:
            if isinstance(effect, Send):
                self.asked.append(effect.message)
            elif isinstance(effect, Settle):
                self.then.pop(effect.tx)(effect.outcome)

    def answer(self, outcome=DONE):
        """The oldest question. Returns it."""
        message = self.asked.pop(0)
        phase = Phase.DONE if outcome.verdict is Verdict.DONE else Phase.FAILED
        self.follow(self.coordinator.answered(0, Answer(message.tx, phase, outcome, 0, 0)))
        return message

    def claim(self, *need, urgent=True):
        """Claim and, as a group does, promise and fill up."""

        def claimed(outcome):
            self.ended.append(outcome)
            if outcome.verdict is Verdict.DONE:
                first = self.coordinator.newest_operation * 100
                assert self.coordinator.promise(tuple((first + at * 10, pages) for pages, count in need for at in range(count)))
                self.account.fill_up(need)

        self.account.claim(need, urgent, claimed)

    def wishes(self):
        return [(type(message), message.classes, getattr(message, "urgent", None)) for message in self.asked]


@pytest.fixture
def desk():
    return Desk(8)


def test_without_leave_to_ask_ahead_exactly_the_need_is_asked_for():
    desk = Desk(0)
    desk.claim((1, 2))
    assert desk.wishes() == [(Acquire, ((1, 2),), True)]
    desk.answer()
    assert desk.ended == [DONE]
    assert desk.wishes() == []


def test_who_has_to_wait_asks_for_more_and_those_after_it_do_not_wait(desk):
    desk.claim((1, 2))
    assert desk.wishes() == [(Acquire, ((1, 10),), False)]
    desk.answer()
    for _ in range(4):
        desk.claim((1, 1))
    assert desk.ended == [DONE] * 5
    assert desk.wishes() == []


def test_what_is_low_is_filled_up_once_and_nobody_waits_for_it(desk):
    desk.claim((1, 2))
    desk.answer()
    for number in range(7):
        desk.claim((1, 1))
        assert len(desk.ended) == number + 2
    assert desk.wishes() == [(Acquire, ((1, 5),), False)]  # when 3 of 8 were left; one at a time
    desk.answer()
    assert desk.account.spare(1) == 6


def test_a_reserve_asks_for_what_it_is(desk):
    desk.claim((1, 3), urgent=False)
    assert desk.wishes() == [(Acquire, ((1, 3),), False)]


def test_larger_runs_count_as_their_pages(desk):
    desk.claim((4, 1), (16, 1))
    assert desk.wishes() == [(Acquire, ((4, 3), (16, 1)), False)]


def test_where_memory_is_short_the_need_counts_and_nothing_is_asked_ahead_for_a_while(desk):
    desk.claim((1, 2))
    desk.answer(EXHAUSTED)
    assert desk.wishes() == [(Acquire, ((1, 2),), True)]
    assert desk.ended == []
    desk.answer()
    assert desk.ended == [DONE]
    assert desk.wishes() == []
    desk.claim((1, 1))
    assert desk.wishes() == [(Acquire, ((1, 1),), True)]
    desk.answer()
    desk.now_s += 1.0
    desk.claim((1, 1))
    assert desk.wishes() == [(Acquire, ((1, 9),), False)]


def test_a_refusal_tells_what_a_smaller_wish_could_use(desk):
    desk.claim((1, 1))
    desk.answer()
    desk.claim((1, 20))
    desk.answer(EXHAUSTED)
    desk.answer(EXHAUSTED)
    assert desk.ended[-1].verdict is Verdict.EXHAUSTED
    assert desk.ended[-1].size_bytes == 3 + 8 * 10


def test_a_failure_that_is_no_want_of_memory_is_told(desk):
    desk.claim((1, 2))
    desk.answer(Outcome(Verdict.REFUSED))
    assert [outcome.verdict for outcome in desk.ended] == [Verdict.REFUSED]
    assert desk.wishes() == []


def test_a_refused_filling_is_not_repeated_at_once(desk):
    desk.claim((1, 2))
    desk.answer()
    desk.claim((1, 5))
    desk.answer(EXHAUSTED)
    desk.claim((1, 1))
    assert desk.wishes() == []
    desk.now_s += 1.0
    desk.claim((1, 1))
    assert desk.wishes() == [(Acquire, ((1, 7),), False)]


def test_a_trim_takes_all_that_is_spare_and_what_comes_after_it(desk):
    desk.claim((1, 2))
    desk.answer()
    desk.claim((1, 5))  # 3 are left: they are being filled up
    desk.account.trim(desk.ended.append)
    assert desk.wishes() == [(Acquire, ((1, 5),), False), (Release, ((1, 3),), None)]
    desk.answer()
    assert desk.wishes()[-1] == (Release, ((1, 5),), None)
    desk.answer()
    desk.answer()
    assert desk.account.spare(1) == 0
    desk.claim((1, 1))
    assert desk.wishes() == [(Acquire, ((1, 1),), True)]  # who has just been asked for memory takes no more than it needs


def test_a_trim_leaves_what_is_claimed(desk):
    desk.claim((1, 1))
    desk.answer()
    desk.claim((1, 12))  # counts on the 8 that are there
    desk.account.trim(desk.ended.append)
    assert desk.wishes() == [(Acquire, ((1, 12),), False)]


# ---------------------------------------------------------------------- with a group


def eventually(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def pair(tmp_path):
    paths = [tmp_path / f"engine-{rank}.sock" for rank in range(2)]
    ranks = [FakeRank(path, rank, BlockGeometry(PAGE, PAGE, PAGE, 64, 1, 64)) for rank, path in enumerate(paths)]
    group = RankGroup(paths, HELLO, 10, ahead_pages=8)
    group.begin_steps()
    yield group, ranks
    group.close()
    for rank in ranks:
        rank.close()


def test_the_ranks_are_told_before_the_step_and_the_step_finds_it_mapped(pair):
    group, ranks = pair
    assert group.map([(0, 1), (1, 1)], urgent=True).result(WAIT_S) == DONE
    eventually(lambda: all(rank.mapped_pages() == {0, 1} for rank in ranks))
    eventually(lambda: group.step_ops() == ())
    waits = sum(not group.map([(page, 1)], urgent=True).done() for page in range(2, 6))
    assert waits == 0


def test_credit_that_is_low_comes_back_without_a_wish(pair):
    group, ranks = pair
    assert group.map([(0, 1)], urgent=True).result(WAIT_S) == DONE
    assert group.map([(page, 1) for page in range(1, 6)], urgent=True).result(WAIT_S) == DONE  # three of eight are left
    eventually(lambda: group._credit.spare(1) == 8)
    assert all(rank.arena.stats().held_bytes == 14 * PAGE for rank in ranks)


def test_what_no_rank_was_told_of_is_still_taken_back_without_a_call(pair):
    group, ranks = pair
    with group._turn():  # the loop's thread waits for its turn
        mapped = group.map([(0, 1)], urgent=True)
    assert mapped.result(WAIT_S) == DONE
    eventually(lambda: all(rank.mapped_pages() == {0} for rank in ranks))  # told by the loop; a step that is made first would be to tell
    eventually(lambda: group.step_ops() == ())
    with group._turn():
        assert group.map([(1, 1)], urgent=True)
        left = group.unmap([(1, 1)], 0)
    assert left.result(WAIT_S).verdict is Verdict.DONE
    assert [rank.device.calls()[Call.MAP] for rank in ranks] == [1, 1]
    assert all(rank.mapped_pages() == {0} for rank in ranks)


def test_a_map_that_nobody_was_told_of_rides_on_its_step(pair):
    group, ranks = pair
    assert group.map([(0, 1)], urgent=True).result(WAIT_S) == DONE
    sent = []
    with group._turn():
        transmit, group._transmit = group._transmit, lambda link, message, number=0: sent.append(message)
        assert group.map([(1, 1)], urgent=True)
        ops = group.step_ops()
        group._transmit = transmit
    assert any(op.runs == ((1, 1),) for op in ops)
    assert not any(isinstance(message, Query) for message in sent)
    for rank in ranks:
        rank.server.apply_step_ops(ops)
        assert rank.mapped_pages() == {0, 1}


def test_an_idle_engine_gives_all_of_it_back(pair):
    group, ranks = pair
    assert group.map([(0, 1)], urgent=True).result(WAIT_S) == DONE
    assert all(rank.arena.stats().held_bytes == 9 * PAGE for rank in ranks)
    assert group.trim().result(WAIT_S).size_bytes == 8 * PAGE
    assert all(rank.arena.stats().held_bytes == PAGE == rank.book.lease_bytes for rank in ranks)


def test_a_card_that_is_nearly_full_gives_the_need(pair):
    group, ranks = pair
    ranks[1].book.room_bytes = 3 * PAGE
    assert group.map([(page, 1) for page in range(3)], urgent=True).result(WAIT_S) == DONE
    assert all(rank.arena.stats().held_bytes == 3 * PAGE for rank in ranks)
    assert group.map([(9, 1)], urgent=True).result(WAIT_S).verdict is Verdict.EXHAUSTED
    assert math.isfinite(group._credit._modest_until_s)
