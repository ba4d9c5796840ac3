# SPDX-License-Identifier: Apache-2.0
"""Who is on the card: entering, and clearing up after those who died. All of it runs under the card's ledger lock."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.card.budget import floors_room_bytes
from kvcached.card.locks import slot_byte
from kvcached.card.record import EMPTY, Header, Kind, Record, text_of
from kvcached.card.segment import TEMPORARY_PREFIX, Damaged, Segment, card_paths, open_existing
from kvcached.errors import PeerRefused, SettingError
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_ABANDONED_AFTER_S: Final = 10.0


def reclaim(segment: Segment, header: Header, records: list[Record]) -> int:
    """Empty the slots of dead processes, in the file and in `records`. Returns how many there were.

    The dead entry's lock is held meanwhile; its control socket goes first, so that whoever dies in between leaves both to the next.
    """
    count = 0
    for slot, record in enumerate(records):
        if record.kind == Kind.NONE or not segment.file.try_lock(slot_byte(slot)):
            continue
        try:
            others = records[:slot] + records[slot + 1 :]
            _remove_endpoint(segment.path.parent, record, others)
            records[slot] = _emptied(segment.read_slot(header, slot))
            segment.write_slot(header, slot, records[slot])
        finally:
            segment.file.unlock(slot_byte(slot))
        count += 1
    return count


def check_welcome(records: Sequence[Record], newcomer: Record, budget_bytes: int) -> None:
    """Raises `PeerRefused` for an instance that is here already and for a floor that does not fit. `records` are of live entries."""
    for record in records:
        same = (record.kind, record.instance, record.rank) == (newcomer.kind, newcomer.instance, newcomer.rank)
        if same:
            raise PeerRefused(
                f"instance {text_of(record.instance)!r} rank {record.rank} is on this card already (pid {record.pid}); choose another name"
            )
    check_floor(records, None, newcomer.floor_bytes, budget_bytes)


def check_floor(records: Sequence[Record], slot: int | None, floor_bytes: int, budget_bytes: int) -> None:
    """Raises `PeerRefused` when a floor does not fit beside the others' floors and weights."""
    room_bytes = floors_room_bytes(records, slot, budget_bytes)
    if floor_bytes > room_bytes:
        raise PeerRefused(
            f"a floor of {format_size(floor_bytes)} does not fit: {format_size(max(room_bytes, 0))} of the card's budget of "
            f"{format_size(budget_bytes)} are left beside the other floors and weights"
        )


def enrol(segment: Segment, header: Header, records: list[Record], newcomer: Record) -> tuple[Header, int, Record]:
    """Give a newcomer a slot and its lock. Returns header, slot and record as written. Raises `PeerRefused` when the table is full."""
    slots = [slot for slot, record in enumerate(records) if record.kind == Kind.NONE]
    for slot in (*slots, *range(header.high_slots, header.slots)):
        if not segment.file.try_lock(slot_byte(slot)):
            continue
        if slot >= header.high_slots:
            header = header._replace(sequence=header.sequence + 1, high_slots=slot + 1)
            segment.write_header(header)
        record = newcomer._replace(sequence=segment.read_slot(header, slot).sequence + 1)
        segment.write_slot(header, slot, record)
        return header, slot, record
    raise PeerRefused(f"the card's table is full: {header.slots} of {header.slots} entries are in use")


def settle_budget(segment: Segment, asked_bytes: int, total_bytes: int, *, alone: bool) -> Header:
    """The header with the budget that counts. Only a card that nobody uses takes a new one. Raises `SettingError`."""
    header = segment.header()
    if asked_bytes in (0, header.budget_bytes):
        return header
    if not alone:
        raise SettingError(
            f"a budget of {format_size(asked_bytes)} was asked for, but card {header.uuid} is in use with a budget of "
            f"{format_size(header.budget_bytes)}; use the same, or 0 to take what is there"
        )
    header = header._replace(sequence=header.sequence + 1, budget_bytes=asked_bytes, total_bytes=total_bytes)
    segment.write_header(header)
    return header


@dataclass(frozen=True, slots=True)
class Swept:
    """What the janitor did. `busy`: files that could not be written or whose lock was not free within the deadline."""

    entries: int
    files: tuple[Path, ...]
    busy: tuple[Path, ...]


def sweep(run_dir: Path, *, remove_idle: bool, deadline_s: float, abandoned_after_s: float = _ABANDONED_AFTER_S) -> Swept:
    """Clear up after dead processes: their entries, control sockets and half-made files; with `remove_idle` cards that nobody uses."""
    entries = 0
    busy: list[Path] = []
    files: list[Path] = []
    named: set[str] = set()
    for path in card_paths(run_dir):
        segment = _open_to_sweep(path)
        if segment is None:
            busy.append(path)
            continue
        with segment.file.ledger(deadline_s) as held:
            if not held:
                busy.append(path)
                continue
            if not segment.is_current():
                continue
            count, live = _sweep_card(segment)
            entries += count
            named |= {text_of(record.endpoint) for record in live}
            if remove_idle and not live:
                segment.discard()
                files.append(path)
    return Swept(entries, (*files, *_sweep_files(run_dir, named, abandoned_after_s)), tuple(busy))


def _open_to_sweep(path: Path) -> Segment | None:
    """None for a file that went away or that this user may only read."""
    try:
        segment = open_existing(path)
    except OSError:
        return None
    return segment if segment.file.is_writable else None


def _sweep_card(segment: Segment) -> tuple[int, list[Record]]:
    try:
        header, records = segment.read()
    except Damaged:
        return 0, []
    count = reclaim(segment, header, records)
    return count, [record for record in records if record.kind != Kind.NONE]


def _sweep_files(run_dir: Path, named: set[str], abandoned_after_s: float) -> list[Path]:
    removed = []
    for path in run_dir.rglob("*"):
        if _is_abandoned(path, named, abandoned_after_s):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _is_abandoned(path: Path, named: set[str], abandoned_after_s: float) -> bool:
    """A half-made card file, or a socket that no live entry names and nobody listens on; young ones may still be in the making."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if time.time() - status.st_mtime < abandoned_after_s:
        return False
    if path.name.startswith(TEMPORARY_PREFIX):
        return True
    return stat.S_ISSOCK(status.st_mode) and str(path) not in named and not _listens(path)


def _emptied(record: Record) -> Record:
    return EMPTY._replace(sequence=record.sequence + 1)


def _remove_endpoint(run_dir: Path, record: Record, others: Sequence[Record]) -> None:
    """Unlink a dead entry's socket: inside the run directory only, and only if no other entry names it and nobody answers there."""
    text = text_of(record.endpoint)
    if not text or any(other.endpoint == record.endpoint for other in others):
        return
    path = Path(text)
    try:
        inside = Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(run_dir))
        if inside and stat.S_ISSOCK(path.lstat().st_mode) and not _listens(path):
            path.unlink()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM):
            raise


def _listens(path: Path) -> bool:
    """Whether a process answers at a Unix socket; never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
