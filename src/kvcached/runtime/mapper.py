# SPDX-License-Identifier: Apache-2.0
"""The mapper of an owner in the same process: implements the owner's port on held memory, without messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.errors import PoolExhausted
from kvcached.ranks.api import LimitsRequest, MapperStatus, MapperTally, Outcome, Report, Runs, Verdict, finished
from kvcached.runtime.fence import FenceFactory, NothingInFlight
from kvcached.runtime.held import DONE, HeldMemory, Lease
from kvcached.vmm.api import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvcached.ranks.facts import MapperFacts
    from kvcached.vmm.api import Arena


class Mapper:
    """Maps and unmaps runs of one arena, never beyond its lease. Implements `kvcached.ranks.api.MapperPort`.

    `handle_cache_bytes`: how many bytes of handles to keep for reuse after an unmap; they stay in the lease.
    `fence_timeout_s`: how long an unmap waits for work in flight before it answers BUSY.
    """

    def __init__(
        self,
        arena: Arena,
        entry: Lease,
        *,
        facts: MapperFacts,
        fence: FenceFactory = NothingInFlight,
        lease_deadline_s: float = 0.02,
        fence_timeout_s: float = 5.0,
        handle_cache_bytes: int = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.facts = facts
        self._held = HeldMemory(arena, entry, lease_deadline_s=lease_deadline_s, on_close=on_close)
        self._arena = arena
        self._fence = fence
        self._fence_timeout_s = fence_timeout_s
        self._handle_cache_bytes = handle_cache_bytes

    @property
    def base_address(self) -> int:
        return self._arena.base_address

    def map(self, runs: Runs, *, urgent: bool) -> Future[Outcome]:
        return finished(self._held.perform(lambda: self._map([Run(*run) for run in runs], urgent)))

    def unmap(self, runs: Runs, after_step: int) -> Future[Outcome]:
        """The fence covers all steps that were queued, so also `after_step`."""
        if not self._fence().wait(self._fence_timeout_s):
            return finished(Outcome(Verdict.BUSY, reason=f"work in flight did not finish within {self._fence_timeout_s:g} s"))
        return finished(self._held.perform(lambda: self._unmap([Run(*run) for run in runs])))

    def trim(self) -> Future[Outcome]:
        return finished(self._held.perform(lambda: Outcome(Verdict.DONE, size_bytes=self._arena.trim())))

    def set_limits(self, limits: LimitsRequest) -> Future[Outcome]:
        return finished(self._held.set_limits(limits))

    def report(self, report: Report) -> None:
        self._held.report(report)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """A mapper of this process is never lost to it."""

    def status(self, timeout_s: float) -> MapperStatus:
        return self._held.status()

    def tally(self, timeout_s: float) -> list[MapperTally]:
        return [self._held.times.tally()]

    def close(self) -> None:
        """Release all memory, then the lease, then the entry. A second call does nothing."""
        self._held.close()

    def _map(self, runs: Sequence[Run], urgent: bool) -> Outcome:
        self._cover(sum(run.count for run in runs) * self._held.page_bytes, urgent)
        with self._held.times.measured(self._held.times.map):
            self._arena.map(runs)
        return DONE

    def _cover(self, new_bytes: int, urgent: bool) -> None:
        """Cover `new_bytes` of new handles before the first is created; cached handles may serve, then the rest falls back at once."""
        missing_bytes = self._held.missing_bytes(new_bytes)
        if missing_bytes > 0 and not self._held.lease(missing_bytes, urgent=False).granted and self._arena.stats().cached_bytes:
            self._arena.trim()
        missing_bytes = self._held.missing_bytes(new_bytes)
        if missing_bytes > 0:
            result = self._held.lease(missing_bytes, urgent=urgent)
            if not result.granted:
                raise PoolExhausted(missing_bytes, result.grantable_bytes, "bytes", result.reason)

    def _unmap(self, runs: Sequence[Run]) -> Outcome:
        before = self._held.held_bytes()
        keep = self._arena.stats().cached_bytes + sum(run.count for run in runs) * self._held.page_bytes <= self._handle_cache_bytes
        with self._held.times.measured(self._held.times.unmap):
            self._arena.unmap(runs, keep=keep)
        return Outcome(Verdict.DONE, size_bytes=before - self._held.held_bytes())
