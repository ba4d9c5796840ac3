# SPDX-License-Identifier: Apache-2.0
"""An owner over several ranks, with real sockets in one process: all ranks or none, and what rides on steps."""

import math
import queue
import time

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.limits import NO_LIMIT_BYTES, Limits
from kvcached.core.tally import cumulative
from kvcached.errors import DeviceError, HandshakeMismatch, PeerLost, PeerTimeout, StateUnknown
from kvcached.ranks.api import LimitsRequest, Outcome, Report, Verdict
from kvcached.ranks.coordinator import Settle
from kvcached.ranks.group import RankGroup
from kvcached.ranks.messages import TallyRequest
from kvcached.ranks.scale import Scale
from kvcached.ranks.transactions import Query
from kvcached.runtime.pool import Pool, PoolOptions
from kvcached.testing.ranks import HELLO, FakeRank
from kvcached.units import MIB
from kvcached.vmm.api import Call

PAGE = 2 * MIB
PAGES = 32
WAIT_S = 60


def geometry(planes=1, pages=PAGES):
    return BlockGeometry(PAGE // 4, PAGE // 4, PAGE, pages, planes, pages * 4)


class Crew:
    def __init__(self, folder, geometries, **options):
        self.paths = [folder / f"engine-{rank}.sock" for rank in range(len(geometries))]
        rooms = options.pop("rooms", [None] * len(geometries))
        self.ranks = [
            FakeRank(path, rank, shape, room_pages=room, **options)
            for rank, (path, shape, room) in enumerate(zip(self.paths, geometries, rooms, strict=True))
        ]
        self.group = None

    def connect(self):
        self.group = RankGroup(self.paths, HELLO, 10)
        return self

    def step(self, number):
        """What a step does on every rank: the operations that ride on it, then its work."""
        ops = self.group.step_ops()
        for rank in self.ranks:
            rank.server.apply_step_ops(ops)
            rank.gate.submitted(number)

    def mapped(self):
        """The pages that are mapped, the same on every rank."""
        first, *others = [rank.mapped_pages() for rank in self.ranks]
        assert all(other == first for other in others)
        return first

    def held_pages(self):
        return [rank.arena.stats().held_bytes // rank.page_bytes for rank in self.ranks]

    def leased_pages(self):
        return [rank.book.lease_bytes // rank.page_bytes for rank in self.ranks]

    def close(self):
        if self.group is not None:
            self.group.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def crew(tmp_path):
    crews = []

    def make(*geometries, **options):
        crews.append(Crew(tmp_path, geometries or (geometry(), geometry()), **options))
        return crews[-1].connect()

    yield make
    for each in crews:
        each.close()


def eventually(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


def done(future):
    outcome = future.result(WAIT_S)
    assert outcome.verdict is Verdict.DONE, outcome
    return outcome


def test_before_the_first_step_maps_are_made_on_all_ranks_at_once(crew):
    four = crew(*[geometry()] * 4)
    done(four.group.map([(0, 2), (5, 1)], urgent=True))
    assert four.mapped() == {0, 1, 5}
    assert four.held_pages() == four.leased_pages() == [3] * 4
    assert done(four.group.unmap([(0, 2)], 0)).size_bytes == 2 * PAGE
    assert four.mapped() == {5}
    assert four.held_pages() == four.leased_pages() == [1] * 4


def test_a_rank_without_room_leaves_no_rank_changed(crew):
    pair = crew(rooms=[None, 3])
    outcome = pair.group.map([(page, 1) for page in range(4)], urgent=True).result(WAIT_S)
    assert (outcome.verdict, outcome.size_bytes) == (Verdict.EXHAUSTED, 3 * PAGE)
    assert "rank 1" in outcome.reason
    assert pair.mapped() == set()
    assert pair.held_pages() == pair.leased_pages() == [0, 0]
    done(pair.group.map([(page, 1) for page in range(3)], urgent=True))


@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.ACCESS])
def test_a_driver_that_fails_on_one_rank_leaves_no_rank_changed(crew, call):
    pair = crew()
    pair.ranks[1].device.fail(call, 1)
    assert pair.group.map([(0, 1), (3, 1)], urgent=True).result(WAIT_S).verdict is Verdict.EXHAUSTED
    assert pair.mapped() == set()
    assert pair.held_pages() == pair.leased_pages() == [0, 0]
    done(pair.group.map([(0, 1), (3, 1)], urgent=True))


def test_the_ticket_of_a_refused_wish_comes_back_with_the_next(crew):
    pair = crew(rooms=[2, 1])
    pair.ranks[1].book.next_ticket = 77
    assert pair.group.map([(0, 1), (1, 1)], urgent=True).result(WAIT_S).verdict is Verdict.EXHAUSTED
    pair.ranks[1].book.room_bytes = 2 * PAGE
    done(pair.group.map([(0, 1), (1, 1)], urgent=True))
    assert [rank.book.tickets for rank in pair.ranks] == [[77], [77, 77]]


def test_maps_of_a_step_come_from_credit_and_ride_on_it(crew):
    pair = crew()
    pair.group.begin_steps()
    done(pair.group.map([(0, 1), (1, 1)], urgent=True))
    assert pair.mapped() == set()
    assert pair.held_pages() == pair.leased_pages() == [2, 2]
    creates = [rank.device.calls()[Call.CREATE] for rank in pair.ranks]
    pair.step(1)
    assert pair.mapped() == {0, 1}
    assert [rank.device.calls()[Call.CREATE] for rank in pair.ranks] == creates


def test_a_reserve_is_mapped_without_a_step(crew):
    pair = crew()
    pair.group.begin_steps()
    done(pair.group.map([(0, 1), (1, 1)], urgent=False))
    eventually(lambda: pair.ranks[0].mapped_pages() == pair.ranks[1].mapped_pages() == {0, 1})


def test_steady_steps_wait_for_no_rank(crew, monkeypatch):
    """Churn within the reserve: nothing is asked of a rank, and no step brings one anything to do."""
    pair = crew()
    pair.group.begin_steps()
    pool = Pool(pair.group.shared_facts.geometry, pair.group, Limits(PAGES * PAGE), PoolOptions(grow_deadline_s=WAIT_S))
    held = [pool.take(4) for _ in range(8)]
    before = pool.available()
    assert pool.grow_reserve(4, WAIT_S)
    assert pool.available() - before == 4 * 4
    pair.step(1)
    eventually(lambda: pair.group.step_ops() == ())  # the ranks have said that they have mapped it all
    asked = []
    for name in ("map", "unmap", "trim"):
        monkeypatch.setattr(pair.group, name, lambda *_, name=name, **__: asked.append(name))
    for number in range(2, 1002):
        held.append(pool.take(4))
        pool.give(held.pop(0), number - 1)
        assert pair.group.step_ops() == ()
        pool.advance(number - 1)
    assert asked == []
    monkeypatch.undo()


def test_what_no_rank_was_told_of_is_taken_back_without_a_call(crew):
    pair = crew()
    pair.group.begin_steps()
    done(pair.group.map([(0, 1), (1, 1)], urgent=True))
    assert done(pair.group.unmap([(0, 1), (1, 1)], 0)).size_bytes == 2 * PAGE
    assert pair.held_pages() == pair.leased_pages() == [0, 0]
    pair.step(1)
    assert [rank.device.calls()[Call.MAP] for rank in pair.ranks] == [0, 0]


def test_while_steps_run_an_unmap_rides_on_the_next_and_waits_for_the_step_it_names(crew):
    pair = crew()
    pair.group.begin_steps()
    done(pair.group.map([(0, 1), (1, 1)], urgent=True))
    pair.step(1)
    pair.ranks[1].fence.open = False  # its stream is behind
    pair.group.step_ops()
    future = pair.group.unmap([(0, 1)], 1)
    pair.step(2)
    eventually(lambda: pair.ranks[0].mapped_pages() == {1})
    assert pair.ranks[1].mapped_pages() == {0, 1}
    assert not future.done()
    pair.ranks[1].fence.let_go()
    assert done(future).size_bytes == PAGE
    assert pair.mapped() == {1}
    assert pair.held_pages() == pair.leased_pages() == [1, 1]


@pytest.mark.parametrize("refusal", [Verdict.BUSY, Verdict.REFUSED])
def test_what_is_unmapped_everywhere_is_unmapped_also_when_its_credit_cannot_go_yet(crew, monkeypatch, refusal):
    pair = crew()
    pair.group.begin_steps()
    done(pair.group.map([(0, 1)], urgent=True))
    pair.step(1)
    pair.group._last_step_s = math.inf
    monkeypatch.setattr(pair.group._coordinator, "release_credit", lambda _: (0, [Settle(0, Outcome(refusal))]))
    future = pair.group.unmap([(0, 1)], 1)
    pair.step(2)
    done(future)
    assert pair.mapped() == set()
    monkeypatch.undo()
    assert done(pair.group.trim()).size_bytes == PAGE
    assert pair.held_pages() == [0, 0]


def test_limits_that_come_into_force_late_count_here_too(crew):
    pair = crew()
    pool = Pool(pair.group.shared_facts.geometry, pair.group, Limits(PAGES * PAGE))
    with pair.ranks[0].memory._held.lock, pytest.raises(PeerTimeout, match="count from when it does"):
        pool.set_limits(Limits(4 * PAGE, revision=1), deadline_s=0.1)
    eventually(lambda: pool.counts().limit_pages == 4)
    assert pool.limits.revision == 1


def test_an_unmap_for_which_no_step_comes_is_brought_to_the_ranks(crew):
    pair = crew()
    pair.group.begin_steps()
    done(pair.group.map([(0, 1)], urgent=True))
    pair.step(1)
    done(pair.group.unmap([(0, 1)], 1))
    assert pair.mapped() == set()
    assert pair.held_pages() == [0, 0]


def test_an_idle_engine_whose_rank_is_behind_keeps_all_pages_everywhere(crew):
    pair = crew(fence_timeout_s=0.05)
    done(pair.group.map([(0, 1)], urgent=True))
    pair.ranks[1].fence.open = False
    assert pair.group.unmap([(0, 1)], 0).result(WAIT_S).verdict is Verdict.BUSY
    assert pair.mapped() == {0}


def test_an_idle_engine_gives_what_its_ranks_were_told_of_back_in_two_phases(crew):
    pair = crew(fence_timeout_s=0.05)
    pair.group.begin_steps()
    done(pair.group.map([(0, 1)], urgent=False))
    eventually(lambda: pair.ranks[0].mapped_pages() == pair.ranks[1].mapped_pages() == {0})
    pair.ranks[1].fence.open = False
    assert pair.group.unmap([(0, 1)], 0).result(WAIT_S).verdict is Verdict.BUSY
    assert pair.mapped() == {0}


def test_credit_of_another_class_makes_room(crew):
    pair = crew(rooms=[4, 4])
    pair.group.begin_steps()
    done(pair.group.map([(0, 2), (2, 2)], urgent=True))
    pair.group._coordinator.recall([(0, 2), (2, 2)], 0)  # four pages of credit in runs of two
    assert pair.held_pages() == [4, 4]
    done(pair.group.map([(page, 1) for page in range(4)], urgent=True))
    pair.step(1)
    assert pair.mapped() == {0, 1, 2, 3}


def test_a_trim_gives_credit_back_but_not_what_is_promised(crew):
    pair = crew()
    pair.group.begin_steps()
    done(pair.group.map([(0, 1), (1, 1)], urgent=True))
    pair.group._coordinator.recall([(0, 1)], 0)
    assert done(pair.group.trim()).size_bytes == PAGE
    assert pair.held_pages() == pair.leased_pages() == [1, 1]
    pair.step(1)
    assert pair.mapped() == {1}


def test_many_maps_at_once_never_share_credit(crew):
    pair = crew()
    pair.group.begin_steps()
    futures = [pair.group.map([(page, 1)], urgent=True) for page in range(PAGES)]
    for future in futures:
        done(future)
    pair.step(1)
    assert pair.mapped() == set(range(PAGES))


def test_limits_hold_on_all_ranks_or_on_none(crew):
    pair = crew()
    done(pair.group.set_limits(LimitsRequest(20 * PAGE, 2 * PAGE, 1.0, 1)))
    pair.ranks[1].book.limits_error = PeerTimeout("locked")
    outcome = pair.group.set_limits(LimitsRequest(10 * PAGE, PAGE, 2.0, 2)).result(WAIT_S)
    assert outcome.verdict is Verdict.BUSY
    assert "rank 1" in outcome.reason
    assert [rank.book.limits for rank in pair.ranks] == [(20 * PAGE, 2 * PAGE, 1.0, 1)] * 2
    pair.ranks[1].book.limits_error = None
    done(pair.group.set_limits(LimitsRequest(10 * PAGE, PAGE, 2.0, 3)))
    assert [rank.book.limits for rank in pair.ranks] == [(10 * PAGE, PAGE, 2.0, 3)] * 2


def test_a_floor_that_one_rank_refuses_at_the_start_is_nobodys(crew):
    pair = crew()
    pair.ranks[0].book.limits_error = PeerTimeout("locked")
    assert pair.group.set_limits(LimitsRequest(10 * PAGE, PAGE, 1.0, 0)).result(WAIT_S).verdict is Verdict.BUSY
    assert pair.ranks[1].book.limits == (10 * PAGE, 0, 1.0, 0)


def test_stages_of_different_sizes_count_in_pages_of_the_largest(crew):
    small, large = geometry(planes=1), geometry(planes=3)
    pair = crew(small, large, rooms=[8, 4])
    assert pair.group.shared_facts.geometry == large
    outcome = pair.group.map([(page, 1) for page in range(6)], urgent=True).result(WAIT_S)
    assert (outcome.verdict, outcome.size_bytes) == (Verdict.EXHAUSTED, 4 * 3 * PAGE)
    done(pair.group.map([(0, 1), (1, 1)], urgent=True))
    done(pair.group.set_limits(LimitsRequest(30 * PAGE, 3 * PAGE, 1.0, 1)))
    assert [rank.book.limits[:2] for rank in pair.ranks] == [(10 * PAGE, PAGE), (30 * PAGE, 3 * PAGE)]
    pair.group.report(Report(parked_bytes=6 * PAGE))
    eventually(lambda: [rank.book.usage.parked_bytes for rank in pair.ranks] == [2 * PAGE, 6 * PAGE])
    assert pair.group.status(WAIT_S).held_bytes == 2 * 4 * PAGE
    assert [status.held_bytes for status in pair.group.status_by_rank(WAIT_S)] == [2 * PAGE, 6 * PAGE]
    assert done(pair.group.unmap([(0, 1), (1, 1)], 0)).size_bytes == 6 * PAGE


def test_ranks_that_number_their_pages_otherwise_are_refused(crew):
    with pytest.raises(HandshakeMismatch, match="number their pages"):
        crew(geometry(), geometry(pages=16))


def test_a_lost_rank_fails_the_pool_once_and_by_its_name(crew):
    pair = crew()
    told = queue.Queue()
    pair.group.when_lost(told.put)
    pair.ranks[1].fence.open = False
    done(pair.group.map([(0, 1)], urgent=True))
    waiting = pair.group.unmap([(0, 1)], 0)
    pair.ranks[1].server._connection.shutdown(2)
    reason = told.get(timeout=WAIT_S)
    assert "rank 1" in reason
    assert str(pair.paths[1]) in reason
    assert "pid " in reason
    assert waiting.result(WAIT_S).verdict is Verdict.BROKEN
    assert pair.group.map([(1, 1)], urgent=True).result(WAIT_S).verdict is Verdict.BROKEN
    with pytest.raises(PeerLost, match="rank 1"):
        pair.group.status(WAIT_S)
    pair.group.when_lost(told.put)
    assert told.get(timeout=WAIT_S) == reason
    assert told.empty()


def test_a_map_that_was_promised_and_fails_breaks_the_rank_and_with_it_the_pool(crew):
    pair = crew()
    told = queue.Queue()
    pair.group.when_lost(told.put)
    pair.group.begin_steps()
    done(pair.group.map([(0, 1)], urgent=True))
    pair.ranks[1].device.fail(Call.MAP, 1)
    ops = pair.group.step_ops()
    pair.ranks[0].server.apply_step_ops(ops)
    with pytest.raises((StateUnknown, DeviceError), match="promised"):
        pair.ranks[1].server.apply_step_ops(ops)
    assert "rank 1" in told.get(timeout=WAIT_S)


def test_a_promised_unmap_that_fails_on_one_rank_quarantines_its_pages_and_the_pool_goes_on(crew, caplog):
    pair = crew()
    pair.group.begin_steps()
    pool = Pool(pair.group.shared_facts.geometry, pair.group, Limits(PAGES * PAGE), PoolOptions(grow_deadline_s=WAIT_S))
    held = pool.take(8)  # two pages
    pair.step(1)
    pool.give(held, 1)
    pool.advance(1)
    pair.group._last_step_s = math.inf
    pair.ranks[1].device.fail(Call.UNMAP, 1)
    future = pair.group.unmap([(0, 1)], 1)
    pair.step(2)
    outcome = future.result(WAIT_S)
    assert (outcome.verdict, outcome.pages) == (Verdict.UNKNOWN, (0,))
    assert "rank 1" in outcome.reason
    assert "quarantined" in caplog.text
    assert [rank.mapped_pages() for rank in pair.ranks] == [{1}, {0, 1}]
    done(pair.group.map([(5, 1)], urgent=True))
    pair.step(3)
    assert [rank.mapped_pages() for rank in pair.ranks] == [{1, 5}, {0, 1, 5}]
    assert pair.held_pages() == pair.leased_pages() == [3, 3]
    assert pool.failed is None


def test_a_slow_rank_is_waited_for(crew):
    pair = crew()
    pair.ranks[1].memory._held.lock.acquire()
    future = pair.group.map([(0, 1)], urgent=True)
    time.sleep(1.2)  # beyond the first reminders
    assert not future.done()
    pair.ranks[1].memory._held.lock.release()
    done(future)
    assert pair.mapped() == {0}


def test_what_a_rank_does_not_read_in_time_waits_and_nobody_waits_for_it(crew):
    pair = crew()
    done(pair.group.map([(0, 1)], urgent=True))
    pair.ranks[1].memory._held.lock.acquire()
    pair.group.report(Report())  # its reading thread stands still
    link = pair.group._links[1]
    with pair.group._turn():
        for _ in range(2_000):
            pair.group._transmit(link, Query(0))
    assert link.has_waiting
    future = pair.group.map([(1, 1)], urgent=True)
    assert not future.done()
    pair.ranks[1].memory._held.lock.release()
    done(future)
    assert pair.mapped() == {0, 1}
    assert not link.has_waiting


def test_closing_gives_all_memory_back_and_is_no_error(crew, caplog):
    pair = crew()
    done(pair.group.map([(0, 3)], urgent=True))
    pending = pair.group.unmap([(0, 3)], 9)  # no such step comes
    pair.group.close()
    pair.group.close()
    assert pending.result(WAIT_S).verdict is Verdict.BROKEN
    assert [rank.book.closed for rank in pair.ranks] == [True, True]
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


def events(numbers):
    return cumulative(numbers)[1][-1]


def test_each_rank_tells_what_its_work_took(crew):
    pair = crew(geometry(planes=2), geometry())
    assert [tally for tally in pair.group.tally(WAIT_S) if any(map(events, (tally.map, tally.unmap, tally.step)))] == []
    pair.group.begin_steps()
    done(pair.group.map([(0, 1)], urgent=True))
    pair.step(1)
    for rank in pair.ranks:
        rank.server.apply_step_ops(())  # brings nothing, waits for nothing
    tallies = pair.group.tally(WAIT_S)
    assert [events(tally.step) for tally in tallies] == [1, 1]
    assert all(events(tally.map) >= 2 and events(tally.lease) >= 1 and not events(tally.unmap) for tally in tallies)
    unmapped = pair.group.unmap([(0, 1)], 1)
    pair.step(2)
    done(unmapped)
    assert all(events(tally.unmap) for tally in pair.group.tally(WAIT_S))


def test_a_rank_that_owes_its_tally_is_not_asked_again(crew):
    pair = crew()
    asked = []
    send = pair.group._links[1].send
    pair.group._links[1].send = lambda message, number: (
        asked.append(message) or (isinstance(message, TallyRequest) or send(message, number))
    )
    for _ in range(3):
        with pytest.raises(PeerTimeout):
            pair.group.tally(0.01)
    assert asked == [TallyRequest()]
    pair.ranks[1].close()
    with pytest.raises(PeerLost):
        pair.group.tally(WAIT_S)


def test_no_limit_is_none_on_every_rank_whatever_a_page_needs_there():
    scale = Scale((4, 1), 4)
    assert [scale.limits_of(rank, LimitsRequest(NO_LIMIT_BYTES, 8, 1.0, 0)).limit_bytes for rank in (0, 1)] == [NO_LIMIT_BYTES] * 2
    assert [scale.limits_of(rank, LimitsRequest(16, 8, 1.0, 0)).limit_bytes for rank in (0, 1)] == [16, 4]
