# SPDX-License-Identifier: Apache-2.0
"""What owner and mapper say to each other out of band: plain data. Pure.

    opens            a rank answers   ends with         a rank answers
    Acquire, MapNow  DONE             (Revert)          REVERTED         undone only where another rank failed
    Release          DONE
    Prepare          PREPARED         Commit or Abort   COMMITTED or ABORTED

A transaction has one number on all ranks. Every message may be repeated: it is answered again, never performed again. Every message
carries the tail of in-band operations (`ops`), which the receiver applies first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.ranks.api import Outcome
    from kvcached.ranks.operations import Op

HISTORY: Final = 256
"""A mapper remembers at least so many transactions, and an owner has none under way that is so many older than its newest."""
MAX_RUNS: Final = 1 << 17
"""Runs of one transaction: keeps every message within the length that may be sent."""

Classes = tuple[tuple[int, int], ...]
"""Handles by class: (pages per run, number of runs)."""
PageRuns = tuple[tuple[int, int], ...]
"""(first page, pages)."""


class Phase(IntEnum):
    """How far a transaction has come on a rank."""

    UNHEARD = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    PREPARED = 4
    COMMITTED = 5
    ABORTED = 6
    REVERTED = 7


@dataclass(frozen=True, slots=True)
class Acquire:
    """Raise the lease, then create handles that are mapped nowhere: credit. All or nothing on the rank."""

    tx: int
    classes: Classes
    urgent: bool
    ticket: int
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class MapNow:
    """Raise the lease, create, map, while no step runs that reads the pages. All or nothing on the rank."""

    tx: int
    runs: PageRuns
    urgent: bool
    ticket: int
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """Destroy credit, then lower the lease."""

    tx: int
    classes: Classes
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepare:
    """Wait, bounded, until the rank's stream has passed `after_step`; unmap, and keep the handles until Commit or Abort."""

    tx: int
    runs: PageRuns
    after_step: int
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Release the handles of that Prepare and lower the lease."""

    tx: int
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Abort:
    """Map the runs of that Prepare again. If it has not come yet, it is refused when it does."""

    tx: int
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Revert:
    """Undo exactly what that Acquire or MapNow did. If it has not come yet, it is refused when it does."""

    tx: int
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Query:
    """How far is it? Transaction 0 stands for none: bring `ops`, and say what of them is applied."""

    tx: int
    ops: tuple[Op, ...] = ()


Opening = Acquire | MapNow | Release | Prepare
Ending = Commit | Abort | Revert
RankMessage = Opening | Ending | Query


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says of a transaction (0: of none) and of the operations that it has applied and completed.

    `outcome` tells about the last thing performed for it; `ticket` is the place that a refused wish has in the card's queue.
    `stranded`: all unmaps so far, by number, that are complete and failed: this rank's pages of them can never be used again.
    """

    tx: int
    phase: Phase
    outcome: Outcome
    applied: int
    completed: int
    ticket: int = 0
    stranded: tuple[int, ...] = ()


def classes_of(runs: Iterable[tuple[int, int]]) -> Classes:
    """The handles that back the runs."""
    classes: dict[int, int] = {}
    for _, pages in runs:
        classes[pages] = classes.get(pages, 0) + 1
    return tuple(sorted(classes.items()))
