# SPDX-License-Identifier: Apache-2.0
"""Notes that ride with steps: a worker that is a step behind its owner looks at stamps, while real pages of a host card come and go.

The worker stamps what the owner took before a step, writes the data of the blocks that the step uses, and looks at all stamps before the
step counts as done. It must never look at a page that is gone, and must see what is wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque
from typing import TYPE_CHECKING

import pytest

import kvcached
from kvcached.core.canary import GUARD_BYTES, Canary, guarded_bytes
from kvcached.core.geometry import BlockGeometry
from kvcached.errors import InvariantBroken, PoolExhausted
from kvcached.runtime.canary import HostBytes, WatcherAfar
from kvcached.runtime.owner import Owner
from kvcached.runtime.pool import NOTHING_IN_FLIGHT
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvcached.core.canary import Note

BLOCK = 16 * 1024
PAGE = 65536  # two blocks on each, so that many pages hold nothing but cached ones
STEPS = 120


class Engine:
    """An owner and a worker; up to two steps are under way. `marks_steps`: whether a block that is given back names the last step that may
    use it."""

    def __init__(self, card: kvcached.ElasticCard, seed: int, *, marks_steps: bool = True) -> None:
        opened = card._card
        geometry = BlockGeometry(guarded_bytes(BLOCK, can_pad_stride=True), PAGE // 2, PAGE, 512, 1, 1024)
        mapper = opened.open_mapper(geometry, instance="chat", name="chat")
        self.watcher = WatcherAfar()
        self.owner = Owner(opened.settings, mapper, mapper.facts, instance="chat", name="chat", watcher=self.watcher)
        self.owner.start()
        self.pool = self.owner.pool
        self.pool.on_evict = self.forget
        self.base_address = mapper.base_address
        self.stride_bytes = geometry.block_stride_bytes
        self.canary = Canary(geometry, "chat", HostBytes(mapper.base_address))
        self.luck = random.Random(seed)
        self.marks_steps = marks_steps
        self.owned: set[int] = set()
        self.cached: set[int] = set()
        self.under_way: deque[tuple[int, tuple[Note, ...], list[int]]] = deque()
        self.step = 0
        self.uses = 0
        self.evicted = self.given_bytes = 0

    def forget(self, ids: list[int]) -> None:
        self.cached -= set(ids)
        self.evicted += len(ids)

    def some_of(self, blocks: set[int]) -> list[int]:
        return self.luck.sample(sorted(blocks), self.luck.randint(0, min(len(blocks), 60)))

    def schedule(self) -> None:
        self.step += 1
        fresh: list[int] = []
        try:
            fresh = [block for first, count in self.pool.take(self.luck.randint(1, 60)) for block in range(first, first + count)]
        except PoolExhausted:
            self.leave(self.some_of(self.owned))  # a preemption
        back = self.some_of(self.cached) if self.luck.random() < 0.3 else []
        self.pool.touch(back)
        self.owned |= {*fresh, *back}
        self.cached -= set(back)
        self.under_way.append((self.step, self.watcher.notes(), fresh))

    def begin(self) -> None:
        """The first step that has blocks: where nobody gets the processor, a take may find the card busy."""
        self.schedule()
        while not self.owned:
            self.work()
            self.schedule()

    def work(self) -> None:
        """The worker's part of the oldest step, which writes what was taken for it, and then the owner hears of it."""
        step, notes, written = self.under_way.popleft()
        self.canary.obey(notes, looks_back=False)
        for block in written:
            ctypes.memset(self.base_address + block * self.stride_bytes, step % 251 + 1, BLOCK)
        self.canary.check()
        self.pool.advance(step)
        self.leave(self.some_of(self.owned))

    def leave(self, blocks: list[int]) -> None:
        """Those that a later step under way still writes are not cached: their contents are not final."""
        marker = self.step if self.marks_steps else NOTHING_IN_FLIGHT
        busy = {block for _, _, written in self.under_way for block in written}
        cached = [block for block in blocks if block not in busy and self.luck.random() < 0.6]
        self.uses += 1
        self.owned -= set(blocks)
        self.cached |= set(cached)
        self.pool.give_cached(cached, marker, self.uses)
        self.pool.give([(block, 1) for block in blocks if block not in cached], marker)

    def run(self) -> None:
        for _ in range(STEPS):
            with self.pool.lock:
                self.schedule()
            if len(self.under_way) == 2:
                with self.pool.lock:
                    self.work()
            if self.luck.random() < 0.2:
                self.pool.free_pages(self.luck.randint(1, 8))
            if self.luck.random() < 0.5:
                self.given_bytes += self.pool.shrink(self.luck.randint(1, 64))


@pytest.fixture
def card(tmp_path: Path) -> Iterator[kvcached.ElasticCard]:
    options = {"host_capacity_bytes": 16 * MIB, "host_granularity_bytes": 65536, "budget": "12MiB", "handle_cache_mb": 0, "large_run_mb": 0}
    folders = {"run_dir": str(tmp_path / "run"), "host_dir": str(tmp_path / "host")}
    with kvcached.open_card("host:0", canary=True, prealloc_enabled=False, **options, **folders) as card:
        yield card


@pytest.fixture
def engines(card: kvcached.ElasticCard) -> Iterator[Callable[..., Engine]]:
    """Makes them, and closes them before their card."""
    with contextlib.ExitStack() as made:

        def make(seed: int, **how: bool) -> Engine:
            engine = Engine(card, seed, **how)
            made.callback(engine.owner.close)
            return engine

        yield make


@pytest.mark.parametrize("seed", range(2))
def test_a_worker_behind_its_owner_never_looks_at_what_is_gone(engines: Callable[..., Engine], seed: int) -> None:
    engine = engines(seed)
    engine.run()
    assert engine.canary.checks > 10 * STEPS
    assert engine.evicted > 0 < engine.given_bytes


def test_a_page_that_goes_before_its_last_step_is_named(engines: Callable[..., Engine]) -> None:
    engine = engines(0, marks_steps=False)
    engine.begin()
    blocks = sorted(engine.owned)
    engine.leave(blocks)
    engine.pool.free_pages(64)
    engine.pool.shrink(64)
    _, notes, _ = engine.under_way.popleft()
    with pytest.raises(InvariantBroken, match=r"block \d+ of generation 1, page \d+: handed out, and nothing is mapped there"):
        engine.canary.obey(notes, looks_back=False)


def test_a_stray_write_between_steps_is_named(engines: Callable[..., Engine]) -> None:
    engine = engines(0)
    engine.begin()
    block = min(engine.owned)
    engine.schedule()
    engine.work()
    ctypes.memset(engine.base_address + block * engine.stride_bytes + BLOCK + GUARD_BYTES - 1, 9, 1)
    engine.owned.add(block)
    with pytest.raises(InvariantBroken, match=rf"pool chat, block {block} of generation 1, page 0: 1 of 256 bytes"):
        engine.work()
