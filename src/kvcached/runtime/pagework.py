# SPDX-License-Identifier: Apache-2.0
"""Performing a ledger's plans: map and unmap through the mapper, without the pool's lock, and settle what came of it under the lock."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, NamedTuple

from kvcached.core.plans import GrowPlan, ShrinkPlan
from kvcached.errors import Misuse, StateUnknown
from kvcached.ranks.api import Outcome, Verdict
from kvcached.runtime.forking import FORKED, OrphanedLock, in_forked_child

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.core.ledger import Ledger
    from kvcached.ranks.api import MapperPort


class Unmapping(NamedTuple):
    """What is parked was emptied at or before `after_step`."""

    plan: ShrinkPlan
    after_step: int


class PageWork:
    """Owns the plans that are under way. `lock` is the pool's; every method may be called with it or without it.

    An answer that comes late is settled by whoever settles next, so nothing is lost and nobody has to wait for it. An outcome that
    leaves unknown what is mapped makes this object, and with it the pool, refuse all work: `StateUnknown`.
    """

    def __init__(self, ledger: Ledger, port: MapperPort, lock: threading.RLock, *, large_run_pages: int, stranded_fraction: float) -> None:
        self._ledger = ledger
        self._port = port
        self._lock: threading.RLock | OrphanedLock = lock
        self._large_run_pages = large_run_pages
        self._stranded_fraction = stranded_fraction
        self._under_way: list[tuple[GrowPlan | ShrinkPlan, Future[Outcome]]] = []
        self._books = threading.Lock()  # of `_under_way`: whoever waits for an answer may hold the pool's lock
        self._answered = threading.Event()
        self._closed = False
        self.failed: StateUnknown | Misuse | None = None
        port.when_lost(self.fail)
        in_forked_child(self, PageWork._orphan)

    def _orphan(self) -> None:
        self._lock = OrphanedLock()
        self._books = threading.Lock()
        self.failed = Misuse(FORKED)

    def map(self, pages: int, *, urgent: bool, deadline: float, is_wanted: Callable[[], bool] | None = None) -> Outcome | None:
        """Map up to `pages` more pages, as the limit allows. The outcome; None when the limit allows none or no answer came in time, or
        when they are not wanted any more: `is_wanted` is asked with the lock held."""
        with self._lock:
            self.refuse()
            self.settle()
            if is_wanted is not None and not is_wanted():
                return None
            if urgent:
                self._make_room(pages, deadline)
            plan = self._ledger.plan_grow(pages, max_run_pages=self._run_pages(pages))
        if not plan.runs:
            return None
        return self._wait(self._perform(plan, lambda: self._port.map(plan.runs, urgent=urgent)), deadline)

    def plan_unmap(self, pages: int, keep_parked: int) -> Unmapping:
        """Up to `pages` parked pages in whole runs, leaving `keep_parked`. They count as on their way out until `unmap` has ended."""
        with self._lock:
            self.refuse()
            self.settle()
            return Unmapping(self._ledger.plan_shrink(pages, keep_parked=keep_parked), self._ledger.completed_marker)

    def unmap(self, planned: Unmapping, deadline: float) -> Outcome | None:
        """None when no pages were planned or no answer came in time."""
        plan, after_step = planned
        return self._wait(self._perform(plan, lambda: self._port.unmap(plan.runs, after_step)), deadline) if plan.runs else None

    def await_unmaps(self, deadline: float) -> bool:
        """Whether pages that were on their way out are gone now: what they held can be had again."""
        with self._lock:
            before = self._ledger.counts().unmapping_pages
            while self._ledger.counts().unmapping_pages and self._await_answer(deadline):
                pass
            return self._ledger.counts().unmapping_pages < before

    def await_maps(self, deadline: float) -> None:
        """Pages that somebody else is mapping just now may be enough."""
        with self._lock:
            while self._ledger.counts().mapping_pages and self._await_answer(deadline):
                pass

    def _make_room(self, pages: int, deadline: float) -> None:
        """Pages on their way out count against the limit until they are gone: wait for them where they stand in the way."""
        counts = self._ledger.counts()
        if counts.limit_pages - counts.held_pages < pages and counts.unmapping_pages:
            self.await_unmaps(deadline)

    def _await_answer(self, deadline: float) -> bool:
        self._answered.clear()
        if self.settle():
            return True
        if not self._answered.wait(max(0.0, deadline - time.monotonic())):
            return False
        self.settle()
        return True

    def _run_pages(self, pages: int) -> int:
        """A large run only where it is filled, and while few bytes are stranded in runs that are partly used."""
        large, stranded = self._large_run_pages, self._ledger.stranded_pages()
        return large if pages >= large and stranded <= self._ledger.held_pages * self._stranded_fraction else 1

    def _perform(self, plan: GrowPlan | ShrinkPlan, call: Callable[[], Future[Outcome]]) -> Future[Outcome]:
        try:
            future = call()
        except BaseException as error:  # raised again: whatever it is, it is not known what the call did
            with self._lock:
                self._settle(plan, Outcome(Verdict.BROKEN, reason=f"{type(error).__name__}: {error}"))
            raise
        with self._books:
            self._under_way.append((plan, future))
        future.add_done_callback(lambda _: self._answered.set())
        return future

    def _wait(self, future: Future[Outcome], deadline: float) -> Outcome | None:
        if not future.done():
            wait_for([future], max(0.0, deadline - time.monotonic()))
        with self._lock:
            is_done = future.done()  # before it is settled: what is told is in the ledger
            self.settle()
            self.refuse()
        return future.result() if is_done else None

    def settle(self) -> bool:
        """Write every answer that has come into the ledger. Whether there was one."""
        with self._lock:
            with self._books:
                seen = [(pair, pair[1].done()) for pair in self._under_way]  # once: an answer may come in between
                self._under_way = [pair for pair, is_done in seen if not is_done]
            done = [pair for pair, is_done in seen if is_done]
            for plan, future in done:
                error = future.exception()
                self._settle(plan, Outcome(Verdict.BROKEN, reason=str(error)) if error else future.result())
        return bool(done)

    def _settle(self, plan: GrowPlan | ShrinkPlan, outcome: Outcome) -> None:
        done = outcome.verdict is Verdict.DONE
        if isinstance(plan, GrowPlan):
            self._ledger.settle_grow(plan, mapped=done, quarantined=outcome.pages)
        else:
            self._ledger.settle_shrink(plan, released=done, quarantined=outcome.pages)
        unknown = outcome.verdict is Verdict.UNKNOWN and not outcome.pages
        if unknown or outcome.verdict in (Verdict.BROKEN, Verdict.REFUSED):
            self.fail(f"mapping ended {outcome.verdict.name}: {outcome.reason}")

    def fail(self, reason: str) -> None:
        """From here on every call is refused."""
        self.failed = self.failed or StateUnknown(f"this pool refuses work: {reason}")

    @property
    def refusing(self) -> bool:
        return self._closed or self.failed is not None

    def refuse(self) -> None:
        """Raises `StateUnknown` after a failure, `Misuse` after `close` and in a forked child."""
        if self.failed is not None:
            raise self.failed
        if self._closed:
            raise Misuse("this pool is closed")

    def close(self) -> bool:
        """Refuse from here on. False when that was so already."""
        with self._lock:
            first, self._closed = not self._closed, True
        return first
