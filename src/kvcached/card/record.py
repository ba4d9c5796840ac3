# SPDX-License-Identifier: Apache-2.0
"""The bytes of a card's file: one header, then one slot for each (pool, rank).

Header and slots are kept in two copies each. The write with sequence number n goes to copy n % 2 and carries a checksum, so a
write that stops at any byte leaves the former copy whole; of the valid copies the one with the higher sequence counts. A copy
that is all zeros is the valid, empty copy of sequence 0.

When two writers in a row die in the same slot, the second one's torn bytes may complete what the first one meant to write. That is
harmless: no byte of any record is read that nobody wrote, and the lock of the slot is free, so whichever of the dead the record
speaks of, it is reclaimed.

    header copy  magic 8, checksum 4, version 2, size 2, sequence 8, header_bytes 4, slots 4, slot_bytes 4, high_slots 4, ...
    slot copy    checksum 4, version 2, size 2, sequence 8, lease 8, floor 8, ownable 8 | the rest belongs to the version

Everything left of the bar, and the header's words above, keeps its place through all versions: a process that does not know
a slot's version still counts its lease, floor and ownable bytes. The checksum covers all `size` bytes that follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.errors import SettingError

MAGIC: Final = b"KVCACHED"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
SLOTS: Final = 128
SLOT_BYTES: Final = 1024
LONGEST_SETTLE_NS: Final = 10 * 10**9
UUID_CHARS: Final = 64
INSTANCE_CHARS: Final = 40
ENDPOINT_CHARS: Final = 107

_CHECKSUM: Final = Struct("<I")
_FRAME: Final = Struct("<IHHQQQQ")
_SLOT: Final = Struct("<IHHQQQQBBHIQdQQQQQ10Q40s96s108s")
_HEADER_FRAME: Final = Struct("<8sIHHQIIII")
_HEADER: Final = Struct("<8sIHHQIIIIQQQ64s64s")
_ZEROS: Final = bytes(_FRAME.size)


class Kind(IntEnum):
    """What an entry's memory is for."""

    NONE = 0
    KV = 1
    OTHER = 2  # weights, activations: never given back under pressure
    UNREADABLE = 255


@dataclass(frozen=True, slots=True)
class CardIdentity:
    """One card. `uuid` is what processes agree on; an index differs between them."""

    uuid: str
    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """What a pool says about one of its ranks when it registers. `endpoint` is the path of its owner's control socket, or ''."""

    kind: Kind
    instance: str
    name: str = ""
    endpoint: str = ""
    limit_bytes: int = NO_LIMIT_BYTES
    floor_bytes: int = 0
    weight: float = 1.0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Where an entry's bytes are, for show and for pressure."""

    mapped_bytes: int = 0
    owned_bytes: int = 0
    cached_bytes: int = 0  # evictable blocks
    parked_bytes: int = 0
    retired_bytes: int = 0
    prepared_bytes: int = 0
    handles_bytes: int = 0  # handles kept for reuse, mapped nowhere
    zero_bytes: int = 0
    quarantined_bytes: int = 0
    virtual_bytes: int = 0  # the reserved range

    @property
    def held_bytes(self) -> int:
        """Physical memory: what the lease has to cover."""
        return self.mapped_bytes + self.prepared_bytes + self.handles_bytes + self.zero_bytes + self.quarantined_bytes


USAGE_FIELDS: Final = tuple(field.name for field in fields(Usage))


class Record(NamedTuple):
    """A slot's contents, in the order of its bytes."""

    version: int = VERSION
    sequence: int = 0
    lease_bytes: int = 0
    floor_bytes: int = 0
    ownable_bytes: int = 0  # the part of the lease that owned blocks may fill
    kind: int = Kind.NONE
    want_class: int = 0
    rank: int = 0
    flags: int = 0
    limit_bytes: int = 0
    weight: float = 0.0
    revision: int = 0
    pid: int = 0
    wanted_bytes: int = 0
    ticket: int = 0
    wanted_until_ns: int = 0
    mapped_bytes: int = 0
    owned_bytes: int = 0
    cached_bytes: int = 0
    parked_bytes: int = 0
    retired_bytes: int = 0
    prepared_bytes: int = 0
    handles_bytes: int = 0
    zero_bytes: int = 0
    quarantined_bytes: int = 0
    virtual_bytes: int = 0
    instance: bytes = b""
    name: bytes = b""
    endpoint: bytes = b""

    @property
    def committed_bytes(self) -> int:
        """What this entry may own without asking, or may come back to own."""
        return max(self.floor_bytes, self.ownable_bytes)

    def waits(self, now_ns: int) -> bool:
        return self.ticket > 0 and now_ns <= self.wanted_until_ns

    def waiting_bytes(self, now_ns: int) -> int:
        """What it wants at this moment: who has stopped asking leaves its last wish in the record."""
        return self.wanted_bytes if self.waits(now_ns) else 0


EMPTY: Final = Record()
_LASTING: Final = ("version", "sequence", "kind", "rank", "flags", "pid", "instance", "name", "endpoint")
_USAGE_AT: Final = Record._fields.index(USAGE_FIELDS[0])
_USAGE_WORDS: Final = attrgetter(*USAGE_FIELDS)  # of a usage, or of a record, which has fields of the same names
_UNREADABLE: Final = Record(kind=Kind.UNREADABLE)


class Header(NamedTuple):
    """The card and its budget. `high_slots`: no slot at or above it was ever used. Written under the ledger lock only."""

    version: int
    sequence: int
    header_bytes: int
    slots: int
    slot_bytes: int
    high_slots: int
    budget_bytes: int
    total_bytes: int
    settled_at_ns: int  # until then only floors are granted: live processes may still have to register again
    uuid: str
    name: str

    def slot_offset(self, slot: int) -> int:
        return self.header_bytes + slot * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + self.slots * self.slot_bytes

    def settling(self, now_ns: int) -> bool:
        """A time too far ahead is from another boot or clock, not from a file that was just made."""
        return now_ns < self.settled_at_ns <= now_ns + LONGEST_SETTLE_NS


def new_header(identity: CardIdentity, budget_bytes: int, settled_at_ns: int) -> Header:
    layout = (VERSION, 1, HEADER_BYTES, SLOTS, SLOT_BYTES, 0)
    return Header._make((*layout, budget_bytes, identity.total_bytes, settled_at_ns, identity.uuid, identity.name))


def encode_header(header: Header) -> bytes:
    """One copy; it belongs at `header_copy_offset(header)`."""
    raw = bytearray(_HEADER.size)
    words = header[1:9]
    strings = (_text(header.uuid, UUID_CHARS), _text(header.name, 64))
    _HEADER.pack_into(raw, 0, MAGIC, 0, header.version, _HEADER.size, *words, *strings)
    _CHECKSUM.pack_into(raw, 8, crc32(memoryview(raw)[12:]))
    return bytes(raw)


def header_copy_offset(header: Header) -> int:
    return header.sequence % 2 * (HEADER_BYTES // 2)


def decode_header(raw: bytes) -> Header | None:
    """The header in the first `HEADER_BYTES` of a file, or None when neither copy is valid."""
    copies = [_decode_header_copy(raw, offset) for offset in (0, HEADER_BYTES // 2)]
    valid = [copy for copy in copies if copy is not None]
    return max(valid, key=lambda header: header.sequence) if valid else None


def _decode_header_copy(raw: bytes, offset: int) -> Header | None:
    if len(raw) < offset + HEADER_BYTES // 2:
        return None
    magic, checksum, version, size, *_ = _HEADER_FRAME.unpack_from(raw, offset)
    if magic != MAGIC or not _HEADER.size <= size <= HEADER_BYTES // 2:
        return None
    if crc32(raw[offset + 12 : offset + size]) != checksum:
        return None
    words = _HEADER.unpack_from(raw, offset)
    header = Header._make((version, *words[4:12], _untext(words[12]), _untext(words[13])))
    return header if _plausible(header) else None


def _plausible(header: Header) -> bool:
    return header.header_bytes >= HEADER_BYTES and header.slot_bytes >= 2 * _SLOT.size and header.high_slots <= header.slots


def encode_slot(record: Record) -> bytes:
    """One copy; it belongs at `slot_copy_offset(record, slot_bytes)` of its slot."""
    raw = bytearray(_SLOT.size)
    _SLOT.pack_into(raw, 0, 0, record.version, _SLOT.size, *record[1:])
    _CHECKSUM.pack_into(raw, 0, crc32(memoryview(raw)[4:]))
    return bytes(raw)


def slot_copy_offset(record: Record, slot_bytes: int) -> int:
    return record.sequence % 2 * (slot_bytes // 2)


def decode_slot(raw: bytes, offset: int, slot_bytes: int) -> Record:
    """The slot at `offset`; `Kind.UNREADABLE` when neither copy is valid."""
    half = slot_bytes // 2
    newer, older = offset, offset + half
    newer_frame, older_frame = _FRAME.unpack_from(raw, newer), _FRAME.unpack_from(raw, older)
    if older_frame[3] > newer_frame[3]:
        newer, newer_frame, older, older_frame = older, older_frame, newer, newer_frame
    record = _decode_copy(raw, newer, newer_frame, half)
    if record is None:
        record = _decode_copy(raw, older, older_frame, half)
    return _UNREADABLE if record is None else record


def _decode_copy(raw: bytes, at: int, frame: tuple[int, ...], room_bytes: int) -> Record | None:
    checksum, version, size, sequence, lease_bytes, floor_bytes, ownable_bytes = frame
    if size == 0:
        return EMPTY if raw[at : at + _FRAME.size] == _ZEROS else None
    if not _FRAME.size <= size <= room_bytes or crc32(raw[at + 4 : at + size]) != checksum:
        return None
    if version != VERSION or size != _SLOT.size:
        return Record(version, sequence, lease_bytes, floor_bytes, ownable_bytes, kind=Kind.OTHER, limit_bytes=lease_bytes)
    words = _SLOT.unpack_from(raw, at)
    instance, name, endpoint = words[-3:]
    return Record._make((version, *words[3:-3], instance.rstrip(b"\0"), name.rstrip(b"\0"), endpoint.rstrip(b"\0")))


def fresh_record(spec: EntrySpec, pid: int, lease_bytes: int = 0) -> Record:
    """The record of a new entry. Raises `SettingError` for values that do not fit."""
    _check_spec(spec)
    return Record(
        lease_bytes=lease_bytes,
        floor_bytes=spec.floor_bytes,
        ownable_bytes=lease_bytes,
        kind=spec.kind,
        rank=spec.rank,
        limit_bytes=spec.limit_bytes,
        weight=spec.weight,
        pid=pid,
        instance=_text(spec.instance, INSTANCE_CHARS),
        name=_text(spec.name, 96),
        endpoint=spec.endpoint.encode(),
    )


def _check_spec(spec: EntrySpec) -> None:
    if spec.kind not in (Kind.KV, Kind.OTHER):
        raise SettingError(f"kind is {spec.kind!r}; allowed are KV and OTHER")
    if not 0 < len(spec.instance.encode()) <= INSTANCE_CHARS:
        raise SettingError(f"instance is {spec.instance!r}; it needs 1 to {INSTANCE_CHARS} bytes")
    if len(spec.endpoint.encode()) > ENDPOINT_CHARS:
        raise SettingError(f"endpoint {spec.endpoint!r} is longer than {ENDPOINT_CHARS} bytes, the most that a Unix socket's path may have")
    if not 0 <= spec.rank < 1 << 16:
        raise SettingError(f"rank is {spec.rank}; allowed are 0 to 65535")
    check_limits(spec.limit_bytes, spec.floor_bytes, spec.weight)


def without_memory(record: Record) -> Record:
    """Who it was, and nothing of what it had: as a dead process's entry is shown, whose memory is free already."""
    return EMPTY._replace(limit_bytes=NO_LIMIT_BYTES, **{name: getattr(record, name) for name in _LASTING})


def check_limits(limit_bytes: int, floor_bytes: int, weight: float) -> None:
    """Raises `SettingError` for values that the record cannot hold or that contradict each other."""
    if not 0 <= floor_bytes <= limit_bytes <= NO_LIMIT_BYTES:
        raise SettingError(f"floor is {floor_bytes} and limit {limit_bytes} bytes; needed is 0 <= floor <= limit <= {NO_LIMIT_BYTES}")
    if not 0.001 <= weight <= 1000:
        raise SettingError(f"weight is {weight}; allowed are 0.001 to 1000")


def usage_of(record: Record) -> Usage:
    return Usage(*_USAGE_WORDS(record))


def with_usage(record: Record, usage: Usage) -> Record:
    return Record._make((*record[:_USAGE_AT], *_USAGE_WORDS(usage), *record[_USAGE_AT + len(USAGE_FIELDS) :]))


def text_of(field: bytes) -> str:
    return field.decode(errors="replace")


def _text(value: str, size: int) -> bytes:
    """UTF-8, cut to `size` bytes at a character's end."""
    return value.encode()[:size].decode(errors="ignore").encode()


def _untext(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
