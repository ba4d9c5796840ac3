# SPDX-License-Identifier: Apache-2.0
"""What the cards' records say, several times a second: no lock is taken, no process is asked, nothing is written.

Each card's file is read once per sample, and only what changed since the last one is decoded. So the entries of one sample may lie
a write apart; `kvctl list` reads until they agree.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.card.budget import over_bytes, short_bytes
from kvcached.card.locks import slot_byte
from kvcached.card.record import VERSION, Kind, Record, decode_slot, text_of
from kvcached.card.segment import SUFFIX, Damaged, Segment, open_existing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcached.card.record import Header

PoolKey = tuple[str, str, int]
"""Card, instance and rank: what stays the same when a pool's entry moves to another slot or file."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a pool on a card. `other_bytes` is what the same rank leases that is not KV."""

    key: PoolKey
    name: str
    alive: bool
    record: Record
    other_bytes: int = 0

    @property
    def instance(self) -> str:
        return self.key[1]

    @property
    def rank(self) -> int:
        return self.key[2]

    @property
    def has_kv(self) -> bool:
        return self.record.kind == Kind.KV

    @property
    def known_version(self) -> bool:
        return self.record.version == VERSION

    @property
    def endpoint(self) -> Path | None:
        """Where the pool's owner listens."""
        return Path(text_of(self.record.endpoint)) if self.record.endpoint else None


@dataclass(frozen=True, slots=True)
class CardSample:
    """One card and its rows, in the order of instances and ranks. `problem` is not empty when its file could not be read."""

    uuid: str
    name: str
    total_bytes: int = 0
    budget_bytes: int = 0
    leased_bytes: int = 0
    other_bytes: int = 0
    over_bytes: int = 0
    short_bytes: int = 0
    mapped_bytes: int = 0
    owned_bytes: int = 0
    cached_bytes: int = 0
    settled_at_ns: int = 0
    problem: str = ""
    rows: tuple[RankRow, ...] = ()

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.leased_bytes)


@dataclass(frozen=True, slots=True)
class Sample:
    """All cards at one moment. `problem`: why the run directory could not be read."""

    now_ns: int
    cards: tuple[CardSample, ...] = ()
    problem: str = ""


class Sampler:
    """Reads the cards of one run directory again and again. Not for several threads at once."""

    def __init__(self, run_dir: Path, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._run_dir = run_dir
        self._clock_ns = clock_ns
        self._readers: dict[str, _CardReader] = {}

    def sample(self) -> Sample:
        """Never raises for what other processes did to the files; a card that cannot be read says so in its place."""
        try:
            names = _card_names(self._run_dir)
        except OSError as error:
            return Sample(self._clock_ns(), problem=f"cannot read {self._run_dir}: {error.strerror}")
        self._readers = {name: self._readers.get(name) or _CardReader(self._run_dir / name) for name in names}
        cards = [card for name in names if (card := self._readers[name].read()) is not None]
        return Sample(self._clock_ns(), tuple(cards))


def _card_names(run_dir: Path) -> list[str]:
    try:
        with os.scandir(run_dir) as files:
            return sorted(file.name for file in files if file.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []


@dataclass(slots=True)
class _Slot:
    number: int
    raw: bytes
    alive: bool
    record: Record


class _CardReader:
    """One path; follows the file when it is deleted and made again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._segment: Segment | None = None
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._header: Header | None = None
        self._last: CardSample | None = None

    def read(self) -> CardSample | None:
        """None for a file that went away just now."""
        try:
            return self._read(self._current())
        except FileNotFoundError:
            return None
        except (Damaged, OSError) as error:
            self._segment = None
            return CardSample(self._path.stem, "", problem=str(error))

    def _current(self) -> Segment:
        if self._segment is None or not self._segment.is_current():
            self._segment = open_existing(self._path)
            self._forget()
        return self._segment

    def _read(self, segment: Segment) -> CardSample:
        header = segment.header()
        size = header.high_slots * header.slot_bytes
        raw = os.pread(segment.file.fd, size, header.header_bytes).ljust(size, b"\0")
        changed = [slot for slot in range(header.high_slots) if self._update(segment, header, slot, raw)]
        if self._last is None or changed or header is not self._header:
            self._header = header
            self._last = _summary(header, self._slots.values())
        return self._last

    def _update(self, segment: Segment, header: Header, slot: int, raw: bytes) -> bool:
        """Whether the slot, or its process's life, is another than at the last look."""
        start = slot * header.slot_bytes
        part = raw[start : start + header.slot_bytes]
        known = self._slots.get(slot)
        record = known.record if known is not None and known.raw == part else _decode(segment, header, slot, part)
        alive = record.kind != Kind.NONE and segment.file.is_locked(slot_byte(slot))
        if known is not None and known.record is record and known.alive == alive:
            return False
        self._slots[slot] = _Slot(slot, part, alive, record)
        return True


def _decode(segment: Segment, header: Header, slot: int, part: bytes) -> Record:
    record = decode_slot(part, 0, header.slot_bytes)
    return segment.read_slot(header, slot) if record.kind == Kind.UNREADABLE else record


def _summary(header: Header, slots: Iterable[_Slot]) -> CardSample:
    used = [slot for slot in slots if slot.record.kind != Kind.NONE]
    live = [slot.record for slot in used if slot.alive]
    kv = [record for record in live if record.kind == Kind.KV]
    return CardSample(
        uuid=header.uuid,
        name=plain(header.name),
        total_bytes=header.total_bytes,
        budget_bytes=header.budget_bytes,
        leased_bytes=sum(record.lease_bytes for record in live),
        other_bytes=sum(record.lease_bytes for record in live if record.kind != Kind.KV),
        over_bytes=over_bytes(live, header.budget_bytes),
        short_bytes=short_bytes(live, header.budget_bytes),
        mapped_bytes=sum(record.mapped_bytes for record in kv),
        owned_bytes=sum(record.owned_bytes for record in kv),
        cached_bytes=sum(record.cached_bytes for record in kv),
        settled_at_ns=header.settled_at_ns,
        rows=_rows(header.uuid, used),
    )


def _rows(uuid: str, used: list[_Slot]) -> tuple[RankRow, ...]:
    """KV and other memory of one rank make one row; a live entry hides the dead one that it replaces."""
    rows: dict[PoolKey, RankRow] = {}
    for slot in sorted(used, key=_precedence):
        key = (uuid, plain(text_of(slot.record.instance)) or f"slot {slot.number}", slot.record.rank)
        first = rows.get(key)
        if first is None:
            other_bytes = 0 if slot.record.kind == Kind.KV else slot.record.lease_bytes
            rows[key] = RankRow(key, plain(text_of(slot.record.name)), slot.alive, slot.record, other_bytes)
        elif slot.alive == first.alive and slot.record.kind != Kind.KV:
            rows[key] = RankRow(key, first.name, first.alive, first.record, first.other_bytes + slot.record.lease_bytes)
    return tuple(rows[key] for key in sorted(rows))


def _precedence(slot: _Slot) -> tuple[bool, bool]:
    return not slot.alive, slot.record.kind != Kind.KV


_HIDDEN: Final = "?"


def plain(text: str) -> str:
    """Names come from other processes: nothing in them may steer the terminal."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else _HIDDEN for letter in text)
