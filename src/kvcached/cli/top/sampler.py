# SPDX-License-Identifier: Apache-2.0
"""What the cards' records say, several times a second: no lock is taken, no process is asked, nothing is written.

Each card's file is read once per sample; the sequence numbers of all slots are unpacked at once, and only what was written since the
last look is decoded. So the entries of one sample may lie a write apart; `kvctl list` reads until they agree.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from kvcached.card.budget import over_bytes, short_bytes
from kvcached.card.locks import slot_byte
from kvcached.card.record import EMPTY, VERSION, Kind, Record, decode_slot, text_of, without_memory
from kvcached.card.segment import SUFFIX, Damaged, Segment, open_existing

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.card.record import Header

PoolKey = tuple[str, str, int]
"""Card, instance and rank: what stays the same when a pool's entry moves to another slot or file."""
_SEQUENCE_AT: Final = 8
"""Where a copy of a slot has its sequence number, in all versions."""


class RankRow(NamedTuple):
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
    """One look in `thorough_every`, and the first, is thorough: it looks for new and replaced files and asks the kernel which of the
    entries at rest are alive. The looks between read the records of the files they know. A new entry is always asked about.
    """

    def __init__(self, run_dir: Path, clock_ns: Callable[[], int] = time.monotonic_ns, thorough_every: int = 1) -> None:
        self._run_dir = run_dir
        self._clock_ns = clock_ns
        self._thorough_every = thorough_every
        self._looks = 0
        self._readers: dict[str, _CardReader] = {}

    def sample(self) -> Sample:
        """Never raises for what other processes did to the files; a card that cannot be read says so in its place."""
        thorough = self._looks % self._thorough_every == 0
        self._looks += 1
        try:
            if thorough:
                self._find()
        except OSError as error:
            self._looks = 0
            return Sample(self._clock_ns(), problem=f"cannot read {self._run_dir}: {error.strerror}")
        cards = [card for reader in self._readers.values() if (card := reader.read(thorough)) is not None]
        return Sample(self._clock_ns(), tuple(cards))

    def _find(self) -> None:
        self._readers = {name: self._readers.get(name) or _CardReader(self._run_dir / name) for name in _card_names(self._run_dir)}


def _card_names(run_dir: Path) -> list[str]:
    try:
        with os.scandir(run_dir) as files:
            return sorted(file.name for file in files if file.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []


@dataclass(slots=True)
class _Slot:
    """`sequence` is that of `record`; -1 where the newest copy could not be read and is tried again."""

    number: int
    record: Record = EMPTY
    sequence: int = -1
    alive: bool = False

    @property
    def is_kv(self) -> bool:
        return self.record.kind == Kind.KV

    def turn(self, *, alive: bool) -> bool:
        """Whether it was otherwise."""
        turned, self.alive = self.alive != alive, alive
        return turned

    @property
    def precedence(self) -> tuple[bool, bool]:
        return not self.alive, not self.is_kv


@dataclass(slots=True)
class _Group:
    """The slots of one row: the one that is shown, and those whose leases are the rest of it."""

    key: PoolKey
    name: str
    first: _Slot
    others: list[_Slot]
    row: RankRow | None = None

    def current(self) -> RankRow:
        if not self.first.alive:
            return RankRow(self.key, self.name, False, without_memory(self.first.record))
        other_bytes = sum(slot.record.lease_bytes for slot in self.others)
        row = self.row
        if row is None or row.record is not self.first.record or row.other_bytes != other_bytes:
            row = self.row = RankRow(self.key, self.name, self.first.alive, self.first.record, other_bytes)
        return row


class _CardReader:
    """One path; follows the file when it is deleted and made again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._segment: Segment | None = None
        self._forget()

    def _forget(self) -> None:
        self._header: Header | None = None
        self._slots: list[_Slot] = []
        self._groups: list[_Group] = []
        self._sequences: Struct = Struct("")
        self._last: CardSample | None = None

    def read(self, thorough: bool) -> CardSample | None:
        """None for a file that went away just now."""
        try:
            return self._read(self._current(thorough), thorough)
        except FileNotFoundError:
            return None
        except (Damaged, OSError) as error:
            self._segment = None
            return CardSample(self._path.stem, "", problem=str(error))

    def _current(self, thorough: bool) -> Segment:
        if self._segment is None or (thorough and not self._segment.is_current()):
            self._segment = open_existing(self._path)
            self._forget()
        return self._segment

    def _read(self, segment: Segment, thorough: bool) -> CardSample:
        header = segment.header()
        if header is not self._header:
            self._adopt(header)
        size = self._sequences.size
        raw = os.pread(segment.file.fd, size, header.header_bytes).ljust(size, b"\0")
        changed, moved = self._look_again(segment, header, raw, thorough)
        if moved:
            self._groups = _grouped(header.uuid, self._slots)
        if self._last is None or changed or moved:
            self._last = _summary(header, self._slots, tuple(group.current() for group in self._groups))
        return self._last

    def _adopt(self, header: Header) -> None:
        """Of each slot two sequence numbers are looked at, one in each copy; they alone tell what was written since the last look."""
        half = header.slot_bytes // 2
        copy = f"{_SEQUENCE_AT}xQ{half - _SEQUENCE_AT - 8}x"
        self._sequences = Struct("<" + 2 * header.high_slots * copy)
        self._slots = [*self._slots[: header.high_slots], *map(_Slot, range(len(self._slots), header.high_slots))]
        self._header, self._last = header, None

    def _look_again(self, segment: Segment, header: Header, raw: bytes, thorough: bool) -> tuple[bool, bool]:
        """Whether any slot changed, and whether any changed the row in which it stands."""
        changed = moved = False
        numbers = iter(self._sequences.unpack(raw))
        for slot, newest in zip(self._slots, map(max, numbers, numbers), strict=True):
            if newest != slot.sequence:
                changed = True
                moved |= _rewrite(segment, header, slot, newest, raw)
            elif thorough and slot.record.kind != Kind.NONE:
                moved |= slot.turn(alive=segment.file.is_locked(slot_byte(slot.number)))
        return changed, moved


def _rewrite(segment: Segment, header: Header, slot: _Slot, newest: int, raw: bytes) -> bool:
    """An entry that was written since the last look was alive then: the kernel is asked only about those that rest or are new."""
    former, was_known = slot.record, slot.sequence >= 0
    record = slot.record = _decode(segment, header, slot.number, raw)
    slot.sequence = newest if record.sequence == newest else -1
    lives = (was_known and slot.sequence >= 0) or segment.file.is_locked(slot_byte(slot.number))
    turned = slot.turn(alive=record.kind != Kind.NONE and lives)
    return turned or _place(record) != _place(former)


def _place(record: Record) -> tuple[object, ...]:
    """What decides in which row a slot stands, and what the row is called."""
    return record.kind, record.rank, record.instance, record.name


def _decode(segment: Segment, header: Header, number: int, raw: bytes) -> Record:
    record = decode_slot(raw, number * header.slot_bytes, header.slot_bytes)
    return segment.read_slot(header, number) if record.kind == Kind.UNREADABLE else record


def _grouped(uuid: str, slots: list[_Slot]) -> list[_Group]:
    """KV and other memory of one rank make one row; a live entry hides the dead one that it replaces."""
    groups: dict[PoolKey, _Group] = {}
    for slot in sorted((slot for slot in slots if slot.record.kind != Kind.NONE), key=lambda slot: slot.precedence):
        key = (uuid, plain(text_of(slot.record.instance)) or f"slot {slot.number}", slot.record.rank)
        group = groups.get(key)
        if group is None:
            groups[key] = _Group(key, plain(text_of(slot.record.name)), slot, [] if slot.is_kv else [slot])
        elif slot.alive == group.first.alive and not slot.is_kv:
            group.others.append(slot)
    return [groups[key] for key in sorted(groups)]


def _summary(header: Header, slots: list[_Slot], rows: tuple[RankRow, ...]) -> CardSample:
    live = [slot.record for slot in slots if slot.alive]
    kv = [record for record in live if record.kind == Kind.KV]
    leased_bytes = sum(record.lease_bytes for record in live)
    return CardSample(
        uuid=header.uuid,
        name=plain(header.name),
        total_bytes=header.total_bytes,
        budget_bytes=header.budget_bytes,
        leased_bytes=leased_bytes,
        other_bytes=leased_bytes - sum(record.lease_bytes for record in kv),
        over_bytes=over_bytes(live, header.budget_bytes),
        short_bytes=short_bytes(live, header.budget_bytes),
        mapped_bytes=sum(record.mapped_bytes for record in kv),
        owned_bytes=sum(record.owned_bytes for record in kv),
        cached_bytes=sum(record.cached_bytes for record in kv),
        settled_at_ns=header.settled_at_ns,
        rows=rows,
    )


_HIDDEN: Final = "?"


def plain(text: str) -> str:
    """Names come from other processes: nothing in them may steer the terminal."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else _HIDDEN for letter in text)
