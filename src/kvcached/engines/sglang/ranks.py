# SPDX-License-Identifier: Apache-2.0
"""The ranks of one SGLang engine: agreeing on numbers over the engine's own CPU group, and noticing which of them has ended.

Every rank runs a scheduler of its own, and all must decide alike: what a decision depends on is either the same on all of them anyway
(SGLang's counts, its queue and its tree), or it is agreed here first.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcached.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger("kvcached.sglang")
_WIDTH: Final = 32  # numbers in each exchange, the same in all, so that two that do not belong together are told apart
_PID_NAMESPACE: Final = Path("/proc/self/ns/pid")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_GRACE_S: Final = 0.2  # at a common end nobody lives long enough to report another


class Topic(IntEnum):
    """What an exchange is about."""

    RANGE = 1
    SETTINGS = 2
    STEP = 3
    READY = 4


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank tells the others about itself, once. `place`: processes of the same place know each other's ids. `stage`: of a
    pipeline. `replica`: of attention, with requests of its own. `shard`: of the tensors of its stage and replica."""

    rank: int
    pid: int
    place: str
    stage: int
    replica: int
    shard: int

    @property
    def suffix(self) -> str:
        """What tells the names of an engine's ranks apart; the first one's has none."""
        numbers = {"pp": self.stage, "dp": self.replica, "tp": self.shard}
        return "".join(f"-{name}{number}" for name, number in numbers.items() if number)


class Asked:
    """An exchange under way."""

    def __init__(self, rank: int, told: torch.Tensor, pairs: Sequence[int], numbers: int, work: Any) -> None:
        self._rank = rank
        self._told = told
        self._pairs = pairs
        self._numbers = numbers
        self._work = work

    def answer(self) -> list[int]:
        """Waits for all ranks. Raises what `Accord.least` does."""
        self._work.wait()
        heard: list[int] = self._told.tolist()
        width = len(self._pairs)
        ranges = [(heard[place], -heard[place + 1]) for place in range(0, width, 2)]
        if any(low != high for low, high in ranges):
            raise InvariantBroken(
                f"the ranks of this engine do not decide alike: rank {self._rank} has {self._pairs[::2]} (call, topic, counts), "
                f"and over all ranks they are between {[low for low, _ in ranges]} and {[high for _, high in ranges]}"
            )
        return heard[width : width + self._numbers]


class Accord:
    """Several ranks of an engine. Each calls `ask` and `least` equally often and in the same order; an answer waits for all of them."""

    def __init__(self, mine: Seat, seats: Sequence[Seat], group: Any) -> None:
        self.mine = mine
        self.seats = tuple(seats)
        self._group = group
        self._calls = 0

    @classmethod
    def of_engine(cls, replicas: int) -> Accord | None:
        """All of its ranks; None for an engine of one. `replicas`: of attention. Called by all ranks at the same time."""
        from sglang.srt.distributed import parallel_state

        world = parallel_state.get_world_group()
        if world.world_size == 1:
            return None
        place = f"{_BOOT_ID.read_text().strip()} {os.readlink(_PID_NAMESPACE)}"
        stage, tensor = parallel_state.get_pp_group().rank_in_group, parallel_state.get_tp_group()
        replica, shard = divmod(tensor.rank_in_group, tensor.world_size // replicas)
        mine = Seat(world.rank_in_group, os.getpid(), place, stage, replica, shard)
        seats: list[Any] = [None] * world.world_size
        torch.distributed.all_gather_object(seats, mine, group=world.cpu_group)
        return cls(mine, seats, world.cpu_group)

    def of_replica(self) -> Accord | None:
        """Of these ranks those that serve the same requests as this one, and so have to decide alike; None where there is no other.
        Called by all ranks at the same time."""
        if all(seat.replica == 0 for seat in self.seats):
            return self
        groups = {}
        for replica in sorted({seat.replica for seat in self.seats}):
            ranks = [seat.rank for seat in self.seats if seat.replica == replica]
            groups[replica] = torch.distributed.new_group(ranks, backend="gloo") if len(ranks) > 1 else None
        seats = [seat for seat in self.seats if seat.replica == self.mine.replica]
        return Accord(self.mine, seats, groups[self.mine.replica]) if len(seats) > 1 else None

    @property
    def stages(self) -> int:
        """Stages of the engine's pipeline, 1 without one."""
        return 1 + max(seat.stage for seat in self.seats)

    def least(self, topic: Topic, numbers: Sequence[int], alike: Sequence[int] = ()) -> list[int]:
        """The least of each number over all ranks. `alike` must be the same on all of them already.

        Raises `InvariantBroken`, on every rank, when they ask different things; the engine's own error when a rank is gone.
        """
        return self.ask(topic, numbers, alike).answer()

    def ask(self, topic: Topic, numbers: Sequence[int], alike: Sequence[int] = ()) -> Asked:
        """The same without waiting for the answer."""
        self._calls += 1
        pairs = [signed for number in (self._calls, topic, *alike) for signed in (number, -number)]
        told = torch.zeros(_WIDTH, dtype=torch.int64)
        told[: len(pairs) + len(numbers)] = torch.tensor([*pairs, *numbers], dtype=torch.int64)
        work = torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MIN, group=self._group, async_op=True)
        return Asked(self.mine.rank, told, pairs, len(numbers), work)


class Crew:
    """Watches the processes of the other ranks, as far as they are on this machine, and says which one has ended."""

    def __init__(self, accord: Accord, instance: str) -> None:
        self._instance = instance
        self._others = [seat for seat in accord.seats if seat.rank != accord.mine.rank and seat.place == accord.mine.place]
        self._ended = threading.Event()
        self._leaving = threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._watch, name="kvcached-ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        seat = self._first_to_end()
        if seat is None or self._leaving.wait(_GRACE_S):
            return
        self._lost = f"rank {seat.rank} of {self._instance} (process {seat.pid}) has ended; the engine cannot go on without it"
        _log.error(self._lost)
        self._ended.set()

    def _first_to_end(self) -> Seat | None:
        """Waits, for ever if need be, at no cost. None when there is nobody to wait for."""
        waiting = select.poll()
        seats: dict[int, Seat] = {}
        try:
            for seat in self._others:
                try:
                    handle = os.pidfd_open(seat.pid)
                except ProcessLookupError:
                    return seat
                seats[handle] = seat
                waiting.register(handle, select.POLLIN)
            return seats[waiting.poll()[0][0]] if seats else None
        finally:
            for handle in seats:
                os.close(handle)

    def word(self, timeout_s: float) -> str:
        """Which rank has ended, in a sentence; empty when none has within the time."""
        self._ended.wait(timeout_s)
        return self._lost

    def leave(self) -> None:
        """The engine ends as it should: whoever ends now is no news."""
        self._leaving.set()
