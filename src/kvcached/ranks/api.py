# SPDX-License-Identifier: Apache-2.0
"""What an owner asks of a mapper, and what it answers. The same whether the mapper is in this process or in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

Runs = Sequence[tuple[int, int]]
"""Page runs as (first page, count of pages)."""


class Verdict(IntEnum):
    """How an operation ended. Only DONE changed anything, except UNKNOWN, after which nobody can tell."""

    DONE = 0
    EXHAUSTED = 1  # no lease or no memory just now; retry later
    REFUSED = 2  # a mistake of the owner; nothing changed
    BUSY = 3  # work in flight did not pass the fence in time; nothing changed
    UNKNOWN = 4  # the pages named are quarantined, the rest of the batch was undone
    BROKEN = 5  # the device failed


@dataclass(frozen=True, slots=True)
class Outcome:
    """`size_bytes`: bytes released (unmap, trim) or still grantable (EXHAUSTED). `pages`: quarantined page numbers (UNKNOWN).
    `ticket`: the place that a wish refused with EXHAUSTED has in its card's queue; 0: none.
    """

    verdict: Verdict
    size_bytes: int = 0
    pages: tuple[int, ...] = ()
    reason: str = ""
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class LimitsRequest:
    """Limits for the mapper's entry in the card's record."""

    limit_bytes: int
    floor_bytes: int
    weight: float
    revision: int


@dataclass(frozen=True, slots=True)
class Report:
    """What the owner knows and the mapper publishes in the card's record: bytes by use."""

    parked_bytes: int = 0
    retired_bytes: int = 0
    cached_bytes: int = 0
    owned_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MapperStatus:
    """Bytes that the mapper's arena holds, by state, and its lease."""

    lease_bytes: int
    mapped_bytes: int
    cached_handle_bytes: int
    quarantined_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class MapperTally:
    """How long a mapper's work took so far, as `kvcached.core.tally.Numbers`: leases; calls that make or map pages; calls that unmap
    them; steps of the engine that waited for maps.
    """

    lease: tuple[int, ...] = ()
    map: tuple[int, ...] = ()
    unmap: tuple[int, ...] = ()
    step: tuple[int, ...] = ()


class MapperPort(Protocol):
    """A mapper as its owner sees it. Every call returns at once; the future ends when the mapper has answered.

    A future ends with an exception only when the mapper is gone (`PeerLost`). It always ends: a mapper that is lost ends
    all that were waiting.
    """

    def map(self, runs: Runs, *, urgent: bool) -> Future[Outcome]:
        """Back the runs with memory, within the lease: all of them or none. `urgent`: requests wait for it, it is no reserve."""

    def unmap(self, runs: Runs, after_step: int) -> Future[Outcome]:
        """Unmap the runs and give their memory back: all of them or none. No work queued after step `after_step` reads them; the
        mapper waits until its own streams have passed that step."""

    def trim(self) -> Future[Outcome]:
        """Release the handles that are kept for reuse."""

    def set_limits(self, limits: LimitsRequest) -> Future[Outcome]:
        """Enter them in the card's record. REFUSED (nothing changed, and why) when the card does not allow them."""

    def report(self, report: Report) -> None:
        """Publish; never waits: while an earlier report is on its way, this one is dropped."""

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason when the mapper is gone, at once if it is already. Never for a mapper in this process."""

    def status(self, timeout_s: float) -> MapperStatus:
        """Raises `PeerTimeout`, `PeerLost`."""

    def tally(self, timeout_s: float) -> Sequence[MapperTally]:
        """One for each rank, in rank order. Raises `PeerTimeout`, `PeerLost`."""

    def close(self) -> None: ...


def finished(outcome: Outcome) -> Future[Outcome]:
    """A future that has ended already."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
