# SPDX-License-Identifier: Apache-2.0
"""One (pool, rank) on a card, as the process that holds its memory sees it: the only writer of its slot."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcached.card.budget import Ask, Refusal, Room, Verdict, judge, next_ticket, want_class
from kvcached.card.locks import slot_byte
from kvcached.card.record import EMPTY, Header, Record, Usage, check_limits, encode_slot, slot_copy_offset, with_usage
from kvcached.card.registry import check_floor, enrol, reclaim
from kvcached.card.segment import Access, Damaged, Segment, open_or_create
from kvcached.errors import InvariantBroken, Misuse, PeerError, PeerLost, PeerTimeout, SettingError
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LEASE_DEADLINE_S: Final = 0.02
_HEARTBEAT_DEADLINE_S: Final = 0.1
_FOLLOW_ATTEMPTS: Final = 3
_WANT_NS: Final = 10**9
_CURABLE: Final = frozenset({Refusal.BUDGET, Refusal.DEVICE, Refusal.FLOORS, Refusal.TURN})


@dataclass(frozen=True, slots=True)
class Home:
    """Where a card's file is, and what the opener said about the card."""

    path: Path
    access: Access
    make_header: Callable[[], Header]
    measure_free: Callable[[], int] | None
    margin_bytes: int
    clock: Callable[[], float]

    def open(self) -> Segment:
        return open_or_create(self.path, self.access, self.make_header)

    def open_again(self) -> Segment:
        """For one who is in already: whatever is wrong with the place now may be right at the next beat. Raises `PeerLost`."""
        try:
            return self.open()
        except SettingError as error:
            raise PeerLost(str(error)) from error

    def now_ns(self) -> int:
        return int(self.clock() * 1e9)

    def free_bytes(self) -> int | None:
        return None if self.measure_free is None else self.measure_free() - self.margin_bytes


@dataclass(frozen=True, slots=True)
class LeaseResult:
    """`grantable_bytes`: the most that would have been granted; `refusal` and `reason` (for people) say why not more."""

    granted: bool
    grantable_bytes: int
    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class _Wish:
    lease_bytes: int
    ownable_bytes: int
    free_bytes: int | None
    want: bool = False
    keep_ticket: bool = False
    ask: bool = True
    ticket: int = 0

    @property
    def bytes(self) -> int:
        return max(self.lease_bytes, self.ownable_bytes)


class Entry:
    """Safe to use from any thread. Every call raises `Misuse` after `close` and in a forked child."""

    def __init__(self, home: Home, segment: Segment, header: Header, slot: int, record: Record) -> None:
        """Use `Card.register`."""
        self._home = home
        self._segment = segment
        self._header = header
        self._slot = slot
        self._record = record
        self._closed = False
        self._guard = threading.Lock()  # taken after the ledger lock of the file that the entry is in

    @property
    def slot(self) -> int:
        """The entry's number on the card; changes when the entry had to be registered again."""
        return self._checked()._slot

    @property
    def path(self) -> Path:
        """The card's file."""
        return self._home.path

    @property
    def rank(self) -> int:
        return self._record.rank

    @property
    def lease_bytes(self) -> int:
        """Bytes that this process may hold."""
        return self._checked()._record.lease_bytes

    @property
    def ownable_bytes(self) -> int:
        """The part of the lease that owned blocks may fill; the rest is for parked and cached pages."""
        return self._checked()._record.ownable_bytes

    @property
    def record(self) -> Record:
        """All words of the entry, as last written."""
        return self._checked()._record

    def lease(
        self, delta_bytes: int, *, owned: bool, deadline_s: float = LEASE_DEADLINE_S, want: bool = False, keep_ticket: bool = False
    ) -> LeaseResult:
        """Raise the lease by `delta_bytes`, all or nothing; `owned` says that owned blocks may fill them.

        Waits for the card's lock up to `deadline_s`, never for memory. With `want`, a refusal that others can cure leaves a ticket:
        nobody behind it is served before it for a second, so ask again until then or call `unwant`. A grant uses the ticket up
        unless `keep_ticket`. Raises `Misuse` for a delta that is not positive.
        """
        self._checked()
        free_bytes = self._home.free_bytes()  # before the lock is taken: the driver may be slow, and the others must not wait for it
        return self._wish(_Wish(delta_bytes, delta_bytes if owned else 0, free_bytes, want, keep_ticket), deadline_s)

    def own(self, delta_bytes: int, *, deadline_s: float = LEASE_DEADLINE_S, want: bool = False) -> LeaseResult:
        """Let owned blocks fill `delta_bytes` more of the lease. Raises `Misuse` when the lease has no such part."""
        if delta_bytes > self.lease_bytes - self.ownable_bytes:
            raise Misuse(f"own {delta_bytes} bytes: only {self.lease_bytes - self.ownable_bytes} of the lease are not ownable yet")
        return self._wish(_Wish(0, delta_bytes, None, want), deadline_s)

    def unlease(self, delta_bytes: int, usage: Usage | None = None) -> None:
        """Lower the lease, after the release has returned, and show with the same write where the bytes are now. Needs no lock of the
        card. Raises `Misuse` below zero."""

        def lower(record: Record) -> Record:
            lease_bytes = record.lease_bytes - _natural(delta_bytes, record.lease_bytes, "unlease")
            lowered = record._replace(lease_bytes=lease_bytes, ownable_bytes=min(lease_bytes, record.ownable_bytes))
            return lowered if usage is None else with_usage(lowered, usage)

        self._update(lower)

    def disown(self, delta_bytes: int) -> None:
        """Owned blocks need `delta_bytes` less; the lease stays, for parked and cached pages. Raises `Misuse` below zero."""
        self._update(
            lambda record: record._replace(ownable_bytes=record.ownable_bytes - _natural(delta_bytes, record.ownable_bytes, "disown"))
        )

    def want(self, delta_bytes: int, *, owned: bool, ticket: int = 0, deadline_s: float = LEASE_DEADLINE_S) -> int:
        """Take a place among those that wait, without asking: at `ticket` if it is given, else behind all; a place that is held
        already is renewed. Returns the ticket, 0 when there is none and the lock was not free within the deadline."""
        wish = _Wish(delta_bytes, delta_bytes if owned else 0, None, want=True, ask=False, ticket=ticket)
        self._wish(wish, deadline_s)
        return self._record.ticket

    def unwant(self) -> None:
        """Wait no more: give the ticket back."""
        self._update(lambda record: record._replace(ticket=0, wanted_bytes=0, wanted_until_ns=0))

    def publish(self, usage: Usage) -> None:
        """Show where the bytes are."""
        self._update(lambda record: with_usage(record, usage))

    def set_limits(
        self,
        limit_bytes: int | None = None,
        floor_bytes: int | None = None,
        weight: float | None = None,
        revision: int | None = None,
        deadline_s: float = _HEARTBEAT_DEADLINE_S,
    ) -> None:
        """Change what is given. Memory above a lower limit stays leased until it is given back.

        Raises `SettingError` (contradiction), `PeerRefused` (the floor does not fit beside the others), `PeerTimeout` (the ledger
        lock, needed to raise a floor).
        """

        def change(record: Record) -> Record:
            changed = record._replace(
                limit_bytes=record.limit_bytes if limit_bytes is None else limit_bytes,
                floor_bytes=record.floor_bytes if floor_bytes is None else floor_bytes,
                weight=record.weight if weight is None else weight,
                revision=record.revision if revision is None else revision,
            )
            check_limits(changed.limit_bytes, changed.floor_bytes, changed.weight)
            return changed

        if floor_bytes is None or floor_bytes <= self._checked()._record.floor_bytes:
            self._update(change)
            return
        self.heartbeat(deadline_s)
        with self._segment.file.ledger(deadline_s) as held:
            if not held:
                raise PeerTimeout(f"the ledger lock of {self.path} was not free within {deadline_s} s")
            header, records = self._segment.read()
            reclaim(self._segment, header, records)
            check_floor(records, self._slot, floor_bytes, header.budget_bytes)
            self._update(change)

    def heartbeat(self, deadline_s: float = _HEARTBEAT_DEADLINE_S) -> bool:
        """See that the card's file is the one this entry is in and that the entry reads as written; put both right.

        To be called a few times a second. True when the file was gone and the entry was registered again, with its true values,
        whatever the others hold. Raises `PeerLost`, `PeerTimeout` or `PeerRefused` (table full) when that did not work; the lease
        is kept, and a later call tries again.
        """
        self._checked()
        if not self._in_place():
            return self._follow(time.monotonic() + deadline_s)
        with self._guard:
            if not self._closed and not self._reads_as_written():
                self._store(self._record)
        return False

    def close(self) -> None:
        """Give the lease back and leave the card. A second call does nothing."""
        self._segment.file.check_process()
        with self._guard:
            if self._closed:
                return
            self._closed = True
            try:
                self._store(EMPTY)
            finally:
                self._segment.file.unlock(slot_byte(self._slot))

    def _checked(self) -> Entry:
        self._segment.file.check_process()
        if self._closed:
            raise Misuse("this entry of the card is closed")
        return self

    def _wish(self, wish: _Wish, deadline_s: float) -> LeaseResult:
        self._checked()
        if wish.bytes <= 0:
            raise Misuse(f"a lease of {wish.bytes} bytes; needed is a positive number")
        end_s = time.monotonic() + deadline_s
        try:
            for _ in range(_FOLLOW_ATTEMPTS):
                result = self._try(wish, end_s)
                if result is not None:
                    return result
                self._follow(end_s)
        except (PeerError, OSError) as error:
            return LeaseResult(False, 0, Refusal.LOST, f"{Refusal.LOST.value}: {error}")
        return LeaseResult(False, 0, Refusal.LOST, f"{Refusal.LOST.value}: it is deleted again and again")

    def _try(self, wish: _Wish, end_s: float) -> LeaseResult | None:
        """One attempt in the present file; None when that file is the card's no more, and nothing was changed."""
        segment = self._segment
        with segment.file.ledger(end_s - time.monotonic()) as held:
            if not held:
                return LeaseResult(False, 0, Refusal.BUSY, Refusal.BUSY.value)
            if not segment.is_current():
                return None
            try:
                header, records = segment.read()
            except Damaged:
                segment.discard()
                return None
            with self._guard:
                return self._decide(wish, segment, header, records) if self._segment is segment else None

    def _decide(self, wish: _Wish, segment: Segment, header: Header, records: list[Record]) -> LeaseResult | None:
        if self._closed:
            raise Misuse("this entry of the card is closed")
        before = records[self._slot] = self._record
        ask = Ask(self._slot, wish.lease_bytes, wish.ownable_bytes)
        now_ns = self._home.now_ns()
        used_bytes = None if wish.free_bytes is None else header.total_bytes - wish.free_bytes - self._home.margin_bytes
        room = Room(header.budget_bytes, wish.free_bytes, header.settling(now_ns), now_ns, used_bytes)
        if not wish.ask:
            self._queue(wish, ask, records, now_ns)
            return LeaseResult(False, 0, Refusal.TURN, "")
        verdict = judge(records, ask, room)
        if not verdict.granted and reclaim(segment, header, records):
            verdict = judge(records, ask, room)
        if not verdict.granted:
            if wish.want and verdict.refusal in _CURABLE:
                self._queue(wish, ask, records, now_ns)
            return _result(verdict)
        self._store(_raised(before, wish))
        if segment.is_current():
            return _result(verdict)
        self._store(before)  # the file went away in between: nobody may have seen this grant
        return None

    def _queue(self, wish: _Wish, ask: Ask, records: list[Record], now_ns: int) -> None:
        record = self._record
        ticket = wish.ticket or (record.ticket if record.waits(now_ns) else next_ticket(records, now_ns))
        self._store(
            record._replace(ticket=ticket, wanted_bytes=wish.bytes, want_class=want_class(record, ask), wanted_until_ns=now_ns + _WANT_NS)
        )

    def _update(self, change: Callable[[Record], Record]) -> None:
        self._checked()
        with self._guard:
            if self._closed:
                raise Misuse("this entry of the card is closed")
            self._store(change(self._record))

    def _store(self, record: Record) -> None:
        """The file first, then the local truth: what others cannot see does not count."""
        record = record._replace(sequence=self._record.sequence + 1)
        self._segment.write_slot(self._header, self._slot, record)
        self._record = record

    def _in_place(self) -> bool:
        try:
            self._segment.header()
        except Damaged:
            return False
        return self._segment.is_current()

    def _reads_as_written(self) -> bool:
        offset = self._header.slot_offset(self._slot) + slot_copy_offset(self._record, self._header.slot_bytes)
        return self._segment.holds(encode_slot(self._record), offset)

    def _follow(self, end_s: float) -> bool:
        """Register again in the file that the path names now, made if need be. False when the entry is in it already."""
        with self._guard:
            if self._closed or self._in_place():
                return False
            former, former_slot = self._segment, self._slot
            segment = self._home.open_again()
            with segment.file.ledger(end_s - time.monotonic()) as held:
                if not held:
                    raise PeerTimeout(f"the ledger lock of {self.path} was not free within the deadline")
                if segment.file is former.file or not segment.is_current():
                    return False
                header, records = segment.read()
                reclaim(segment, header, records)
                unqueued = self._record._replace(ticket=0, wanted_bytes=0, wanted_until_ns=0)
                self._header, self._slot, self._record = enrol(segment, header, records, unqueued)
                self._segment = segment
            former.file.unlock(slot_byte(former_slot))
            return True


def _natural(delta_bytes: int, most_bytes: int, call: str) -> int:
    if not 0 <= delta_bytes <= most_bytes:
        raise Misuse(f"{call} of {format_size(delta_bytes)}; allowed are 0 to {format_size(most_bytes)}")
    return delta_bytes


def _raised(record: Record, wish: _Wish) -> Record:
    raised = record._replace(lease_bytes=record.lease_bytes + wish.lease_bytes, ownable_bytes=record.ownable_bytes + wish.ownable_bytes)
    if raised.ownable_bytes > raised.lease_bytes:
        raise InvariantBroken(f"{raised.ownable_bytes} of {raised.lease_bytes} leased bytes would be ownable")
    if wish.keep_ticket or not raised.ticket:
        return raised
    wanted_bytes = max(0, raised.wanted_bytes - wish.bytes)
    return raised._replace(wanted_bytes=wanted_bytes) if wanted_bytes else raised._replace(wanted_bytes=0, ticket=0, wanted_until_ns=0)


def _result(verdict: Verdict) -> LeaseResult:
    return LeaseResult(*verdict)
