# SPDX-License-Identifier: Apache-2.0
"""The mapper: an arena and the lease that covers it. Runs in the process whose memory it is, serves one owner."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Protocol

from kvcached.card.record import Usage
from kvcached.errors import DeviceError, DeviceOutOfMemory, Misuse, PeerError, PeerRefused, PoolExhausted, StateUnknown
from kvcached.ranks.api import LimitsRequest, MapperStatus, Outcome, Report, Runs, Verdict, finished
from kvcached.runtime.fence import FenceFactory, NothingInFlight
from kvcached.runtime.forking import OrphanedLock, in_forked_child
from kvcached.vmm.api import Run, ZeroBacking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvcached.card.entry import LeaseResult
    from kvcached.runtime.facts import MapperFacts
    from kvcached.vmm.api import Arena

_log = logging.getLogger("kvcached.mapper")
_HEARTBEAT_S: Final = 0.25


class Lease(Protocol):
    """What the mapper needs of its entry in the card's record; `kvcached.card.Entry` is the real one."""

    @property
    def lease_bytes(self) -> int: ...

    def lease(self, delta_bytes: int, *, owned: bool, deadline_s: float, want: bool) -> LeaseResult: ...

    def unlease(self, delta_bytes: int) -> None: ...

    def publish(self, usage: Usage) -> None: ...

    def set_limits(self, limit_bytes: int, floor_bytes: int, weight: float, revision: int) -> None: ...

    def heartbeat(self) -> bool: ...

    def close(self) -> None: ...


class Mapper:
    """Maps and unmaps runs of one arena, never beyond its lease.

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
        self._arena = arena
        self._entry = entry
        self._fence = fence
        self._lease_deadline_s = lease_deadline_s
        self._fence_timeout_s = fence_timeout_s
        self._handle_cache_bytes = handle_cache_bytes
        self._on_close = on_close
        self._lock: threading.Lock | OrphanedLock = threading.Lock()  # orders lease and driver calls
        self._report: Report | None = None
        self._closed = False
        self._page_bytes = arena.config.page_bytes * arena.config.planes
        self._zero_bytes = 0 if arena.config.zero_backing is ZeroBacking.NEVER else arena.config.page_bytes
        self._lease_zero_handle()
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="kvcached-heart", daemon=True)
        self._heart.start()
        in_forked_child(self, Mapper._orphan)

    def _orphan(self) -> None:
        self._lock = OrphanedLock()

    @property
    def base_address(self) -> int:
        return self._arena.base_address

    def _lease_zero_handle(self) -> None:
        if self._zero_bytes:
            result = self._lease(self._zero_bytes, urgent=True)
            if not result.granted:
                raise PoolExhausted(self._zero_bytes, result.grantable_bytes, "bytes", f"the zero page needs a lease: {result.reason}")

    # The port (kvcached.ranks.api.MapperPort): an owner in this process calls it directly.

    def map(self, runs: Runs, *, urgent: bool) -> Future[Outcome]:
        return finished(self._guard(lambda: self._map([Run(*run) for run in runs], urgent)))

    def unmap(self, runs: Runs) -> Future[Outcome]:
        return finished(self._guard(lambda: self._unmap([Run(*run) for run in runs])))

    def trim(self) -> Future[Outcome]:
        return finished(self._guard(self._trim))

    def set_limits(self, limits: LimitsRequest) -> Future[Outcome]:
        return finished(self._guard(lambda: self._set_limits(limits)))

    def report(self, report: Report) -> None:
        with self._lock:
            self._report = report
            if not self._closed:
                self._publish()

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """A mapper of this process is never lost to it."""

    def status(self, timeout_s: float) -> MapperStatus:
        stats = self._arena.stats()
        return MapperStatus(
            lease_bytes=self._entry.lease_bytes,
            mapped_bytes=stats.mapped_bytes,
            cached_handle_bytes=stats.cached_bytes,
            quarantined_bytes=stats.quarantined_bytes,
            held_bytes=self._held(),
        )

    def close(self) -> None:
        """Release all memory, then the lease, then the entry. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        if self._heart is not threading.current_thread():
            self._heart.join(5.0)
        self._arena.close()
        self._entry.close()
        if self._on_close is not None:
            self._on_close()

    def _guard(self, operation: Callable[[], Outcome]) -> Outcome:
        """Turn what the device and the lease raise into the outcome that the owner settles."""
        try:
            return operation()
        except PoolExhausted as error:
            return Outcome(Verdict.EXHAUSTED, size_bytes=error.available, reason=error.reason)
        except StateUnknown as error:
            _log.error("quarantined: %s", error)
            return Outcome(Verdict.UNKNOWN, pages=error.pages, reason=str(error))
        except Misuse as error:
            return Outcome(Verdict.REFUSED, reason=str(error))
        except DeviceError as error:
            _log.error("the device failed: %s", error)
            return Outcome(Verdict.BROKEN, reason=str(error))

    def _set_limits(self, limits: LimitsRequest) -> Outcome:
        with self._lock:
            self._refuse_closed()
            try:
                self._entry.set_limits(limits.limit_bytes, limits.floor_bytes, limits.weight, limits.revision)
            except PeerRefused as error:  # what the others hold or are promised stands against it
                return Outcome(Verdict.REFUSED, reason=str(error))
            except PeerError as error:
                return Outcome(Verdict.BUSY, reason=str(error))
        return Outcome(Verdict.DONE)

    def _held(self) -> int:
        """All bytes that the lease has to cover. The zero handle counts from the start, used or not."""
        stats = self._arena.stats()
        return stats.held_bytes - stats.zero_bytes + self._zero_bytes

    def _map(self, runs: Sequence[Run], urgent: bool) -> Outcome:
        with self._lock:
            self._refuse_closed()
            self._raise_lease(sum(run.count for run in runs) * self._page_bytes, urgent)
            try:
                self._arena.map(runs)
            except DeviceOutOfMemory as error:
                raise PoolExhausted(error.size_bytes, 0, "bytes", f"the device is full although the lease was granted: {error}") from error
            finally:
                self._account()
        return Outcome(Verdict.DONE)

    def _raise_lease(self, new_bytes: int, urgent: bool) -> None:
        """Cover `new_bytes` of new handles before the first is created; cached handles may serve, then the rest falls back at once."""
        missing_bytes = self._held() + new_bytes - self._entry.lease_bytes
        if missing_bytes > 0 and not self._lease(missing_bytes, urgent=False).granted and self._arena.stats().cached_bytes:
            self._arena.trim()
        missing_bytes = self._held() + new_bytes - self._entry.lease_bytes
        if missing_bytes > 0:
            result = self._lease(missing_bytes, urgent)
            if not result.granted:
                raise PoolExhausted(missing_bytes, result.grantable_bytes, "bytes", result.reason)

    def _lease(self, size_bytes: int, urgent: bool) -> LeaseResult:
        """All of it ownable: a take of parked pages asks nobody, so what is mapped must never eat into the floors of others."""
        return self._entry.lease(size_bytes, owned=True, deadline_s=self._lease_deadline_s, want=urgent)

    def _account(self) -> None:
        """Lower the lease to what is held, and publish. A record that cannot be reached changes nothing about the memory: the lease
        stays too high until a heartbeat has found the record again."""
        try:
            surplus = self._entry.lease_bytes - self._held()
            if surplus > 0:
                self._entry.unlease(surplus)
        except PeerError as error:
            _log.warning("the lease could not be lowered: %s", error)
        self._publish()

    def _unmap(self, runs: Sequence[Run]) -> Outcome:
        if not self._fence().wait(self._fence_timeout_s):
            return Outcome(Verdict.BUSY, reason=f"work in flight did not finish within {self._fence_timeout_s:g} s")
        with self._lock:
            self._refuse_closed()
            before = self._held()
            keep = self._arena.stats().cached_bytes + sum(run.count for run in runs) * self._page_bytes <= self._handle_cache_bytes
            try:
                self._arena.unmap(runs, keep=keep)
            finally:
                self._account()
            return Outcome(Verdict.DONE, size_bytes=before - self._held())

    def _trim(self) -> Outcome:
        with self._lock:
            self._refuse_closed()
            released = self._arena.trim()
            self._account()
        return Outcome(Verdict.DONE, size_bytes=released)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Misuse("this mapper is closed")

    def _publish(self) -> None:
        try:
            self._entry.publish(self._usage())
        except PeerError as error:
            _log.warning("the card's record could not be written: %s", error)

    def _usage(self) -> Usage:
        stats, report = self._arena.stats(), self._report or Report()
        return Usage(
            mapped_bytes=stats.mapped_bytes,
            prepared_bytes=stats.prepared_bytes,
            quarantined_bytes=stats.quarantined_bytes,
            handles_bytes=stats.cached_bytes,
            zero_bytes=stats.zero_bytes,
            virtual_bytes=stats.reserved_bytes,
            parked_bytes=report.parked_bytes,
            retired_bytes=report.retired_bytes,
            cached_bytes=report.cached_bytes,
            owned_bytes=report.owned_bytes,
        )

    def _beat(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            with self._lock:
                if self._closed:
                    return
                try:
                    self._entry.heartbeat()
                    self._account()
                except PeerError as error:  # the lease is kept; the next beat tries again
                    _log.warning("the card's record could not be reached: %s", error)
