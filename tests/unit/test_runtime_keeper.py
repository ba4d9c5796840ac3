# SPDX-License-Identifier: Apache-2.0
"""The keeper, ticked by hand on a clock of our own: reserve, surplus, idle, limits."""

import logging
import threading

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.limits import Limits
from kvcached.core.tally import Eviction
from kvcached.engines.sglang.tree_pool import TreePool
from kvcached.errors import PeerTimeout, SettingError, StateUnknown
from kvcached.ranks.api import Outcome, Verdict, finished
from kvcached.runtime import keeper as keeper_module
from kvcached.runtime.keeper import Keeper, KeeperOptions
from kvcached.runtime.pool import Pool, PoolOptions
from kvcached.units import MIB

PAGE = 2 * MIB
GEOMETRY = BlockGeometry(PAGE // 4, PAGE // 4, PAGE, 64, 1, 256)


class Port:
    """Grants everything within `room_pages` and counts."""

    def __init__(self):
        self.mapped = 0
        self.room_pages = 64
        self.maps = 0
        self.trims = 0
        self.reports = []

    def map(self, runs, *, urgent):
        pages = sum(count for _, count in runs)
        if self.mapped + pages > self.room_pages:
            return finished(Outcome(Verdict.EXHAUSTED, size_bytes=max(0, self.room_pages - self.mapped) * PAGE, reason="full"))
        self.mapped += pages
        self.maps += 1
        return finished(Outcome(Verdict.DONE))

    def unmap(self, runs, after_step):
        pages = sum(count for _, count in runs)
        self.mapped -= pages
        return finished(Outcome(Verdict.DONE, size_bytes=pages * PAGE))

    def trim(self):
        self.trims += 1
        return finished(Outcome(Verdict.DONE))

    def set_limits(self, limits):
        return finished(Outcome(Verdict.DONE))

    def when_lost(self, tell):
        self.tell_lost = tell

    def report(self, report):
        self.reports.append(report)

    def close(self):
        pass


class World:
    def __init__(self, limit_pages=64, press=None, **options):
        self.now = 100.0
        self.port = Port()
        self.pool = Pool(GEOMETRY, self.port, Limits(limit_pages * PAGE), PoolOptions(), press=press)
        self.watched = 0
        self.trouble = None
        self.keeper = Keeper(self.pool, KeeperOptions(**options), clock=lambda: self.now, watch=self._watch)

    def _watch(self):
        self.watched += 1
        if self.trouble:
            raise self.trouble

    def ticks(self, count=1, every_s=0.05):
        for _ in range(count):
            self.now += every_s
            self.keeper.tick()


def test_a_reserve_is_filled_while_the_engine_works_and_takes_then_map_nothing():
    world = World(min_reserved_pages=4, max_reserved_pages=8)
    held = world.pool.take(4)
    world.ticks(3)
    assert world.pool.counts().parked_pages >= 4
    maps = world.port.maps
    more = world.pool.take(12)
    assert world.port.maps == maps
    world.pool.give([*held, *more])


def single_blocks(ranges):
    return [(block, 1) for first, count in ranges for block in range(first, first + count)]


def test_surplus_goes_when_nobody_has_needed_it_for_a_while_and_an_idle_pool_keeps_nothing():
    world = World(min_reserved_pages=2, max_reserved_pages=4, surplus_s=0.25, idle_trim_s=1.0)
    kept, *rest = single_blocks(world.pool.take(80))
    world.ticks(1)
    world.pool.give(rest)
    world.ticks(5)
    assert world.port.mapped >= 20
    world.ticks(2)
    assert world.pool.counts().parked_pages <= 4
    world.pool.give([kept])
    world.ticks(60)
    assert world.port.mapped == 0
    assert world.port.trims == 1


def test_a_wave_that_needs_the_surplus_again_maps_nothing():
    world = World(min_reserved_pages=2, max_reserved_pages=4, surplus_s=0.25)
    kept, *rest = single_blocks(world.pool.take(80))
    world.ticks(1)
    maps = world.port.maps
    for _ in range(4):
        world.pool.give(rest)
        world.ticks(3)
        busy = single_blocks(world.pool.take(79))
        world.ticks(1)
        world.pool.give(busy[8:])
        world.ticks(3)
        rest = [*busy[:8], *single_blocks(world.pool.take(71))]
        world.ticks(1)
    assert world.port.maps <= maps + 1  # the reserve beside it
    world.pool.give([kept, *rest])


def test_what_was_needed_for_a_moment_of_the_while_stays():
    world = World(min_reserved_pages=2, max_reserved_pages=4, surplus_s=0.25)
    kept, *rest = single_blocks(world.pool.take(80))
    world.ticks(1)
    world.pool.give(rest)
    world.ticks(2)
    mapped = world.port.mapped
    busy = world.pool.take(40)
    world.ticks(1)
    world.pool.give(busy)
    world.ticks(4)
    assert mapped - 10 <= world.port.mapped < mapped
    world.pool.give([kept])


@pytest.mark.parametrize("idle_trim_s", [0.0, 60.0])
def test_what_has_come_for_a_request_that_lacks_more_stays_while_it_is_wanted(idle_trim_s):
    world = World(min_reserved_pages=0, max_reserved_pages=2, idle_trim_s=idle_trim_s, wish_s=1.0, press=lambda wanted_bytes, deadline_s: 0)
    world.port.room_pages = 8
    for _ in range(5):
        assert world.pool.grow(4 * 20) in (4 * 8, 0)
        world.ticks(10)
    assert (world.port.maps, world.port.mapped) == (1, 8)
    world.ticks(30)
    assert world.port.mapped <= 2


def test_takes_do_not_wake_the_keeper_of_a_pool_that_can_get_no_more():
    world = World(min_reserved_pages=2, max_reserved_pages=4)
    world.port.room_pages = 8
    woken = []
    world.pool.on_low = lambda: woken.append(world.now)
    held = world.pool.take(30)
    world.ticks(2)
    held += world.pool.take(1)
    assert woken == []
    world.port.room_pages = 9
    world.ticks(8)
    held += world.pool.take(1)
    assert woken == []
    world.port.room_pages = 64
    world.ticks(8)
    held += world.pool.take(16)
    assert woken
    world.pool.give(held)


def test_a_block_that_stands_for_ever_is_no_work():
    world = World(min_reserved_pages=2, max_reserved_pages=4, idle_trim_s=1.0)
    world.pool.grow(1)
    world.pool.take_ids([0])
    world.pool.pin_page_of(0)
    world.ticks(60)
    assert world.port.mapped == 1
    world.pool.take(1)
    world.ticks(60)
    assert world.port.mapped > 1


def test_blocks_that_an_engines_tree_keeps_for_later_are_no_work():
    world = World(min_reserved_pages=2, max_reserved_pages=4, idle_trim_s=1.0)
    tree = TreePool.adopt(world.pool, threading.RLock())
    tree.take(4)
    world.ticks(60)
    assert world.port.mapped > 1
    tree.kept_blocks = lambda: 4
    world.ticks(60)
    assert world.port.mapped == 1


def test_what_a_tree_gives_up_for_others_is_counted_once():
    world = World(min_reserved_pages=0, max_reserved_pages=0)
    tree = TreePool.adopt(world.pool, threading.RLock())
    kept = tree.take(8)

    def reclaim(blocks, why):
        tree.give(kept)
        gone = sum(count for _, count in kept)
        kept.clear()
        return gone

    tree.reclaim, tree.kept_blocks = reclaim, lambda: sum(count for _, count in kept)
    tree.free_pages(1, Eviction.PRESSURE)
    tree.free_pages(64, Eviction.LIMIT)  # it has nothing more to give
    assert {why: blocks for why, blocks in tree.tally.evicted_blocks.items() if blocks} == {Eviction.PRESSURE: 8}


def test_a_pool_at_rest_keeps_no_reserve_until_blocks_are_taken():
    world = World(min_reserved_pages=4, max_reserved_pages=8, idle_trim_s=10.0)
    world.pool.give(world.pool.take(4))
    world.ticks(3)
    world.keeper.rest()
    world.ticks(3)
    assert world.port.mapped == 0
    world.pool.take(4)
    world.ticks(3)
    assert world.pool.counts().parked_pages >= 4


def test_a_wish_to_rest_counts_for_a_look_that_has_decided_to_map():
    world = World(min_reserved_pages=4, max_reserved_pages=8, idle_trim_s=10.0)
    world.pool.give(world.pool.take(4))
    grow = world.pool.grow_reserve

    def rest_and_grow(pages, **how):
        world.keeper.rest()
        world.pool.shrink(64)
        return grow(pages, **how)

    world.pool.grow_reserve = rest_and_grow
    world.ticks()
    assert world.port.mapped == 0


def test_what_a_look_is_mapping_is_there_for_who_wished_to_rest():
    world = World(min_reserved_pages=4, max_reserved_pages=8, idle_trim_s=10.0)
    inside, go_on = threading.Event(), threading.Event()
    map_now, world.pool.await_maps = world.port.map, let_go_first(world.pool.await_maps, go_on)

    def late_map(runs, *, urgent):
        inside.set()
        assert go_on.wait(60)
        return map_now(runs, urgent=urgent)

    world.port.map = late_map
    looking = threading.Thread(target=world.ticks)
    looking.start()
    assert inside.wait(60)
    world.keeper.rest()
    assert world.pool.shrink(64) == 4 * PAGE
    looking.join(60)
    assert world.port.mapped == 0


def let_go_first(await_maps, go_on):
    """However busy the machine is, it waits until the map has ended."""

    def wait(deadline):
        go_on.set()
        await_maps(deadline + 60)

    return wait


def test_what_was_taken_before_the_wish_to_rest_is_no_work_after_it():
    world = World(min_reserved_pages=4, max_reserved_pages=8, idle_trim_s=10.0)
    ids = [block for first, count in world.pool.take(4) for block in range(first, first + count)]
    world.pool.give_cached(ids, -1, last_use=1)
    world.keeper.rest()
    world.ticks(3)
    assert world.port.mapped == 1


def test_giving_the_last_blocks_back_is_no_work():
    world = World(min_reserved_pages=4, max_reserved_pages=8, idle_trim_s=10.0)
    ranges = world.pool.take(4)
    world.ticks(3)
    world.pool.give(ranges)
    world.keeper.rest()
    world.ticks(3)
    assert world.port.mapped == 0


def test_what_was_counted_before_the_rest_is_no_work_after_it():
    world = World(min_reserved_pages=4, max_reserved_pages=8, idle_trim_s=10.0)
    ranges = world.pool.take(4)
    world.ticks(3)
    count, counted, rested = world.pool.counts, threading.Event(), threading.Event()

    def counts():
        seen = count()
        counted.set()
        rested.wait(0.3)  # in vain where the rest waits for the look
        return seen

    world.pool.counts = counts
    looking = threading.Thread(target=world.keeper.tick)
    looking.start()
    counted.wait()
    world.pool.counts = count
    world.pool.give(ranges)
    world.keeper.rest()
    rested.set()
    looking.join()
    world.ticks(3)
    assert world.port.mapped == 0


def test_pages_that_retire_late_leave_no_handles_behind():
    world = World(min_reserved_pages=0, max_reserved_pages=0, idle_trim_s=1.0)
    world.pool.give(world.pool.take(8), 5)  # step 5 may still read them
    world.ticks(60)
    assert (world.port.mapped, world.port.trims) == (2, 1)
    world.pool.advance(5)
    world.ticks(2)
    assert (world.port.mapped, world.port.trims) == (0, 2)


def test_a_limit_is_not_enforced_by_two_and_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(keeper_module, "_ENFORCE_TIMEOUT_S", 0.01)
    world = World(min_reserved_pages=0, max_reserved_pages=64)
    world.pool.grow(64)
    world.pool.set_limits(Limits(4 * PAGE, revision=1))
    with world.keeper._enforcing:
        world.keeper.enforce_limit()
        assert world.port.mapped == 16
    world.keeper.enforce_limit()
    assert world.port.mapped == 4


def test_a_low_reserve_wakes_the_keeper():
    world = World(min_reserved_pages=4, max_reserved_pages=8)
    world.pool.take(4)
    world.ticks(2)
    assert not world.keeper._wake.is_set()
    world.pool.take(16)
    assert world.keeper._wake.is_set()


def test_a_full_card_is_not_asked_at_every_tick():
    world = World(min_reserved_pages=4, max_reserved_pages=8)
    world.pool.take(4)
    world.port.room_pages = 1
    asked = []
    grow = world.pool.grow_reserve
    world.pool.grow_reserve = lambda pages, **how: asked.append(pages) or grow(pages, **how)
    world.ticks(20)
    assert len(asked) == 4  # 20 ticks of 50 ms, one question each 250 ms


def test_a_lower_limit_takes_parked_pages_then_cached_blocks_never_owned_ones():
    world = World(limit_pages=64, min_reserved_pages=0, max_reserved_pages=64)
    evicted = []
    world.pool.on_evict = evicted.extend
    owned = world.pool.take(40)
    cached = [block for first, count in world.pool.take(40) for block in range(first, first + count)]
    world.pool.give_cached(cached, -1, last_use=1)
    world.pool.set_limits(Limits(12 * PAGE, revision=1))
    world.ticks()
    assert len(evicted) == 32
    assert world.port.mapped == 12
    world.pool.set_limits(Limits(2 * PAGE, revision=2))
    world.ticks()
    assert world.port.mapped == 10
    assert world.pool.overage_pages() == 8
    world.pool.give(owned)
    world.ticks()
    assert world.port.mapped == 2


def test_reports_come_at_a_pace_and_the_watch_with_them():
    world = World()
    world.ticks(16, every_s=0.125)
    assert len(world.port.reports) == world.watched == 8  # every 0.25 s


@pytest.mark.parametrize("error", [PeerTimeout("the endpoint's lock is held"), FileNotFoundError("gone"), SettingError("mode")])
def test_trouble_with_being_seen_says_nothing_about_the_memory(error, caplog):
    world = World()
    world.trouble = error
    world.ticks(16, every_s=0.125)
    assert len([record for record in caplog.records if "cannot be seen" in record.message]) == 1
    world.trouble = None
    assert world.pool.take(4)


def test_a_keeper_that_dies_takes_the_pool_with_it():
    world = World(tick_s=0.001, idle_tick_s=0.001)
    world.keeper.tick = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        world.keeper._run()
    with pytest.raises(StateUnknown, match="ZeroDivisionError"):
        world.pool.take(1)


@pytest.mark.parametrize(("known", "level"), [(True, logging.INFO), (False, logging.ERROR)])
def test_the_keeper_of_a_pool_that_has_failed_adds_no_error_of_its_own(known, level, caplog):
    world = World(tick_s=0.001, idle_tick_s=0.001)
    if known:
        world.pool.fail("rank 1 is gone")
    else:
        world.keeper.tick = lambda: (_ for _ in ()).throw(StateUnknown("rank 1 is gone"))
    with caplog.at_level(logging.INFO, "kvcached"):
        world.keeper._run()
    assert [(record.levelno, "rank 1 is gone" in record.message) for record in caplog.records] == [(level, True)]
    assert "rank 1 is gone" in str(world.pool.failed)


def test_a_failure_in_the_thread_reaches_the_next_caller():
    world = World(min_reserved_pages=1, max_reserved_pages=1, tick_s=0.001, idle_tick_s=0.001)
    world.keeper.tick = lambda: (_ for _ in ()).throw(StateUnknown("lost"))
    world.keeper.start()
    world.keeper._thread.join(10)
    assert not world.keeper._thread.is_alive()
    world.pool.fail("lost")
    with pytest.raises(StateUnknown):
        world.pool.take(1)
    world.keeper.stop()
