# SPDX-License-Identifier: Apache-2.0
"""What a device and an arena promise. `native` is the real one, `fake` counts calls and fails on demand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Run(NamedTuple):
    """`count` adjacent pages from page number `first`, backed by one physical handle per plane."""

    first: int
    count: int  # type: ignore[assignment]  # nobody counts values in a run


class ZeroBacking(Enum):
    """What an unmapped page reads as: a fault, or zeros."""

    NEVER = 0
    USED = 1
    ALL = 2


class Call(Enum):
    """Kinds of driver call, as counted and as made to fail."""

    RESERVE = 0
    CREATE = 1
    MAP = 2
    ACCESS = 3
    UNMAP = 4
    RELEASE = 5
    FREE = 6


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    backend: str  # "host", "cuda" or "hip"
    ordinal: int
    uuid: str
    name: str
    granularity_bytes: int
    total_bytes: int
    driver_version: int


@dataclass(frozen=True, slots=True)
class ArenaConfig:
    page_bytes: int
    pages: int
    planes: int = 1
    plane_stride_bytes: int = 0
    zero_backing: ZeroBacking = ZeroBacking.NEVER


@dataclass(frozen=True, slots=True)
class ArenaStats:
    mapped_bytes: int
    prepared_bytes: int
    cached_bytes: int
    zero_bytes: int
    quarantined_bytes: int
    mapped_pages: int
    reserved_bytes: int

    @property
    def held_bytes(self) -> int:
        """All physical memory that the arena holds: what a lease has to cover."""
        return self.mapped_bytes + self.prepared_bytes + self.cached_bytes + self.zero_bytes + self.quarantined_bytes


class Arena(Protocol):
    """A reserved address range and its physical backing. Safe to use from any thread.

    Raises, from every call: `DeviceOutOfMemory` (undone, retry later), `Misuse` (nothing changed), `StateUnknown`
    (quarantined pages are named), `DeviceError` (the driver is broken).
    """

    @property
    def base_address(self) -> int: ...

    @property
    def config(self) -> ArenaConfig: ...

    def stats(self) -> ArenaStats: ...

    def acquire(self, run_pages: int, runs: int) -> None:
        """Create handles for `runs` runs of `run_pages` pages into the cache. All or nothing."""

    def trim(self, run_pages: int = 0, runs: int = 2**63 - 1) -> int:
        """Release cached handles (of every class when `run_pages` is 0). Returns the bytes released."""

    def map(self, runs: Sequence[Run]) -> None:
        """Map every run at every plane, cached handles first. All or nothing."""

    def unmap(self, runs: Sequence[Run], keep: bool = False) -> None:
        """Unmap whole runs; keep their handles in the cache or release them. All or nothing up to the release."""

    def prepare(self, tx: int, runs: Sequence[Run]) -> None:
        """Unmap whole runs and keep their handles until `commit` or `abort`. Repeats are answered, not repeated."""

    def commit(self, tx: int, keep: bool = False) -> None: ...

    def abort(self, tx: int) -> None: ...

    def quarantined(self) -> list[Run]: ...

    def close(self) -> None:
        """Release everything and give the range back. A second call does nothing."""


class Device(Protocol):
    """One accelerator, or the host memory that stands in for one."""

    @property
    def info(self) -> DeviceInfo: ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes now, other processes included."""

    def create_arena(self, config: ArenaConfig) -> Arena:
        """Reserve a range. Raises `Misuse` for sizes that do not fit the granularity."""

    def fail(self, call: Call, nth: int, *, from_there_on: bool = False, code: int = 0) -> None:
        """Make the `nth` next call of a kind fail (0 clears); `code` 0 is the driver's own out of memory."""

    def calls(self) -> dict[Call, int]:
        """Driver calls that succeeded so far."""

    def close(self) -> None: ...
