# SPDX-License-Identifier: Apache-2.0
"""Ranks without memory: real participants, servers and sockets over fake devices, for tests of what an owner does with them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvcached.card.budget import Refusal
from kvcached.card.entry import LeaseResult
from kvcached.card.record import Usage
from kvcached.errors import InvariantBroken
from kvcached.ranks.facts import MapperFacts
from kvcached.ranks.frames import hello_of_rank
from kvcached.ranks.messages import Hello
from kvcached.ranks.server import RankServer
from kvcached.runtime.rank_memory import RankMemory
from kvcached.runtime.step_gate import StepGate
from kvcached.vmm.api import ArenaConfig
from kvcached.vmm.fake import FakeDevice

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.core.geometry import BlockGeometry
    from kvcached.vmm.fake_arena import FakeArena

HELLO = Hello("1", "engine", "")


class Book:
    """An entry in the record of a card with room for `room_bytes`, which may change. Says so when memory is held without a lease."""

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.lease_bytes = 0
        self.most_bytes = 0
        self.arena: FakeArena | None = None
        self.device: FakeDevice | None = None
        self.usage = Usage()
        self.limits: tuple[int, int, float, int] | None = None
        self.limits_error: Exception | None = None
        self.tickets: list[int] = []
        self.next_ticket = 0
        self.closed = False

    def _check(self) -> None:
        if self.arena is not None and self.arena.stats().held_bytes > self.lease_bytes:
            raise InvariantBroken(f"{self.arena.stats().held_bytes} bytes are held, {self.lease_bytes} are leased")

    def lease(self, delta_bytes: int, *, owned: bool, deadline_s: float, want: bool) -> LeaseResult:
        self._check()
        room_bytes = max(0, self.room_bytes - self.lease_bytes)
        if delta_bytes > room_bytes:
            return LeaseResult(False, room_bytes, Refusal.BUDGET, "the card's budget is leased")
        self.lease_bytes += delta_bytes
        self.most_bytes = max(self.most_bytes, self.lease_bytes)
        return LeaseResult(True, room_bytes, Refusal.NONE, "")

    def want(self, delta_bytes: int, *, owned: bool, ticket: int, deadline_s: float) -> int:
        self.tickets.append(ticket or self.next_ticket)
        return ticket or self.next_ticket

    def unlease(self, delta_bytes: int, usage: Usage | None = None) -> None:
        self.lease_bytes -= delta_bytes
        self._check()
        self.usage = usage or self.usage

    def publish(self, usage: Usage) -> None:
        self._check()
        self.usage = usage

    def set_limits(self, limit_bytes: int, floor_bytes: int, weight: float, revision: int) -> None:
        if self.limits_error is not None:
            raise self.limits_error
        self.limits = (limit_bytes, floor_bytes, weight, revision)

    def heartbeat(self) -> bool:
        return False

    def close(self) -> None:
        if self.device is not None and self.device.memory()[0] < self.device.info.total_bytes:
            raise InvariantBroken("the entry is closed before its memory")
        self.closed = True


class HandFence:
    """A stream that a test lets go by hand: `open` False holds everything that was queued back."""

    def __init__(self) -> None:
        self.open = True
        self._changed = threading.Condition()

    def __call__(self) -> HandFence:
        return self

    def let_go(self) -> None:
        with self._changed:
            self.open = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.open, timeout_s)


class FakeRank:
    """One rank that serves at `path`. `geometry`: its own, with the same pages as the others'."""

    def __init__(
        self,
        path: Path,
        rank: int,
        geometry: BlockGeometry,
        *,
        room_pages: int | None = None,
        hello: Hello = HELLO,
        fence_timeout_s: float = 5.0,
        adopted_pages: int = 0,
    ) -> None:
        self.geometry = geometry
        self.page_bytes = geometry.release_step_bytes
        self.device = FakeDevice(geometry.pages * self.page_bytes, ordinal=rank)
        config = ArenaConfig(geometry.page_bytes, geometry.pages, geometry.planes, geometry.plane_bytes)
        self.arena = self.device.create_arena(config)
        self.book = Book((geometry.pages if room_pages is None else room_pages) * self.page_bytes)
        self.fence = HandFence()
        self.gate = StepGate(self.fence)
        facts = MapperFacts(geometry, adopted_pages, f"FAKE-{rank}", geometry.range_bytes)
        self.memory = RankMemory(self.arena, self.book, facts=facts)
        self.book.arena, self.book.device = self.arena, self.device
        self.owner_lost = threading.Event()
        greeting = hello_of_rank(Hello(hello.package_version, hello.instance, facts.to_text(), hello.engine, hello.seams), rank)
        self.server = RankServer(path, self.memory, self.gate, greeting, self._lost, fence_timeout_s=fence_timeout_s)

    def _lost(self) -> None:
        if self.owner_lost.is_set():
            raise InvariantBroken("the loss of the owner was told twice")
        self.memory.close()
        self.owner_lost.set()

    def mapped_pages(self) -> set[int]:
        return {page for page in range(self.geometry.pages) if self.arena.access(page) == "rw"}

    def close(self) -> None:
        self.fence.let_go()
        if self.server.stop():
            self.memory.close()
            self.server.close()
