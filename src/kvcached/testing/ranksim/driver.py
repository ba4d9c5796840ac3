# SPDX-License-Identifier: Apache-2.0
"""A model of one rank's arena and lease: what `Perform` effects do, with calls that fail and undos that fail."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kvcached.ranks.actions import (
    AbortRuns,
    AcquireHandles,
    Action,
    CommitRuns,
    MapFresh,
    MapHeld,
    PrepareRuns,
    ReleaseHandles,
    UnmapKeep,
    UnmapRelease,
)
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.operations import pages_of
from kvcached.ranks.transactions import classes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Run = tuple[int, int]


class Broken(AssertionError):
    """An invariant does not hold."""


class Fault(Enum):
    """What the next call of a driver does instead of working."""

    FAIL = "fails, and everything was undone; only a call that may fail does"
    UNDO_FAILS = "fails, and so does its undo: a page is quarantined"
    BREAK = "the device is lost"


_DONE: Final = Outcome(Verdict.DONE)


class Driver:
    """Handles by class, runs that are mapped, runs set aside, pages quarantined; bytes held never above the lease.

    `may_unmap(run)` is asked, and may raise, before a run is unmapped.
    """

    def __init__(self, page_bytes: int, budget_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.budget_bytes = budget_bytes
        self.lease_bytes = 0
        self.held_bytes = 0
        self.handles: Counter[int] = Counter()
        self.mapped: set[Run] = set()
        self.aside: dict[int, tuple[Run, ...]] = {}
        self.quarantined: set[int] = set()
        self.stray_bytes = 0  # quarantined, or of handles of which nobody knows whether they still exist
        self.fault: Fault | None = None
        self.lost = False

    def perform(self, action: Action, may_unmap: Callable[[Iterable[Run]], None]) -> Outcome:
        """As a rank's memory does: all or nothing, and nothing raises, except an invariant."""
        fault, self.fault = self.fault, None
        if fault is Fault.BREAK or self.lost:
            return self._lose()
        if isinstance(action, PrepareRuns | UnmapKeep | UnmapRelease):
            may_unmap(action.runs)
        return _PERFORM[type(action)](self, action, fault)

    def check(self) -> None:
        """The running sums are what they are sums of."""
        handles = sum(run_pages * count for run_pages, count in self.handles.items())
        mapped = sum(count for _, count in self.mapped)
        aside = sum(count for runs in self.aside.values() for _, count in runs)
        if self.held_bytes != (handles + mapped + aside) * self.page_bytes + self.stray_bytes:
            raise Broken(f"held {self.held_bytes} is not the sum of {handles} + {mapped} + {aside} pages and {self.stray_bytes}")

    def _lose(self) -> Outcome:
        self.lost = True
        return Outcome(Verdict.BROKEN, reason="the device is lost")

    # ------------------------------------------------------------------ lease

    def _raise_lease(self, pages: int, urgent: bool) -> Outcome | None:
        size_bytes = pages * self.page_bytes
        room = self.budget_bytes - self.lease_bytes
        if size_bytes > room:
            return Outcome(Verdict.EXHAUSTED, max(room, 0), reason="leased", ticket=self.budget_bytes + 1 if urgent else 0)
        self.lease_bytes += size_bytes
        return None

    def _hold(self, pages: int) -> None:
        self.held_bytes += pages * self.page_bytes
        if self.held_bytes > self.lease_bytes:
            raise Broken(f"{self.held_bytes} bytes are held on a lease of {self.lease_bytes}")

    def _drop(self, pages: int) -> int:
        size_bytes = pages * self.page_bytes
        self.held_bytes -= size_bytes
        self.lease_bytes -= size_bytes
        return size_bytes

    def _stray(self, pages: int) -> None:
        self.stray_bytes += pages * self.page_bytes

    def _quarantine(self, runs: tuple[Run, ...]) -> Outcome:
        """The first run's pages are in a state that nobody knows; their bytes stay held."""
        first, count = runs[0]
        pages = tuple(range(first, first + count))
        self.quarantined.update(pages)
        self._stray(count)
        return Outcome(Verdict.UNKNOWN, pages=pages, reason="the undo failed")

    # ------------------------------------------------------------------ actions

    def acquire(self, action: AcquireHandles, fault: Fault | None) -> Outcome:
        pages = sum(run_pages * count for run_pages, count in action.classes)
        refusal = self._raise_lease(pages, action.urgent)
        if refusal is not None:
            return refusal
        if fault is Fault.FAIL:
            self.lease_bytes -= pages * self.page_bytes
            return Outcome(Verdict.EXHAUSTED, reason="a create failed")
        self._hold(pages)
        if fault is Fault.UNDO_FAILS:
            self._stray(pages)
            return Outcome(Verdict.UNKNOWN, reason="a create failed, and so did the release")
        self.handles.update(dict(action.classes))
        return _DONE

    def release(self, action: ReleaseHandles, fault: Fault | None) -> Outcome:
        if any(self.handles[run_pages] < count for run_pages, count in action.classes):
            raise Broken(f"{action.classes} is to be released, {dict(self.handles)} is held")
        self.handles.subtract(dict(action.classes))
        pages = sum(run_pages * count for run_pages, count in action.classes)
        if fault is Fault.UNDO_FAILS:
            self._stray(pages)
            return Outcome(Verdict.UNKNOWN, reason="a release failed half-way")
        return Outcome(Verdict.DONE, self._drop(pages))

    def map_held(self, action: MapHeld, fault: Fault | None) -> Outcome:
        if fault is Fault.UNDO_FAILS:
            return self._lose()
        for run_pages, count in classes_of(action.runs):
            if self.handles[run_pages] < count:
                raise Broken(f"{action.runs} was promised, but of class {run_pages} only {self.handles[run_pages]} are held")
            self.handles[run_pages] -= count
        self._map(action.runs)
        return _DONE

    def map_fresh(self, action: MapFresh, fault: Fault | None) -> Outcome:
        pages = sum(count for _, count in action.runs)
        refusal = self._raise_lease(pages, action.urgent)
        if refusal is not None:
            return refusal
        if fault is Fault.FAIL:
            self.lease_bytes -= pages * self.page_bytes
            return Outcome(Verdict.EXHAUSTED, reason="a map failed")
        self._hold(pages)
        if fault is Fault.UNDO_FAILS:
            self._drop(pages - action.runs[0][1])
            return self._quarantine(action.runs)
        self._map(action.runs)
        return _DONE

    def unmap_keep(self, action: UnmapKeep, fault: Fault | None) -> Outcome:
        if fault is Fault.FAIL:  # all of it is still mapped, and not on the other ranks
            pages = pages_of(action.runs)
            self.quarantined.update(pages)
            return Outcome(Verdict.UNKNOWN, pages=pages, reason="an unmap failed")
        if fault is Fault.UNDO_FAILS:
            self.mapped.remove(action.runs[0])
            return self._quarantine(action.runs)
        self._unmap(action.runs)
        self.handles.update(dict(classes_of(action.runs)))
        return _DONE

    def unmap_release(self, action: UnmapRelease, fault: Fault | None) -> Outcome:
        self._unmap(action.runs)
        runs, outcome = self._maybe_quarantine(action.runs, fault)
        self._drop(sum(count for _, count in runs))
        return outcome

    def prepare(self, action: PrepareRuns, fault: Fault | None) -> Outcome:
        if fault is Fault.FAIL:
            return Outcome(Verdict.EXHAUSTED, reason="an unmap failed")
        if fault is Fault.UNDO_FAILS:
            self.mapped.remove(action.runs[0])
            return self._quarantine(action.runs)
        self._unmap(action.runs)
        self.aside[action.tx] = action.runs
        return _DONE

    def commit(self, action: CommitRuns, fault: Fault | None) -> Outcome:
        runs, outcome = self._maybe_quarantine(self._take_aside(action.tx), fault)
        released = self._drop(sum(count for _, count in runs))
        return outcome if outcome.verdict is not Verdict.DONE else Outcome(Verdict.DONE, released)

    def abort(self, action: AbortRuns, fault: Fault | None) -> Outcome:
        runs, outcome = self._maybe_quarantine(self._take_aside(action.tx), fault)
        self._map(runs)
        return outcome

    def _take_aside(self, tx: int) -> tuple[Run, ...]:
        if tx not in self.aside:
            raise Broken(f"nothing was set aside for transaction {tx}")
        return self.aside.pop(tx)

    def _maybe_quarantine(self, runs: tuple[Run, ...], fault: Fault | None) -> tuple[tuple[Run, ...], Outcome]:
        """An undo, or a commit, that fails leaves its first run unknown and does the rest."""
        return (runs[1:], self._quarantine(runs)) if fault is Fault.UNDO_FAILS else (runs, _DONE)

    def _map(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run in self.mapped:
                raise Broken(f"{run} is to be mapped twice")
            self.mapped.add(run)

    def _unmap(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if run not in self.mapped:
                raise Broken(f"{run} is to be unmapped and is not mapped")
            self.mapped.remove(run)


_PERFORM: Final[dict[type[Any], Callable[[Driver, Any, Fault | None], Outcome]]] = {
    AcquireHandles: Driver.acquire,
    ReleaseHandles: Driver.release,
    MapHeld: Driver.map_held,
    MapFresh: Driver.map_fresh,
    UnmapKeep: Driver.unmap_keep,
    UnmapRelease: Driver.unmap_release,
    PrepareRuns: Driver.prepare,
    CommitRuns: Driver.commit,
    AbortRuns: Driver.abort,
}
