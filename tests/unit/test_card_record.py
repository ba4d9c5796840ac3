# SPDX-License-Identifier: Apache-2.0
"""The bytes of a card's file: round trips, torn writes, other versions."""

from __future__ import annotations

import struct
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.card.record import (
    EMPTY,
    HEADER_BYTES,
    LONGEST_SETTLE_NS,
    NO_LIMIT_BYTES,
    SLOT_BYTES,
    CardIdentity,
    EntrySpec,
    Header,
    Kind,
    Record,
    Usage,
    decode_header,
    decode_slot,
    encode_header,
    encode_slot,
    fresh_record,
    header_copy_offset,
    new_header,
    slot_copy_offset,
    text_of,
    usage_of,
    with_usage,
)
from kvcached.errors import SettingError

IDENTITY = CardIdentity("GPU-8c1f", "a card", 1 << 37)
U64 = st.integers(0, (1 << 64) - 1)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=10).map(str.encode)


@st.composite
def records(draw: st.DrawFn) -> Record:
    small = st.integers(0, 255)
    words = [draw(U64) for _ in range(4)] + [draw(st.sampled_from([Kind.KV, Kind.OTHER])), draw(small), draw(small), draw(small)]
    words += [draw(U64), draw(st.floats(0.001, 1000)), *(draw(U64) for _ in range(15))]
    return Record(1, *words, draw(TEXT), draw(TEXT), draw(TEXT))  # type: ignore[arg-type]


def slot_with(*written: Record) -> bytearray:
    raw = bytearray(SLOT_BYTES)
    for record in written:
        copy = encode_slot(record)
        offset = slot_copy_offset(record, SLOT_BYTES)
        raw[offset : offset + len(copy)] = copy
    return raw


def decoded(raw: bytearray) -> Record:
    return decode_slot(bytes(raw), 0, SLOT_BYTES)


@settings(deadline=None)
@given(records())
def test_a_record_reads_as_written(record: Record) -> None:
    assert decoded(slot_with(record)) == record


@settings(max_examples=20, deadline=None)
@given(records(), records(), st.integers(0, (1 << 64) - 3), st.randoms(use_true_random=False))
def test_a_write_torn_at_any_byte_leaves_the_old_or_the_new_record(old: Record, new: Record, sequence: int, random: object) -> None:
    older, old, new = (record._replace(sequence=sequence + step) for step, record in enumerate((new, old, new)))
    before, copy = slot_with(older, old), encode_slot(new)
    offset = slot_copy_offset(new, SLOT_BYTES)
    for torn in range(len(copy) + 1):
        forwards, backwards = bytearray(before), bytearray(before)
        forwards[offset : offset + torn] = copy[:torn]
        backwards[offset + torn : offset + len(copy)] = copy[torn:]
        assert decoded(forwards) in (old, new)
        assert decoded(backwards) in (old, new)
    assert decoded(forwards) == new


@settings(deadline=None)
@given(records(), records(), st.data())
def test_a_write_that_arrives_in_pieces_leaves_the_old_or_the_new_record(old: Record, new: Record, data: st.DataObject) -> None:
    older, old, new = (record._replace(sequence=4 + step) for step, record in enumerate((new, old, new)))
    raw, copy = slot_with(older, old), encode_slot(new)
    offset = slot_copy_offset(new, SLOT_BYTES)
    for index in data.draw(st.sets(st.integers(0, len(copy) - 1))):
        raw[offset + index] = copy[index]
    assert decoded(raw) in (old, new)


def test_the_first_write_torn_at_any_byte_leaves_an_empty_slot() -> None:
    new = fresh_record(EntrySpec(Kind.KV, "a"), pid=1)._replace(sequence=1)
    copy, offset = encode_slot(new), slot_copy_offset(new, SLOT_BYTES)
    for torn in range(len(copy)):
        raw = bytearray(SLOT_BYTES)
        raw[offset : offset + torn] = copy[:torn]
        assert decoded(raw) in (EMPTY, new)


def test_a_slot_never_written_is_empty() -> None:
    assert decoded(bytearray(SLOT_BYTES)) == EMPTY


def test_the_copy_with_the_higher_sequence_counts() -> None:
    old, new = (Record(sequence=sequence, kind=Kind.KV, lease_bytes=sequence) for sequence in (7, 8))
    assert decoded(slot_with(old, new)) == new
    assert decoded(slot_with(new, old)) == new


@settings(deadline=None)
@given(st.integers(0, 427), st.integers(1, 255))
def test_a_changed_byte_in_the_newer_copy_falls_back_to_the_older(index: int, flip: int) -> None:
    old, new = (Record(sequence=sequence, kind=Kind.KV, lease_bytes=sequence) for sequence in (6, 7))
    raw = slot_with(old, new)
    raw[slot_copy_offset(new, SLOT_BYTES) + index] ^= flip
    assert decoded(raw) == old


def test_two_damaged_copies_are_unreadable_not_empty() -> None:
    raw = slot_with(Record(sequence=1, kind=Kind.KV), Record(sequence=2, kind=Kind.KV))
    for offset in (20, SLOT_BYTES // 2 + 20):
        raw[offset] ^= 1
    assert decoded(raw).kind == Kind.UNREADABLE


@pytest.mark.parametrize("size", [40, 200, 428, 512])
def test_another_version_is_counted_by_its_fixed_words(size: int) -> None:
    raw = bytearray(SLOT_BYTES)
    struct.pack_into("<IHHQQQQ", raw, 0, 0, 9, size, 4, 100, 30, 70)
    raw[40:size] = bytes(range(1, 256))[: size - 40] if size <= 295 else b"\x5a" * (size - 40)
    struct.pack_into("<I", raw, 0, crc32(raw[4:size]))
    record = decoded(raw)
    assert (record.version, record.lease_bytes, record.floor_bytes, record.ownable_bytes) == (9, 100, 30, 70)
    assert record.kind == Kind.OTHER


@pytest.mark.parametrize("size", [1, 39, 513, 65535])
def test_a_size_that_cannot_be_is_damage(size: int) -> None:
    raw = bytearray(SLOT_BYTES)
    struct.pack_into("<IHHQQQQ", raw, 0, 0, 1, size, 4, 100, 30, 70)
    struct.pack_into("<I", raw, 0, crc32(raw[4:size]))
    struct.pack_into("<I", raw, SLOT_BYTES // 2, 1)
    assert decoded(raw).kind == Kind.UNREADABLE


def header_page(*written: Header) -> bytearray:
    raw = bytearray(HEADER_BYTES)
    for header in written:
        copy = encode_header(header)
        raw[header_copy_offset(header) : header_copy_offset(header) + len(copy)] = copy
    return raw


def test_a_header_reads_as_written_and_the_newer_copy_counts() -> None:
    old = new_header(IDENTITY, 100, 5)
    new = old._replace(sequence=2, budget_bytes=200, high_slots=3)
    assert decode_header(bytes(header_page(old))) == old
    assert decode_header(bytes(header_page(old, new))) == new


def test_a_header_torn_at_any_byte_leaves_the_old_or_the_new_one() -> None:
    older = new_header(IDENTITY, 100, 5)
    old, new = older._replace(sequence=2, budget_bytes=200), older._replace(sequence=3, budget_bytes=300)
    copy, offset = encode_header(new), header_copy_offset(new)
    for torn in range(len(copy) + 1):
        raw = header_page(older, old)
        raw[offset : offset + torn] = copy[:torn]
        assert decode_header(bytes(raw)) in (old, new)


@pytest.mark.parametrize("raw", [b"", bytes(HEADER_BYTES), b"x" * HEADER_BYTES, bytes(100)])
def test_what_is_not_a_header_is_none(raw: bytes) -> None:
    assert decode_header(raw) is None


@pytest.mark.parametrize("broken", [{"slot_bytes": 64}, {"high_slots": 1 << 20}, {"header_bytes": 12}])
def test_a_header_with_impossible_numbers_is_none(broken: dict[str, int]) -> None:
    assert decode_header(bytes(header_page(new_header(IDENTITY, 100, 5)._replace(**broken)))) is None


def test_settling_ends_and_a_time_of_another_boot_does_not_count() -> None:
    header = new_header(IDENTITY, 100, 2_000)
    assert header.settling(1_999)
    assert not header.settling(2_000)
    assert not header._replace(settled_at_ns=LONGEST_SETTLE_NS + 2).settling(1)


def test_usage_survives_the_record() -> None:
    usage = Usage(*range(1, 11))
    assert usage_of(decoded(slot_with(with_usage(Record(sequence=1, kind=Kind.KV), usage)))) == usage
    assert usage.held_bytes == 1 + 6 + 7 + 8 + 9


def test_a_long_name_is_cut_at_a_character() -> None:
    record = fresh_record(EntrySpec(Kind.KV, "a", name="ä" * 60 + "b"), pid=1)
    assert text_of(record.name) == "ä" * 48
    record = fresh_record(EntrySpec(Kind.KV, "a", name="b" + "ä" * 60), pid=1)
    assert text_of(record.name) == "b" + "ä" * 47


@pytest.mark.parametrize(
    "spec",
    [
        EntrySpec(Kind.NONE, "a"),
        EntrySpec(Kind.KV, ""),
        EntrySpec(Kind.KV, "a" * 41),
        EntrySpec(Kind.KV, "a", endpoint="/" + "e" * 107),
        EntrySpec(Kind.KV, "a", rank=1 << 16),
        EntrySpec(Kind.KV, "a", rank=-1),
        EntrySpec(Kind.KV, "a", limit_bytes=-1),
        EntrySpec(Kind.KV, "a", limit_bytes=NO_LIMIT_BYTES + 1),
        EntrySpec(Kind.KV, "a", limit_bytes=4, floor_bytes=5),
        EntrySpec(Kind.KV, "a", weight=0),
        EntrySpec(Kind.KV, "a", weight=float("nan")),
    ],
)
def test_a_spec_that_the_record_cannot_hold_is_refused(spec: EntrySpec) -> None:
    with pytest.raises(SettingError):
        fresh_record(spec, pid=1)
