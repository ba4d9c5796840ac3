# SPDX-License-Identifier: Apache-2.0
"""What a rank's participant performs on arena and lease. Every action ends with an outcome, none raises.

The handles of a class that are mapped nowhere are the rank's credit. Mapping from credit needs no lease and creates nothing, so it
cannot fail for lack of memory and does not wait for an acquisition that is being made meanwhile.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvcached.errors import DeviceError, KVCachedError, Misuse, StateUnknown
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
from kvcached.ranks.api import LimitsRequest, MapperStatus, MapperTally, Outcome, Report, Verdict
from kvcached.ranks.operations import pages_of
from kvcached.ranks.transactions import Classes, PageRuns, classes_of
from kvcached.runtime.held import DONE, HeldMemory, Lease, guarded
from kvcached.vmm.api import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ranks.facts import MapperFacts
    from kvcached.vmm.api import Arena

_HANDLES_AT_ONCE: Final = 16
"""Handles created in one call of the arena: a map from credit waits for no more than these."""
_ABORT_ATTEMPTS: Final = 3


class RankMemory:
    """Arena and lease of one rank. Implements `kvcached.ranks.server.RankPort`. Safe to use from any thread."""

    def __init__(
        self, arena: Arena, entry: Lease, *, facts: MapperFacts, lease_deadline_s: float = 0.02, on_close: Callable[[], None] | None = None
    ) -> None:
        self.facts = facts
        self._held = HeldMemory(arena, entry, lease_deadline_s=lease_deadline_s, on_close=on_close)
        self._arena = arena
        self._times = self._held.times
        self._credit: Counter[int] = Counter()  # runs by pages per run
        self._credit_lock = threading.Lock()
        self._prepared: dict[int, PageRuns] = {}

    @property
    def base_address(self) -> int:
        return self._arena.base_address

    def credit(self) -> Classes:
        """Handles that are held and mapped nowhere."""
        with self._credit_lock:
            return tuple(sorted((+self._credit).items()))

    def perform(self, action: Action) -> Outcome:
        """Perform it, all or nothing. UNKNOWN names the pages of which nobody knows whether they are mapped."""
        match action:
            case MapHeld(runs):
                return self._map_held(runs)
            case AcquireHandles(classes, urgent, ticket):
                return self._held.perform(lambda: self._acquire(classes, urgent, ticket))
            case MapFresh(runs, urgent, ticket):
                return self._held.perform(lambda: self._map_fresh(runs, urgent, ticket))
            case ReleaseHandles(classes, ticket):
                return self._held.perform(lambda: self._release(classes, ticket))
            case UnmapKeep(runs):
                return self._held.perform(lambda: self._unmap_keep(runs))
            case UnmapRelease(runs, ticket):
                return _undone(self._held.perform(lambda: self._unmap_release(runs, ticket)), runs)
            case PrepareRuns(tx, runs):
                return self._held.perform(lambda: self._prepare(tx, runs))
            case CommitRuns(tx):
                return self._held.perform(lambda: self._commit(tx))
            case AbortRuns(tx):
                return self._abort(tx)

    def set_limits(self, limits: LimitsRequest) -> Outcome:
        """Enter them in the card's record. REFUSED, and why, when the card does not allow them."""
        return self._held.set_limits(limits)

    def report(self, report: Report) -> None:
        self._held.report(report)

    def status(self) -> MapperStatus:
        """Raises `Misuse` after `close`."""
        return self._held.status()

    def tally(self) -> MapperTally:
        """Of the steps that waited only the server knows."""
        return self._times.tally()

    def close(self) -> None:
        """Release all memory, then the lease, then the entry. A second call does nothing."""
        self._held.close()

    # ------------------------------------------------------------------ credit

    def _acquire(self, classes: Classes, urgent: bool, ticket: int) -> Outcome:
        refusal = self._cover(classes, urgent, ticket)
        if refusal is None:
            self._create(classes)
            self._add_credit(classes)
        return refusal or DONE

    def _cover(self, classes: Classes, urgent: bool, ticket: int) -> Outcome | None:
        """Raise the lease for handles that are about to be made; the refusal, when it is not granted. Credit is the owner's: what
        another class has too much of stays."""
        missing_bytes = self._held.missing_bytes(self._bytes_of(classes))
        if missing_bytes <= 0:
            return None
        if urgent:
            result, place = self._held.lease_in_turn(missing_bytes, ticket=ticket)
        else:
            result, place = self._held.lease(missing_bytes, urgent=False), 0
        if result.granted:
            return None
        return Outcome(Verdict.EXHAUSTED, size_bytes=result.grantable_bytes, reason=result.reason, ticket=place)

    def _bytes_of(self, classes: Classes) -> int:
        return sum(pages * runs for pages, runs in classes) * self._held.page_bytes

    def _create(self, classes: Classes) -> None:
        """All of them or none; a few at a time, so that a map from credit gets its turn in between."""
        at_once = max(1, _HANDLES_AT_ONCE // self._arena.config.planes)
        made: list[tuple[int, int]] = []
        try:
            for pages, runs in classes:
                for first in range(0, runs, at_once):
                    some = min(at_once, runs - first)
                    with self._times.measured(self._times.map):
                        self._arena.acquire(pages, some)
                    made.append((pages, some))
        except KVCachedError:
            self._destroy(tuple(made))
            raise

    def _destroy(self, classes: Classes) -> int:
        """Release so many handles of each class, which need not be the same ones. Returns bytes."""
        return sum(self._arena.trim(pages, runs) for pages, runs in classes if runs)

    def _release(self, classes: Classes, ticket: int) -> Outcome:
        self._take_credit(classes)
        self._keep_place(classes, ticket)
        return Outcome(Verdict.DONE, size_bytes=self._destroy(classes))

    def _keep_place(self, classes: Classes, ticket: int) -> None:
        """Before the lease falls: a grant has used the place up, and two owners that each lose one on one of two cards would take turns
        in being refused."""
        if ticket:
            self._held.queue(self._bytes_of(classes), ticket)

    def _add_credit(self, classes: Classes) -> None:
        with self._credit_lock:
            self._credit.update(dict(classes))

    def _take_credit(self, classes: Classes) -> None:
        """Raises `Misuse`, and takes nothing, when a class has fewer."""
        with self._credit_lock:
            for pages, runs in classes:
                if self._credit[pages] < runs:
                    raise Misuse(f"{runs} runs of {pages} pages were promised from credit, {self._credit[pages]} are held")
            self._credit.subtract(dict(classes))

    # ------------------------------------------------------------------ maps and unmaps

    def _map_held(self, runs: PageRuns) -> Outcome:
        outcome = guarded(lambda: self._map_from_credit(runs))
        if outcome.verdict in (Verdict.DONE, Verdict.UNKNOWN):
            return outcome
        return Outcome(Verdict.BROKEN, reason=outcome.reason)  # what was promised was not kept, whatever the reason

    def _map_from_credit(self, runs: PageRuns) -> Outcome:
        self._held.refuse_closed()
        classes = classes_of(runs)
        self._take_credit(classes)
        try:
            self._map(runs)
        except StateUnknown:  # some of the handles are fenced off with their pages
            raise
        except KVCachedError:
            self._add_credit(classes)
            raise
        return DONE

    def _map(self, runs: PageRuns) -> None:
        with self._times.measured(self._times.map):
            self._arena.map(_runs(runs))

    def _unmap(self, runs: PageRuns, *, keep: bool) -> None:
        with self._times.measured(self._times.unmap):
            self._arena.unmap(_runs(runs), keep=keep)

    def _map_fresh(self, runs: PageRuns, urgent: bool, ticket: int) -> Outcome:
        """Make the handles first: maps take what is cached, and credit must be what it was afterwards."""
        classes = classes_of(runs)
        refusal = self._cover(classes, urgent, ticket)
        if refusal is not None:
            return refusal
        self._create(classes)
        try:
            self._map(runs)
        except StateUnknown:
            raise
        except KVCachedError:
            self._destroy(classes)
            raise
        return DONE

    def _unmap_keep(self, runs: PageRuns) -> Outcome:
        try:
            self._unmap(runs, keep=True)
        except DeviceError as error:  # all is mapped as before, and on the other ranks it is not
            raise StateUnknown(f"a promised unmap failed: {error}", pages_of(runs)) from error
        self._add_credit(classes_of(runs))
        return DONE

    def _unmap_release(self, runs: PageRuns, ticket: int) -> Outcome:
        self._keep_place(classes_of(runs), ticket)
        self._unmap(runs, keep=False)
        return Outcome(Verdict.DONE, size_bytes=self._bytes_of(classes_of(runs)))

    def _prepare(self, tx: int, runs: PageRuns) -> Outcome:
        with self._times.measured(self._times.unmap):
            self._arena.prepare(tx, _runs(runs))
        self._prepared[tx] = runs
        return DONE

    def _commit(self, tx: int) -> Outcome:
        with self._times.measured(self._times.unmap):
            self._arena.commit(tx, keep=False)
        return Outcome(Verdict.DONE, size_bytes=self._bytes_of(classes_of(self._prepared.pop(tx, ()))))

    def _abort(self, tx: int) -> Outcome:
        """The handles are there, so what fails may succeed the next time."""

        def abort() -> Outcome:
            self._arena.abort(tx)
            return DONE

        for _ in range(_ABORT_ATTEMPTS):
            outcome = self._held.perform(abort)
            if outcome.verdict in (Verdict.DONE, Verdict.UNKNOWN):
                break
        return _undone(outcome, self._prepared.pop(tx, ()))


def _runs(runs: PageRuns) -> list[Run]:
    return [Run(*run) for run in runs]


def _undone(outcome: Outcome, runs: PageRuns) -> Outcome:
    """An undo that failed leaves these pages other than on the ranks where it did not."""
    if outcome.verdict is Verdict.DONE:
        return outcome
    return Outcome(Verdict.UNKNOWN, pages=outcome.pages or pages_of(runs), reason=outcome.reason)
