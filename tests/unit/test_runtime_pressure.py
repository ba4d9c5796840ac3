# SPDX-License-Identifier: Apache-2.0
"""What a pool gives when others press, while what it gave before is still on its way out."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.limits import Limits
from kvcached.ranks.api import Outcome, Verdict, finished
from kvcached.ranks.facts import MapperFacts
from kvcached.runtime.keeper import Keeper, KeeperOptions
from kvcached.runtime.operations import PoolOperations
from kvcached.runtime.pool import Pool, PoolOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ranks.api import Report, Runs

PAGE = 1 << 21
GEOMETRY = BlockGeometry(PAGE, PAGE, PAGE, 32, 1, 32)


class SlowPort:
    """Maps at once; unmaps when the test says so, or `at_once`. `keeps` the handles until it is trimmed."""

    def __init__(self) -> None:
        self.at_once = False
        self.keeps = False
        self.kept_pages = 0
        self.leaving: list[tuple[int, Future[Outcome]]] = []

    def map(self, runs: Runs, *, urgent: bool) -> Future[Outcome]:
        return finished(Outcome(Verdict.DONE))

    def unmap(self, runs: Runs, after_step: int) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self.leaving.append((sum(count for _, count in runs), future))
        if self.at_once:
            self.finish()
        return future

    def finish(self) -> None:
        for pages, future in self.leaving:
            self.kept_pages += pages if self.keeps else 0
            future.set_result(Outcome(Verdict.DONE, size_bytes=0 if self.keeps else pages * PAGE))
        self.leaving.clear()

    def trim(self) -> Future[Outcome]:
        pages, self.kept_pages = self.kept_pages, 0
        return finished(Outcome(Verdict.DONE, size_bytes=pages * PAGE))

    def when_lost(self, tell: object) -> None: ...

    def report(self, report: Report) -> None: ...


class World:
    """A pool of 20 cached blocks, each on its own page, above a floor of 14."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = SlowPort()
        self.pool = Pool(GEOMETRY, self.port, Limits(32 * PAGE, floor_bytes=14 * PAGE), PoolOptions())  # type: ignore[arg-type]
        self.keeper = Keeper(self.pool, KeeperOptions())
        facts = MapperFacts(GEOMETRY, 0, "CARD", 32 * PAGE)
        self.operations = PoolOperations(self.pool, self.keeper, facts, instance="chat", name="chat")
        unmap = self.pool.unmap
        monkeypatch.setattr(self.pool, "unmap", lambda planned, *_: unmap(planned, 0.01))
        self.ids = [block for first, count in self.pool.take(20) for block in range(first, first + count)]

    def cache(self) -> None:
        self.pool.give_cached(self.ids, 0, 1)
        self.pool.advance(0)


class WaitedFor:
    """A lock for which another thread waits: `waiter` has it between two callers of the pool's."""

    def __init__(self, lock: threading.RLock, waiter: Callable[[], None]) -> None:
        self._lock = lock
        self._waiter: Callable[[], None] | None = waiter
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._depth += 1
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()
        self._depth -= 1
        if not self._depth and self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            waiter()
            self._waiter = waiter

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_who_asks_again_because_it_took_long_does_not_get_it_twice(world: World) -> None:
    world.cache()
    assert world.operations.pressure(4 * PAGE).given_bytes == 0
    assert world.pool.counts().cached_blocks == 16
    for _ in range(5):
        assert world.operations.pressure(4 * PAGE).given_bytes == 0
    assert (world.pool.counts().cached_blocks, [pages for pages, _ in world.port.leaving]) == (16, [4])
    world.port.finish()
    assert world.operations.pressure(4 * PAGE).given_bytes == 0
    assert world.pool.counts().cached_blocks == 14


def test_a_floor_of_cached_blocks_stays_however_often_others_ask(world: World) -> None:
    world.cache()
    for wanted in (2, 4, 6, 8, 20, 20):
        world.operations.pressure(wanted * PAGE)
    assert world.pool.counts().cached_blocks == 14
    world.port.finish()
    world.operations.pressure(20 * PAGE)
    assert world.pool.counts().cached_blocks == 14


def test_pages_behind_a_step_do_not_count_as_what_stays(world: World) -> None:
    kept, going = world.ids[:16], world.ids[16:]
    world.pool.give_cached(kept, 0, 1)
    world.pool.advance(0)
    world.pool.give([(block, 1) for block in going], 5)
    world.operations.pressure(20 * PAGE)
    assert world.pool.counts().cached_blocks == 14


@pytest.mark.parametrize("order", ["evict", "pressure"])
def test_handles_of_what_was_evicted_are_not_kept_for_reuse_but_given(world: World, order: str) -> None:
    world.port.at_once = world.port.keeps = True
    world.cache()
    assert getattr(world.operations, order)(4 * PAGE).given_bytes == 4 * PAGE
    assert world.port.kept_pages == 0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcached.runtime.operations._STEP_WAIT_S", 60.0)
    monkeypatch.setattr("kvcached.runtime.operations._PRESSURE_LOCK_TIMEOUT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_who_asks_waits_for_the_step_that_still_reads_what_was_evicted(world: World) -> None:
    world.port.at_once = True
    world.pool.give_cached(world.ids, 7, 1)
    asked = ThreadPoolExecutor(1).submit(world.operations.pressure, 4 * PAGE)
    while world.pool.counts().retired_pages < 4:
        assert not asked.done()
        time.sleep(0.001)
    assert world.pool.counts().held_pages == 20
    world.pool.advance(7)
    assert asked.result(60).given_bytes == 4 * PAGE
    assert (world.pool.counts().held_pages, world.pool.counts().cached_blocks) == (16, 16)


@pytest.mark.usefixtures("patient")
def test_who_gets_a_part_does_not_wait_for_the_rest(world: World) -> None:
    world.port.at_once = True
    world.pool.give([(block, 1) for block in world.ids[:2]], 7)
    world.pool.give([(block, 1) for block in world.ids[2:3]])
    assert world.operations.pressure(4 * PAGE).given_bytes == PAGE


@pytest.mark.usefixtures("patient")
def test_who_asks_does_not_wait_where_no_step_has_anything(world: World) -> None:
    world.port.at_once = True
    assert world.operations.pressure(4 * PAGE).given_bytes == 0  # all is owned
    world.cache()
    assert world.operations.pressure(20 * PAGE).given_bytes == 6 * PAGE  # the rest is its floor


@pytest.mark.usefixtures("patient")
def test_who_asks_waits_for_no_later_step_than_those_that_run(world: World) -> None:
    """An engine that always works has always something that a step still reads."""
    world.pool.give([(world.ids[0], 1)], 7)
    asked = ThreadPoolExecutor(1).submit(world.operations.pressure, PAGE)
    world.port.at_once = True
    marker = 7
    while not asked.done():
        with world.pool.lock:
            world.pool.advance(marker)
            marker += 1
            world.pool.take_ids([world.ids[0]])  # before anybody else can have its page
            world.pool.give([(world.ids[0], 1)], marker)
        time.sleep(0.0005)  # or the other thread hardly ever gets the lock
    assert asked.result(60).given_bytes == 0


def test_a_wait_in_vain_is_not_repeated_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr("kvcached.runtime.operations.time.sleep", looks.append)
    monkeypatch.setattr("kvcached.runtime.operations._STEP_WAIT_S", 0.5)  # a busy machine must leave time for a look
    monkeypatch.setattr("kvcached.runtime.operations._NO_WAIT_S", 600.0)
    world.pool.give([(world.ids[0], 1)], 7)
    assert world.operations.pressure(PAGE).given_bytes == 0
    seen = len(looks)
    assert seen > 0
    assert world.operations.pressure(PAGE).given_bytes == 0
    assert len(looks) == seen


def test_who_asks_again_while_a_long_step_runs_evicts_nothing_more(world: World) -> None:
    world.pool.give_cached(world.ids, 7, 1)
    for _ in range(4):
        assert world.operations.pressure(2 * PAGE).given_bytes == 0
    assert world.pool.counts().cached_blocks == 18
    world.pool.advance(7)
    world.port.at_once = True
    assert world.operations.pressure(2 * PAGE).given_bytes == 2 * PAGE
    assert world.operations.pressure(2 * PAGE).given_bytes == 2 * PAGE
    assert world.pool.counts().cached_blocks == 16


def test_what_was_given_is_told_though_the_engine_has_no_time_for_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that press each other hold their pools meanwhile."""
    world.port.at_once = True
    world.pool.give([(block, 1) for block in world.ids[:2]])
    unmap = world.pool.unmap
    busy = threading.Thread(target=lambda: world.pool.lock.acquire())

    def unmap_and_be_busy(planned: Any, *_: object) -> int:
        given_bytes = unmap(planned)
        busy.start()
        busy.join()
        return given_bytes

    monkeypatch.setattr(world.pool, "unmap", unmap_and_be_busy)
    monkeypatch.setattr(world.pool, "report", lambda: None)
    assert world.operations.pressure(4 * PAGE).given_bytes == 2 * PAGE


@pytest.mark.parametrize("order", ["evict", "pressure", "trim"])
def test_what_was_asked_for_is_counted_though_an_idle_pools_keeper_would_give_it_back_too(world: World, order: str) -> None:
    world.port.at_once = True
    world.keeper.tick()
    world.pool.shrink(32)
    world.cache()
    if order == "trim":
        world.pool.free_pages(4)
    world.keeper.rest()
    world.pool.lock = world.pool._work._lock = WaitedFor(world.pool.lock, world.keeper.tick)  # type: ignore[assignment, arg-type]
    assert getattr(world.operations, order)(4 * PAGE).given_bytes == 4 * PAGE
    assert world.pool.counts().held_pages == 16
