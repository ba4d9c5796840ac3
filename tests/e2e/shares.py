# SPDX-License-Identifier: Apache-2.0
"""What samples of a card and counters of its pools say about who got what, when, and at whose cost. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from examples.demo.series import EngineMemory, Sample


@dataclass(frozen=True, slots=True)
class Turn:
    """`engine` is offered more than it can hold from `start_s` to `end_s`."""

    engine: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Look:
    """One pool's counters, read between `asked_s` and `answered_s`."""

    asked_s: float
    answered_s: float
    pool: str
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Share:
    """What the engine of a turn leased of what it could have: all but the others' floors and what they own, or owned within a second.

    `alone`: no other engine had work during that second, so that all it could have is what lies above the others' floors.
    """

    at_s: float
    engine: str
    fraction: float
    alone: bool


@dataclass(frozen=True, slots=True)
class Preemption:
    """`count` requests of `pool` were put back between two looks. `certain_bytes`: what the others held parked or cached beyond their
    floors during all of that time; `possible_bytes`: at some moment of it."""

    pool: str
    at_s: float
    count: int
    certain_bytes: int
    possible_bytes: int


@dataclass(slots=True)
class Timeline:
    """`samples` in order of time; `page_bytes`: the least that a pool can give."""

    budget_bytes: int
    page_bytes: int
    samples: list[Sample] = field(default_factory=list)

    def between(self, start_s: float, end_s: float) -> list[Sample]:
        """Those within the interval, and the last one before it: it is what was true when the interval began."""
        first = max(0, bisect_right(self.samples, start_s, key=_time) - 1)
        return self.samples[first : bisect_right(self.samples, end_s, key=_time)]

    def least_room_bytes(self) -> int:
        """The least that was left of the budget, at any sample, beside all leases and the floors that were not leased. Below 0 a floor had
        been lent: its owner could not have it at once."""
        return min(
            self.budget_bytes - sum(max(memory.lease_bytes, memory.floor_bytes) for memory in sample.engines.values())
            for sample in self.samples
        )

    def shares(self, turns: Sequence[Turn], window_s: float = 1.0) -> Iterator[Share]:
        """At each sample in which the engine of the turn waits for memory, and has waited before for `window_s` or longer."""
        for turn in turns:
            hungry_s = None
            for sample in self.between(turn.start_s, turn.end_s)[1:]:
                if not sample.of(turn.engine).wanted_bytes:
                    continue
                hungry_s = sample.at_s if hungry_s is None else hungry_s
                if sample.at_s - hungry_s >= window_s:
                    yield self._share(sample, turn.engine, self.between(sample.at_s - window_s, sample.at_s))

    def _share(self, sample: Sample, engine: str, window: Sequence[Sample]) -> Share:
        kept_bytes, alone = 0, True
        for name, memory in sample.engines.items():
            if name != engine:
                owned_bytes = max(earlier.of(name).owned_bytes for earlier in window)
                alone = alone and owned_bytes < self.page_bytes  # one block stands in each pool for ever
                kept_bytes += max(memory.floor_bytes, owned_bytes)
        return Share(sample.at_s, engine, sample.of(engine).lease_bytes / (self.budget_bytes - kept_bytes), alone)

    def takeover_s(self, turn: Turn, fraction: float = 0.95) -> float | None:
        """Seconds from the first refusal of the turn until its engine leased that part of what lies above the others' floors."""
        hungry_s = None
        for sample in self.between(turn.start_s, turn.end_s)[1:]:
            memory = sample.of(turn.engine)
            if hungry_s is None and memory.wanted_bytes:
                hungry_s = sample.at_s
            floors_bytes = sum(other.floor_bytes for name, other in sample.engines.items() if name != turn.engine)
            if memory.lease_bytes >= fraction * (self.budget_bytes - floors_bytes):
                return 0.0 if hungry_s is None else sample.at_s - hungry_s
        return None

    def floor_return_s(self, engine: str, asked_s: float, end_s: float) -> tuple[float, float] | None:
        """Seconds until `engine` leased its floor: from the first sign that it wanted memory, and from `asked_s`. None: it never did."""
        before, *later = self.between(asked_s, end_s)
        wanted_s, least_bytes = None, before.of(engine).lease_bytes  # it may be emptied between this sample and the next
        for sample in later:
            memory = sample.of(engine)
            least_bytes = min(least_bytes, memory.lease_bytes)
            if wanted_s is None and (memory.wanted_bytes or memory.lease_bytes > least_bytes):
                wanted_s = sample.at_s
            if wanted_s is not None and memory.lease_bytes >= memory.floor_bytes:
                return sample.at_s - wanted_s, sample.at_s - asked_s
        return None

    def preemptions(self, looks: Sequence[Look]) -> Iterator[Preemption]:
        last: dict[str, Look] = {}
        for look in sorted(looks, key=lambda look: look.answered_s):
            former = last.get(look.pool)
            last[look.pool] = look
            count = 0 if former is None else look.counters["preemptions"] - former.counters["preemptions"]
            if former is not None and count:
                window = self.between(former.asked_s, look.answered_s)
                given = [self._spare_bytes(sample, look.pool) for sample in window]
                yield Preemption(look.pool, look.answered_s, count, min(given, default=0), max(given, default=0))

    def _spare_bytes(self, sample: Sample, engine: str) -> int:
        """What the others held parked or cached beyond their floors, in whole pages."""
        return sum(spare_bytes(memory) // self.page_bytes * self.page_bytes for name, memory in sample.engines.items() if name != engine)

    def least_kept_bytes(self, engine: str, start_s: float, end_s: float) -> int:
        """The least that an engine leased in that time."""
        return min(sample.of(engine).lease_bytes for sample in self.between(start_s, end_s))


def _time(sample: Sample) -> float:
    return sample.at_s


def spare_bytes(memory: EngineMemory) -> int:
    return min(memory.parked_bytes + memory.cached_bytes, max(0, memory.lease_bytes - memory.floor_bytes))
