# SPDX-License-Identifier: Apache-2.0
"""What has happened so far, as plain numbers that only grow. Pure, and without a lock: who counts holds one already, and who reads takes
copies, which may be one event behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

FIRST_NS: Final = 16_000
BUCKETS: Final = 20
BOUNDS_S: Final = tuple((FIRST_NS << bucket) / 1e9 for bucket in range(BUCKETS))
"""Upper bounds, each twice the one before: 16 microseconds to 8.4 seconds. One more bucket has no bound."""

Numbers = tuple[int, ...]
"""A histogram on its way: the sum in nanoseconds, then the events of each bucket; zeros at the end are left out."""


class Histogram:
    """Times by size. An event costs no search: bounds are powers of two."""

    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (BUCKETS + 1)
        self._sum_ns = 0

    def observe(self, spent_ns: int) -> None:
        bucket = (max(0, spent_ns - 1) // FIRST_NS).bit_length()
        self._counts[min(bucket, BUCKETS)] += 1
        self._sum_ns += spent_ns

    def numbers(self) -> Numbers:
        counts = tuple(self._counts)
        used = next((length for length in range(len(counts), 0, -1) if counts[length - 1]), 0)
        return (self._sum_ns, *counts[:used])


def cumulative(numbers: Numbers) -> tuple[float, list[int]]:
    """The sum in seconds, and for each bound, the last one open, how many events took at most so long.

    Buckets beyond those that are known here count as the last one.
    """
    counts = [*numbers[1:], *[0] * BUCKETS]
    known = [*counts[:BUCKETS], sum(counts[BUCKETS:])]
    totals = [sum(known[: bucket + 1]) for bucket in range(BUCKETS + 1)]
    return (numbers[0] if numbers else 0) / 1e9, totals


class Eviction(str, Enum):
    """Why cached blocks went."""

    NEED = "need"  # requests needed the blocks
    CAP = "cap"  # the prefix cache has a bound
    LIMIT = "limit"  # the pool's limit was lowered
    PRESSURE = "pressure"  # another pool of the card asked
    ASKED = "asked"  # somebody did, with `kvctl evict`
    ENGINE = "engine"  # the engine dropped them itself


def _no_evictions() -> dict[Eviction, int]:
    return dict.fromkeys(Eviction, 0)


@dataclass(slots=True)
class Tally:
    """One pool's. `waits`: how long calls of the engine waited for more pages.

    `misses`: takes that failed; `preemptions`: requests that the engine put back for lack of blocks, `avoidable_preemptions` those of them
    during which other pools could have given memory; `refusals`: maps that the card did not grant; `presses`: times that others were asked
    to give memory back, and `taken_bytes` what they gave; `given_bytes`: what this pool gave when others asked.
    """

    misses: int = 0
    preemptions: int = 0
    avoidable_preemptions: int = 0
    refusals: int = 0
    presses: int = 0
    taken_bytes: int = 0
    given_bytes: int = 0
    evicted_blocks: dict[Eviction, int] = field(default_factory=_no_evictions)
    waits: Histogram = field(default_factory=Histogram)

    def note_preemptions(self, requests: int, *, avoidable: bool) -> None:
        self.preemptions += requests
        self.avoidable_preemptions += requests if avoidable else 0
