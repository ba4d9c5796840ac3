# SPDX-License-Identifier: Apache-2.0
"""In-band maps and unmaps: one order for all ranks, whichever channel brings them. Pure.

The owner numbers its operations. Everything that some rank has not applied yet, the tail, rides on every step message and on every
out-of-band message; the number says what is new to the receiver. So no channel waits for another, and a message that is never
executed loses nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvcached.errors import StateUnknown

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_OPEN_OPS: Final = 4096
"""Operations that may be unfinished on some rank; what waits for a slow rank is bounded by it."""
MAX_TAIL_RUNS: Final = 1 << 15
"""Runs in the tail, so that a message that carries it has a bounded length."""


def pages_of(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The pages of the runs."""
    return tuple(page for first, count in runs for page in range(first, first + count))


class OpKind(IntEnum):
    MAP = 0  # from handles that the rank holds: cannot fail for lack of memory
    UNMAP = 1  # the handles are kept: they are credit again


@dataclass(frozen=True, slots=True)
class Op:
    """`runs`: (first page, pages). `after_step` (UNMAP only): the newest step that may still read the pages."""

    number: int
    kind: OpKind
    runs: tuple[tuple[int, int], ...]
    after_step: int = 0


class Outbox:
    """The owner's end: what was decided, and how far each rank has come."""

    def __init__(self, ranks: int) -> None:
        self._applied = [0] * ranks
        self._completed = [0] * ranks
        self._tail: deque[Op] = deque()  # not applied by every rank
        self._open: deque[Op] = deque()  # not completed by every rank
        self._leaving: set[int] = set()  # pages of unmaps that are not completed
        self._tail_runs = 0
        self._sent = 0
        self.newest = 0
        self.completed_everywhere = 0

    def has_room(self, runs: int) -> bool:
        """Whether one more operation with so many runs stays within the bounds."""
        return len(self._open) < MAX_OPEN_OPS and self._tail_runs + runs <= MAX_TAIL_RUNS

    def is_leaving(self, runs: Iterable[tuple[int, int]]) -> bool:
        """Whether a page of the runs is still being unmapped somewhere: then it must not be mapped."""
        leaving = self._leaving
        return bool(leaving) and not leaving.isdisjoint(pages_of(runs))

    def map(self, runs: Iterable[tuple[int, int]]) -> int:
        """Queue a map. Returns the number of the operation."""
        return self._append(OpKind.MAP, tuple(runs), 0)

    def unmap(self, runs: Iterable[tuple[int, int]], after_step: int) -> int:
        """Queue an unmap. Returns the number of the operation."""
        op_runs = tuple(runs)
        self._leaving.update(pages_of(op_runs))
        return self._append(OpKind.UNMAP, op_runs, after_step)

    def _append(self, kind: OpKind, runs: tuple[tuple[int, int], ...], after_step: int) -> int:
        self.newest += 1
        op = Op(self.newest, kind, runs, after_step)
        self._tail.append(op)
        self._open.append(op)
        self._tail_runs += len(runs)
        return op.number

    def cancel(self, runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Forget those of the maps of exactly these runs that nobody was sent. Returns the runs; nobody will ever map them."""
        wanted, cancelled = set(runs), []
        for behind in range(1, min(len(self._tail), self.newest - self._sent) + 1):
            op = self._tail[-behind]
            if op.kind is OpKind.MAP and not wanted.isdisjoint(op.runs):
                cancelled += [run for run in op.runs if run in wanted]
                kept = tuple(run for run in op.runs if run not in wanted)
                self._tail_runs -= len(op.runs) - len(kept)
                self._tail[-behind] = self._open[-behind] = replace(op, runs=kept)
        return tuple(cancelled)

    def tail(self) -> tuple[Op, ...]:
        """Every operation that some rank has not applied, in order. What it returns counts as sent."""
        self._sent = self.newest
        return tuple(self._tail)

    def behind(self) -> list[int]:
        """The ranks that have not completed everything."""
        return [rank for rank, completed in enumerate(self._completed) if completed < self.newest]

    def note(self, rank: int, applied: int, completed: int) -> list[Op]:
        """What a rank acknowledges; an older acknowledgement than the last changes nothing. Returns what is complete on all by it."""
        if applied > self._applied[rank]:
            self._applied[rank] = applied
            everywhere = min(self._applied)
            while self._tail and self._tail[0].number <= everywhere:
                self._tail_runs -= len(self._tail.popleft().runs)
        if completed <= self._completed[rank]:
            return []
        self._completed[rank] = completed
        self.completed_everywhere = min(self._completed)
        done = []
        while self._open and self._open[0].number <= self.completed_everywhere:
            done.append(self._close())
        return done

    def _close(self) -> Op:
        op = self._open.popleft()
        if op.kind is OpKind.UNMAP:
            self._leaving.difference_update(pages_of(op.runs))
        return op


class Inbox:
    """The mapper's end. `applied`: accepted up to here, in order (a map counts for the owner once it is performed); `completed`: all up
    to here are finished."""

    def __init__(self) -> None:
        self.applied = 0
        self.completed = 0
        self._finished: set[int] = set()  # above `completed`: bounded by what the owner may leave open

    def accept(self, ops: Iterable[Op]) -> tuple[Op, ...]:
        """The operations that are new, in order. Raises `StateUnknown` when one is missing: tails are cumulative, so none can be."""
        new = tuple(op for op in ops if op.number > self.applied)
        for number, op in enumerate(new, self.applied + 1):
            if op.number != number:
                raise StateUnknown(f"operation {number} never came, {op.number} did: it is not known what is mapped here")
        self.applied += len(new)
        return new

    def finish(self, number: int) -> None:
        """The operation has been performed."""
        self._finished.add(number)
        while self.completed + 1 in self._finished:
            self.completed += 1
            self._finished.remove(self.completed)
