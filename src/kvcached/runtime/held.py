# SPDX-License-Identifier: Apache-2.0
"""An arena and the lease that covers it: the lease rises before the first create and falls only after the release has returned."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Protocol

from kvcached.card.budget import Refusal
from kvcached.card.record import Usage
from kvcached.errors import DeviceError, DeviceOutOfMemory, InvariantBroken, Misuse, PeerError, PeerRefused, PoolExhausted, StateUnknown
from kvcached.log_lines import fields
from kvcached.ranks.api import LimitsRequest, MapperStatus, Outcome, Report, Verdict
from kvcached.runtime.device_times import DeviceTimes
from kvcached.runtime.forking import OrphanedLock, in_forked_child
from kvcached.vmm.api import ZeroBacking

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.card.entry import LeaseResult
    from kvcached.vmm.api import Arena, ArenaStats

_log = logging.getLogger("kvcached.mapper")
_HEARTBEAT_S: Final = 0.25
_LOOKS: Final = 8
_HOPELESS: Final = frozenset({Refusal.LIMIT, Refusal.NEVER})
DONE: Final = Outcome(Verdict.DONE)


class Lease(Protocol):
    """What a mapper needs of its entry in the card's record; `kvcached.card.Entry` is the real one."""

    @property
    def lease_bytes(self) -> int: ...

    def lease(self, delta_bytes: int, *, owned: bool, deadline_s: float, want: bool) -> LeaseResult: ...

    def want(self, delta_bytes: int, *, owned: bool, ticket: int, deadline_s: float) -> int: ...

    def unlease(self, delta_bytes: int, usage: Usage | None = None) -> None: ...

    def publish(self, usage: Usage) -> None: ...

    def set_limits(self, limit_bytes: int, floor_bytes: int, weight: float, revision: int) -> None: ...

    def heartbeat(self) -> bool: ...

    def close(self) -> None: ...


class HeldMemory:
    """The one owner of an arena and its lease in a mapper, whoever tells the mapper what to do. Safe to use from any thread.

    `lock` orders leases and the driver calls that need one. Raises `PoolExhausted` when not even the zero page can be leased.
    """

    def __init__(self, arena: Arena, entry: Lease, *, lease_deadline_s: float = 0.02, on_close: Callable[[], None] | None = None) -> None:
        self.arena = arena
        self.page_bytes = arena.config.page_bytes * arena.config.planes
        self.lock: threading.Lock | OrphanedLock = threading.Lock()
        self.times = DeviceTimes()
        self._entry = entry
        self._lease_deadline_s = lease_deadline_s
        self._on_close = on_close
        self._report = Report()
        self._closed = False
        self._zero_bytes = 0 if arena.config.zero_backing is ZeroBacking.NEVER else arena.config.page_bytes
        self._lease_zero_handle()
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="kvcached-heart", daemon=True)
        self._heart.start()
        in_forked_child(self, HeldMemory._orphan)

    def _orphan(self) -> None:
        self.lock = OrphanedLock()

    def _lease_zero_handle(self) -> None:
        if self._zero_bytes:
            result = self.lease(self._zero_bytes, urgent=True)
            if not result.granted:
                raise PoolExhausted(self._zero_bytes, result.grantable_bytes, "bytes", f"the zero page needs a lease: {result.reason}")

    # ------------------------------------------------------------------ what changes what is held

    def perform(self, operation: Callable[[], Outcome]) -> Outcome:
        """Run `operation` under the lock. Afterwards the lease is what is held."""

        def locked() -> Outcome:
            with self.lock:
                self.refuse_closed()
                try:
                    return operation()
                finally:
                    self._account()

        return guarded(locked)

    def refuse_closed(self) -> None:
        """Raises `Misuse` after `close`."""
        if self._closed:
            raise Misuse("this mapper is closed")

    def held_bytes(self, stats: ArenaStats | None = None) -> int:
        """All bytes that the lease has to cover. The zero handle counts from the start, used or not."""
        stats = stats or self.arena.stats()
        return stats.held_bytes - stats.zero_bytes + self._zero_bytes

    def missing_bytes(self, new_bytes: int) -> int:
        """What the lease lacks for `new_bytes` of new handles."""
        return self.held_bytes() + new_bytes - self._entry.lease_bytes

    def lease(self, size_bytes: int, *, urgent: bool) -> LeaseResult:
        """All of it ownable: a take of parked pages asks nobody, so what is held must never eat into the floors of others."""
        with self.times.measured(self.times.lease):
            return self._entry.lease(size_bytes, owned=True, deadline_s=self._lease_deadline_s, want=urgent)

    def lease_in_turn(self, size_bytes: int, *, ticket: int) -> tuple[LeaseResult, int]:
        """The same for one of several ranks that requests wait for: with the place `ticket` (0: none yet), which they all hold on their
        cards. The place that is kept for another second comes back with a refusal that others can cure."""
        if ticket:
            self.queue(size_bytes, ticket)
        result = self.lease(size_bytes, urgent=True)
        if result.granted or result.refusal in _HOPELESS:
            return result, 0
        return result, self.queue(size_bytes, ticket)

    def queue(self, size_bytes: int, ticket: int) -> int:
        """Wait for so many bytes at the place `ticket`, 0: behind all, for another second. Returns the place, 0 when there is none."""
        return self._entry.want(size_bytes, owned=True, ticket=ticket, deadline_s=self._lease_deadline_s)

    def _account(self) -> None:
        """Lower the lease to what is held, and show with it where that is. Where nothing is given back nothing is written: no grant
        depends on what is shown, and the next report or heartbeat shows it. So what is shown is never more than what is leased.

        A record that cannot be reached changes nothing about the memory: the lease stays too high until a heartbeat has found it again.
        """
        stats = self.arena.stats()
        surplus = self._entry.lease_bytes - self.held_bytes(stats)
        if surplus > 0:
            try:
                self._entry.unlease(surplus, self._usage(stats))
            except PeerError as error:
                _log.warning("the lease could not be lowered: %s", error)

    # ------------------------------------------------------------------ the card's record

    def set_limits(self, limits: LimitsRequest) -> Outcome:
        return guarded(lambda: self._set_limits(limits))

    def _set_limits(self, limits: LimitsRequest) -> Outcome:
        with self.lock:
            self.refuse_closed()
            try:
                self._entry.set_limits(limits.limit_bytes, limits.floor_bytes, limits.weight, limits.revision)
            except PeerRefused as error:  # what the others hold or are promised stands against it
                return Outcome(Verdict.REFUSED, reason=str(error))
            except PeerError as error:
                return Outcome(Verdict.BUSY, reason=str(error))
        return DONE

    def report(self, report: Report) -> None:
        with self.lock:
            self._report = report
            if not self._closed:
                self._publish()

    def status(self) -> MapperStatus:
        """Raises `Misuse` after `close`. Lease and memory of one moment, unless the lease changes all the time: what is being mapped is not
        waited for."""
        stats, lease_bytes = self._look()
        return MapperStatus(
            lease_bytes=lease_bytes,
            mapped_bytes=stats.mapped_bytes,
            cached_handle_bytes=stats.cached_bytes,
            quarantined_bytes=stats.quarantined_bytes,
            held_bytes=self.held_bytes(stats),
        )

    def _look(self) -> tuple[ArenaStats, int]:
        lease_bytes = self._entry.lease_bytes
        for _ in range(_LOOKS):
            stats, before_bytes, lease_bytes = self.arena.stats(), lease_bytes, self._entry.lease_bytes
            if lease_bytes == before_bytes:
                break
        return stats, lease_bytes

    def _usage(self, stats: ArenaStats) -> Usage:
        report = self._report
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

    def _publish(self) -> None:
        try:
            self._entry.publish(self._usage(self.arena.stats()))
        except PeerError as error:
            _log.warning("the card's record could not be written: %s", error)

    def _beat(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S):
            with self.lock:
                if self._closed:
                    return
                try:
                    self._entry.heartbeat()
                    self._account()
                    self._publish()
                except PeerError as error:  # the lease is kept; the next beat tries again
                    _log.warning("the card's record could not be reached: %s", error)

    def close(self) -> None:
        """Release all memory, then the lease, then the entry. A second call does nothing."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
        self._stop.set()
        if self._heart is not threading.current_thread():
            self._heart.join(5.0)
        self.arena.close()
        self._entry.close()
        if self._on_close is not None:
            self._on_close()


def guarded(operation: Callable[[], Outcome]) -> Outcome:
    """Turn what the device and the lease raise into the outcome that the owner settles."""
    try:
        return operation()
    except PoolExhausted as error:
        return Outcome(Verdict.EXHAUSTED, size_bytes=error.available, reason=error.reason)
    except DeviceOutOfMemory as error:  # the driver is still tearing a dead process down, or others hold more than they lease
        return Outcome(Verdict.EXHAUSTED, reason=f"the device is full although the lease was granted: {error}")
    except StateUnknown as error:
        _log.error("quarantined: %s", error, extra=fields("quarantined", pages=list(error.pages)))
        return Outcome(Verdict.UNKNOWN, pages=error.pages, reason=str(error))
    except Misuse as error:
        return Outcome(Verdict.REFUSED, reason=str(error))
    except (DeviceError, PeerError, InvariantBroken) as error:
        _log.error("the mapper failed: %s", error, extra=fields("mapper_failed", reason=str(error)))
        return Outcome(Verdict.BROKEN, reason=f"{type(error).__name__}: {error}")
