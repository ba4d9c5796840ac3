# SPDX-License-Identifier: Apache-2.0
"""The pool over a real mapper and a fake device: all or nothing, pressure is a miss, unknown state is the end."""

import os
import threading
from concurrent.futures import Future

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.limits import Limits
from kvcached.core.tally import Eviction, Tally, cumulative
from kvcached.errors import Misuse, PeerLost, PeerRefused, PeerTimeout, PoolExhausted, StateUnknown
from kvcached.ranks.api import Outcome, Verdict, finished
from kvcached.runtime.pool import Pool, PoolOptions
from kvcached.testing.consistency import must_be_consistent
from kvcached.units import MIB

PAGE = 2 * MIB
GEOMETRY = BlockGeometry(PAGE // 4, PAGE // 4, PAGE, 32, 1, 128)


class Port:
    """A mapper double that keeps the set of mapped pages, checks what it is asked, and answers as it is told."""

    def __init__(self, room_pages=32):
        self.room_pages = room_pages
        self.mapped = set()
        self.calls = []
        self.next_outcome = None
        self.held_back = None
        self.reports = []
        self.limits = []
        self.limits_outcome = Outcome(Verdict.DONE)

    def _answer(self, name, runs, change):
        self.calls.append((name, list(runs)))
        if self.held_back is not None:
            future = Future()
            self.held_back.append((future, change))
            return future
        if self.next_outcome is not None:
            outcome, self.next_outcome = self.next_outcome, None
            return finished(outcome) if isinstance(outcome, Outcome) else outcome
        return finished(change())

    def map(self, runs, *, urgent):
        pages = {page for first, count in runs for page in range(first, first + count)}
        assert not pages & self.mapped

        def change():
            if len(self.mapped) + len(pages) > self.room_pages:
                free = self.room_pages - len(self.mapped)
                return Outcome(Verdict.EXHAUSTED, size_bytes=free * PAGE, reason="the card's budget is leased")
            self.mapped.update(pages)
            return Outcome(Verdict.DONE)

        return self._answer("map", runs, change)

    def unmap(self, runs, after_step):
        pages = {page for first, count in runs for page in range(first, first + count)}
        assert pages <= self.mapped

        def change():
            self.mapped.difference_update(pages)
            return Outcome(Verdict.DONE, size_bytes=len(pages) * PAGE)

        return self._answer("unmap", runs, change)

    def trim(self):
        return finished(Outcome(Verdict.DONE))

    def set_limits(self, limits):
        self.limits.append(limits)
        return finished(self.limits_outcome)

    def when_lost(self, tell):
        self.tell_lost = tell

    def report(self, report):
        self.reports.append(report)

    def close(self):
        self.calls.append(("close", []))

    def release(self):
        """Answer everything that was held back."""
        waiting, self.held_back = self.held_back, None
        for future, change in waiting:
            future.set_result(change())


@pytest.fixture
def port():
    return Port()


def make(port, limit_pages=32, **options):
    press = options.pop("press", None)
    adopted = options.pop("adopted_pages", 0)
    return Pool(GEOMETRY, port, Limits(limit_pages * PAGE), PoolOptions(**options), adopted_pages=adopted, press=press)


def lost(message="gone"):
    future = Future()
    future.set_exception(PeerLost(message))
    return future


def test_blocks_are_handed_out_only_on_mapped_pages(port):
    pool = make(port)
    ranges = pool.take(6)
    assert sum(count for _, count in ranges) == 6
    assert {GEOMETRY.page_of(block) for first, count in ranges for block in range(first, first + count)} <= port.mapped
    pool.give(ranges)
    calls = len(port.calls)
    pool.give(pool.take(6))
    assert len(port.calls) == calls  # warm: no call
    must_be_consistent(pool)


def test_a_take_beyond_the_limit_is_a_miss_that_changes_nothing(port):
    pool = make(port, limit_pages=3)
    kept = pool.take(8)
    before = pool.counts()
    with pytest.raises(PoolExhausted, match="at its limit"):
        pool.take(5)
    after = pool.counts()
    assert (after.owned_blocks, after.cached_blocks) == (before.owned_blocks, before.cached_blocks)
    pool.give(kept)
    assert sum(count for _, count in pool.take(12)) == 12
    must_be_consistent(pool)


def test_above_a_lower_limit_cached_blocks_make_room_for_what_fits_within_it(port):
    pool = make(port)
    ids = [block for first, count in pool.take(16) for block in range(first, first + count)]
    pool.give_cached(ids[:8], -1, last_use=1)
    pool.set_limits(Limits(3 * PAGE, revision=1))
    assert (pool.reachable(), pool.obtainable()) == (4, 4)
    evicted = []
    pool.on_evict = evicted.extend
    with pytest.raises(PoolExhausted, match="at its limit"):
        pool.take(5)
    assert evicted == []  # for what cannot be had nothing is lost
    assert sum(count for _, count in pool.take(4)) == 4
    assert len(evicted) == 8
    must_be_consistent(pool)


def test_when_the_card_has_less_than_asked_all_that_is_there_is_used(port):
    port.room_pages = 5
    pool = make(port)
    pool.take(12)
    with pytest.raises(PoolExhausted, match="budget is leased"):
        pool.take(9)
    assert pool.available() == 8
    assert sum(count for _, count in pool.take(8)) == 8


def test_pressure_is_asked_for_what_is_missing_and_then_the_take_succeeds(port):
    asked = []

    def press(wanted_bytes, deadline_s):
        asked.append(wanted_bytes)
        port.room_pages = 32
        return wanted_bytes

    port.room_pages = 2
    pool = make(port, press=press)
    assert sum(count for _, count in pool.take(20)) == 20
    assert asked == [3 * PAGE]


def test_cached_blocks_are_evicted_only_when_nothing_else_is_left(port):
    pool = make(port, limit_pages=2)
    evicted = []
    pool.on_evict = evicted.extend
    ranges = pool.take(4)
    ids = [block for first, count in ranges for block in range(first, first + count)]
    pool.give_cached(ids, -1, last_use=1)
    pool.take(4)
    assert evicted == []
    pool.take(3)
    assert len(evicted) == 3
    assert set(evicted) < set(ids)
    must_be_consistent(pool)


def test_a_refusal_is_not_asked_for_at_every_take_that_the_cache_can_serve(port):
    asked = []
    port.room_pages = 2
    pool = make(port, press=lambda wanted_bytes, deadline_s: asked.append(wanted_bytes) or 0, refusal_pause_s=3600)
    ids = [block for first, count in pool.take(8) for block in range(first, first + count)]
    pool.give_cached(ids, -1, last_use=1)
    for _ in range(8):
        pool.take(1)
    assert len([call for call in port.calls if call[0] == "map"]) == 2
    assert asked == []  # the own cache goes before anyone else's memory
    with pytest.raises(PoolExhausted):
        pool.take(1)
    assert asked == [PAGE]


def test_the_bound_of_the_prefix_cache_holds(port):
    pool = make(port, max_cached_blocks=3)
    evicted = []
    pool.on_evict = evicted.extend
    ids = [block for first, count in pool.take(8) for block in range(first, first + count)]
    pool.give_cached(ids, -1, last_use=1)
    assert len(evicted) == 5
    assert pool.counts().cached_blocks == 3


def test_a_page_behind_work_in_flight_is_not_unmapped_but_may_be_taken_again(port):
    pool = make(port)
    ranges = pool.take(4)
    pool.give(ranges, marker=7)
    assert pool.shrink(10) == 0
    assert pool.take(4) == ranges
    pool.give(ranges, marker=8)
    pool.advance(7)
    assert pool.shrink(10) == 0
    pool.advance(8)
    assert pool.shrink(10) == PAGE
    assert port.mapped == set()


def test_a_slow_answer_is_a_miss_now_and_settled_later(port):
    pool = make(port, grow_deadline_s=0.01)
    port.held_back = []
    with pytest.raises(PoolExhausted):
        pool.take(4)
    assert pool.counts().mapping_pages == 1
    port.release()
    assert pool.counts().mapping_pages == 0
    assert pool.available() == 4
    must_be_consistent(pool)


def test_an_answer_at_the_last_moment_is_told_only_when_it_is_in_the_ledger(port):
    class Late(Future):
        looks = 0

        def done(self):
            self.looks += 1
            if self.looks == 3:
                self.set_result(Outcome(Verdict.DONE))
            return super().done()

    pool = make(port)
    port.next_outcome = Late()
    assert pool.grow_reserve(1, deadline_s=0.01) <= (pool.ledger.parked_pages == 1)
    assert port.calls == [("map", [(0, 1)])]


def test_a_slow_answer_does_not_need_the_lock_that_the_engine_holds(port):
    pool = make(port, grow_deadline_s=5)
    port.held_back = []
    timer = threading.Timer(0.1, port.release)
    with pool.lock:
        timer.start()
        assert sum(count for _, count in pool.take(4)) == 4


def test_pages_on_their_way_out_are_waited_for_where_the_limit_needs_them(port):
    pool = make(port, limit_pages=2, grow_deadline_s=20)
    pool.give(pool.take(8))
    port.held_back = []
    shrinking = threading.Thread(target=pool.shrink, args=(2,), kwargs={"deadline_s": 20})
    shrinking.start()
    while not port.held_back:
        pass
    threading.Timer(0.05, port.release).start()
    assert sum(count for _, count in pool.take(8)) == 8
    shrinking.join()
    must_be_consistent(pool)


def test_busy_keeps_the_pages(port):
    pool = make(port)
    pool.give(pool.take(4))
    port.next_outcome = Outcome(Verdict.BUSY, reason="work in flight")
    assert pool.shrink(10) == 0
    assert pool.available() == 4
    assert pool.failed is None


def test_named_unknown_pages_are_quarantined_and_the_pool_goes_on(port):
    pool = make(port)
    port.next_outcome = Outcome(Verdict.UNKNOWN, pages=(0,), reason="undo failed")
    with pytest.raises(PoolExhausted, match="undo failed"):
        pool.take(4)
    ranges = pool.take(4)
    assert pool.counts().quarantined_pages == 1
    assert all(GEOMETRY.page_of(first) != 0 for first, _ in ranges)
    must_be_consistent(pool)


@pytest.mark.parametrize("outcome", [Outcome(Verdict.BROKEN), Outcome(Verdict.UNKNOWN), Outcome(Verdict.REFUSED), lost()])
def test_an_unknown_outcome_is_never_success_and_the_pool_refuses_from_there_on(port, outcome):
    pool = make(port)
    kept = pool.take(4)
    port.next_outcome = outcome
    with pytest.raises(StateUnknown):
        pool.take(8)
    with pytest.raises(StateUnknown):
        pool.take(1)
    with pytest.raises(StateUnknown):
        pool.shrink(1)
    pool.give(kept)  # giving back is always possible
    pool.close()


def test_adopted_pages_are_there_without_a_call_and_the_null_block_stays(port):
    port.mapped = {0, 1}
    pool = make(port, adopted_pages=2)
    pool.take_ids([0])
    pool.pin_page_of(0)
    assert port.calls == []
    assert pool.shrink(10) == PAGE
    assert port.mapped == {0}
    assert all(0 not in range(first, first + count) for first, count in pool.take(100))


def test_a_limit_that_cannot_hold_what_is_mapped_is_refused(port):
    with pytest.raises(Misuse, match="below the 3 pages"):
        make(port, limit_pages=2, adopted_pages=3)


def test_every_id_once_after_shrinking_and_growing(port):
    pool = make(port, limit_pages=32)
    kept = pool.take(40)
    pool.set_limits(Limits(4 * PAGE, revision=1))
    assert pool.overage_pages() == 6
    with pytest.raises(PoolExhausted):
        pool.take(1)
    pool.give(kept[:1])
    pool.shrink(pool.overage_pages())
    pool.set_limits(Limits(32 * PAGE, revision=2))
    rest = pool.take(128 - sum(count for _, count in kept[1:]))
    ids = [block for first, count in [*kept[1:], *rest] for block in range(first, first + count)]
    assert sorted(ids) == list(range(128))


def test_a_take_that_fills_a_large_run_gets_one_and_it_leaves_as_a_whole(port):
    pool = make(port, large_run_pages=8)
    ranges = pool.take(8 * 4)
    assert port.calls == [("map", [(0, 8)])]
    pool.give(ranges)
    assert pool.shrink(1) == 8 * PAGE
    pool.take(7 * 4)
    assert {count for _, count in port.calls[-1][1]} == {1}


def test_obtainable_and_max_blocks_follow_limit_and_range(port):
    pool = make(port, limit_pages=3)
    assert (pool.obtainable(), pool.max_blocks()) == (12, 12)
    pool.take(5)
    assert pool.obtainable() == 7
    pool.set_limits(Limits(1000 * PAGE, revision=1))
    assert pool.max_blocks() == 128


def test_who_holds_the_lock_waits_for_a_map_of_another_thread_and_maps_no_more_than_is_missing(port):
    pool = make(port, limit_pages=4, grow_deadline_s=3600.0)
    inside, go_on = threading.Event(), threading.Event()

    class SlowMap:
        def __call__(self, runs, *, urgent):
            inside.set()
            go_on.wait(60)
            return Port.map(port, runs, urgent=urgent)

    port.map = SlowMap()
    other = threading.Thread(target=lambda: pool.grow_reserve(3, deadline_s=3600))
    other.start()
    inside.wait(60)
    port.map = lambda runs, *, urgent: Port.map(port, runs, urgent=urgent)
    with pool.lock:
        assert pool.obtainable() == 16
        threading.Timer(0.05, go_on.set).start()
        pool.give(pool.take(12))
    other.join(60)
    assert len(port.mapped) == 3


def test_pages_on_their_way_out_can_be_had_again(port):
    pool = make(port, limit_pages=3)
    pool.give(pool.take(12))
    port.held_back = []
    assert pool.shrink(2, deadline_s=0) == 0
    assert pool.available() == 4
    assert pool.obtainable() == 12


def test_limits_that_the_card_refuses_change_nothing(port):
    pool = make(port, limit_pages=4)
    before = pool.limits
    port.limits_outcome = Outcome(Verdict.REFUSED, reason="the floor does not fit")
    with pytest.raises(PeerRefused, match="does not fit"):
        pool.set_limits(Limits(8 * PAGE, 8 * PAGE, revision=1))
    port.limits_outcome = Outcome(Verdict.BUSY, reason="the lock is held")
    with pytest.raises(PeerTimeout, match="lock"):
        pool.set_limits(Limits(8 * PAGE, 8 * PAGE, revision=1))
    assert (pool.limits, pool.counts().limit_pages) == (before, 4)


def test_what_others_never_give_up_bounds_what_the_pool_can_ever_hold(port):
    pool = make(port, limit_pages=32)
    pool.ceiling_bytes = 5 * PAGE
    assert pool.max_blocks() == 20


def test_a_lost_mapper_ends_warm_takes_too(port):
    pool = make(port)
    pool.give(pool.take(8))
    port.tell_lost("the mapper is gone")
    with pytest.raises(StateUnknown, match="the mapper is gone"):
        pool.take(1)


def test_a_mapper_that_raises_leaves_no_plan_open_and_the_pool_refuses(port):
    pool = make(port)
    pool.give(pool.take(4))
    port.unmap = lambda runs, after_step: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pool.shrink(4)
    assert pool.counts().unmapping_pages == 0
    with pytest.raises(StateUnknown, match="ZeroDivisionError"):
        pool.take(1)


def test_a_forked_child_takes_nothing(port):
    pool = make(port)
    pool.give(pool.take(8))
    child = os.fork()
    if child == 0:
        try:
            pool.take(1)
        except Misuse:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert pool.take(1)


def test_a_reserve_does_not_wait_for_pages_on_their_way_out(port):
    pool = make(port, limit_pages=2)
    pool.give(pool.take(8))
    port.held_back = []
    assert pool.shrink(2, deadline_s=0) == 0
    assert not pool.grow_reserve(2, deadline_s=3600)
    port.release()


def test_sets_are_taken_and_given_as_ranges_are(port):
    pool = make(port, limit_pages=2)
    assert pool.take_sets(6) == ([(0, 6)], [])  # maps pages
    assert port.mapped == {0, 1}
    pool.give_sets([(0, 0b0101), (1, 0b0001)])
    with pytest.raises(PoolExhausted):
        pool.take_sets(6)
    assert pool.take_sets(5) == ([], [(1, 0b1101), (0, 0b0101)])
    must_be_consistent(pool)
    low = []
    pool.low_mark_pages, pool.on_low = 1, lambda: low.append(1)
    pool.give_sets([(0, 0b1111)])
    assert pool.take_sets(2) == ([(0, 2)], [])
    assert low == [1]
    pool.close()
    with pytest.raises(Misuse, match="closed"):
        pool.take_sets(1)


def test_a_closed_pool_refuses_and_a_second_close_does_nothing(port):
    pool = make(port)
    pool.close()
    pool.close()
    assert port.calls == [("close", [])]
    with pytest.raises(Misuse, match="closed"):
        pool.take(1)


def test_a_limit_below_the_floor_lowers_what_is_claimed_until_it_rises_again(port):
    pool = make(port, limit_pages=32)
    for limit_pages, claimed_pages in ((32, 8), (3, 3), (16, 8)):
        pool.set_limits(Limits(limit_pages * PAGE, floor_bytes=8 * PAGE, revision=pool.limits.revision + 1))
        assert port.limits[-1].floor_bytes == claimed_pages * PAGE


def test_what_happens_is_counted(port):
    given = []
    port.room_pages = 2
    pool = make(port, limit_pages=4, max_cached_blocks=2, press=lambda wanted_bytes, deadline_s: given.append(wanted_bytes) or 0)
    tally = pool.tally
    assert tally == Tally(waits=tally.waits)
    ranges = pool.take(8)
    assert cumulative(tally.waits.numbers())[1][-1] == 1
    with pytest.raises(PoolExhausted):
        pool.take(4)  # the card has no more
    assert (tally.misses, tally.refusals, tally.presses, tally.taken_bytes) == (1, 1, 1, 0)
    with pytest.raises(PoolExhausted):
        pool.take(16)  # the limit allows no more: nobody is asked
    assert (tally.misses, tally.refusals, tally.presses, given) == (2, 1, 1, [PAGE])
    ids = [block for first, count in ranges for block in range(first, first + count)]
    pool.give_cached(ids[:4], -1, 1)
    pool.evict(pool.ledger.victims_for_blocks(1))
    assert {why: blocks for why, blocks in tally.evicted_blocks.items() if blocks} == {Eviction.CAP: 2, Eviction.ENGINE: 1}
    pool.free_pages(1, Eviction.PRESSURE)
    pool.take(4)
    assert tally.evicted_blocks[Eviction.PRESSURE] + tally.evicted_blocks[Eviction.NEED] == 1


def test_what_others_gave_is_taken(port):
    port.room_pages = 0

    def press(wanted_bytes, deadline_s):
        port.room_pages = 1
        return wanted_bytes + PAGE

    pool = make(port, press=press)
    pool.take(4)
    assert (pool.tally.presses, pool.tally.taken_bytes, pool.tally.refusals) == (1, 2 * PAGE, 1)
    assert pool.tally.misses == 0


def test_requests_put_back_are_avoidable_while_others_can_give_a_page(port):
    pool = make(port)
    for spare_bytes, requests in ((PAGE - 1, 2), (PAGE, 3), (PAGE, 0)):
        pool.others_spare_bytes = lambda spare_bytes=spare_bytes: spare_bytes
        pool.note_preemptions(requests)
    assert (pool.tally.preemptions, pool.tally.avoidable_preemptions) == (5, 3)
