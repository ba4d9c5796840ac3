# SPDX-License-Identifier: Apache-2.0
"""What a participant has performed on a rank's arena and lease. Each ends in an `Outcome`; all or nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached.ranks.transactions import Classes, PageRuns


@dataclass(frozen=True, slots=True)
class AcquireHandles:
    """Raise the lease, then create handles and keep them: credit. EXHAUSTED names the bytes grantable, and the ticket if urgent."""

    classes: Classes
    urgent: bool
    ticket: int


@dataclass(frozen=True, slots=True)
class ReleaseHandles:
    """Destroy handles that are mapped nowhere, then lower the lease. `ticket`: of the wish that this takes back, because another rank
    was refused; its place among those that wait is kept."""

    classes: Classes
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class MapHeld:
    """Map with handles that are held already."""

    runs: PageRuns


@dataclass(frozen=True, slots=True)
class MapFresh:
    """Map with handles made for it: credit stays what it is."""

    runs: PageRuns
    urgent: bool
    ticket: int


@dataclass(frozen=True, slots=True)
class UnmapKeep:
    """Unmap; the handles are credit again."""

    runs: PageRuns


@dataclass(frozen=True, slots=True)
class UnmapRelease:
    """Unmap, destroy the handles, lower the lease. `ticket`: as in `ReleaseHandles`."""

    runs: PageRuns
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class PrepareRuns:
    """Unmap, and set the handles aside under `tx`."""

    tx: int
    runs: PageRuns


@dataclass(frozen=True, slots=True)
class CommitRuns:
    """Destroy the handles set aside under `tx`, lower the lease. `size_bytes`: what was given back."""

    tx: int


@dataclass(frozen=True, slots=True)
class AbortRuns:
    """Map the runs set aside under `tx` again."""

    tx: int


Action = AcquireHandles | ReleaseHandles | MapHeld | MapFresh | UnmapKeep | UnmapRelease | PrepareRuns | CommitRuns | AbortRuns
