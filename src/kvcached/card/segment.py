# SPDX-License-Identifier: Apache-2.0
"""A card's file in the run directory: made without races, read and written with plain system calls.

Reads and writes instead of a shared mapping: a file that somebody truncates or a full file system then gives an error, not a
SIGBUS, and no hidden descriptor can drop the process's locks (see `locks`).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from kvcached.card.locks import LOCKS, LockFile
from kvcached.card.record import (
    EMPTY,
    HEADER_BYTES,
    Header,
    Kind,
    Record,
    decode_header,
    decode_slot,
    encode_header,
    encode_slot,
    header_copy_offset,
    slot_copy_offset,
)
from kvcached.errors import PeerLost, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SUFFIX: Final = ".card"
TEMPORARY_PREFIX: Final = ".new-"
_READ_ATTEMPTS: Final = 4
_OPEN_ATTEMPTS: Final = 8
_DISCARD_DEADLINE_S: Final = 0.02


class Damaged(PeerLost):
    """The file has no readable header: somebody cut or overwrote it. It is replaced like a deleted one."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may share the cards of a run directory: one uid, or the directory's group."""

    group: bool

    @property
    def file_mode(self) -> int:
        return 0o660 if self.group else 0o600

    @property
    def directory_mode(self) -> int:
        return 0o2770 if self.group else 0o700  # set-group-id: what is made inside belongs to the same group


class Segment:
    """One card file, by inode. Writers of slots are single; the header is written under the ledger lock."""

    def __init__(self, path: Path, file: LockFile) -> None:
        self.path: Final = path
        self.file: Final = file
        self._known: tuple[bytes, Header] | None = None
        self._slots: dict[int, tuple[bytes, Record]] = {}  # as last read: most are the same the next time

    def is_current(self) -> bool:
        """Whether the path still names this file."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.file.key

    def header(self) -> Header:
        """Raises `Damaged`."""
        for _ in range(_READ_ATTEMPTS):
            raw = os.pread(self.file.fd, HEADER_BYTES, 0)
            known = self._known
            if known is not None and known[0] == raw:
                return known[1]
            header = decode_header(raw)
            if header is not None:
                self._known = (raw, header)
                return header
        raise Damaged(f"{self.path} is not a card's file any more")

    def read(self) -> tuple[Header, list[Record]]:
        """Header and the slots that were ever used, by slot number. Raises `Damaged`."""
        header = self.header()
        raw = self._raw_slots(header)
        records = [self._decoded(raw, slot, header.slot_bytes) for slot in range(header.high_slots)]
        for slot, record in enumerate(records):
            if record.kind == Kind.UNREADABLE:
                records[slot] = self.read_slot(header, slot)
        return header, records

    def read_consistent(self) -> tuple[Header, list[Record], bool]:
        """As `read`; true when all slots held these values at one and the same instant."""
        header, records = self.read()
        for _ in range(_READ_ATTEMPTS):
            former = (header, records)
            header, records = self.read()
            if (header, records) == former:
                return header, records, True
        return header, records, False

    def read_slot(self, header: Header, slot: int) -> Record:
        """One slot, read again when a reader and a fast writer met on both copies."""
        record = EMPTY
        for _ in range(_READ_ATTEMPTS):
            raw = os.pread(self.file.fd, header.slot_bytes, header.slot_offset(slot))
            record = decode_slot(raw.ljust(header.slot_bytes, b"\0"), 0, header.slot_bytes)
            if record.kind != Kind.UNREADABLE:
                break
        return record

    def write_slot(self, header: Header, slot: int, record: Record) -> None:
        self._write(encode_slot(record), header.slot_offset(slot) + slot_copy_offset(record, header.slot_bytes))

    def write_header(self, header: Header) -> None:
        self._write(encode_header(header), header_copy_offset(header))

    def holds(self, raw: bytes, offset: int) -> bool:
        return os.pread(self.file.fd, len(raw), offset) == raw

    def discard(self) -> None:
        """Take the path away from this file, so that the next opener makes a new one. Under its ledger lock only."""
        if self.is_current():
            self.path.unlink(missing_ok=True)

    def _decoded(self, raw: bytes, slot: int, slot_bytes: int) -> Record:
        mine = raw[slot * slot_bytes : (slot + 1) * slot_bytes]
        known = self._slots.get(slot)
        if known is None or known[0] != mine:
            known = self._slots[slot] = (mine, decode_slot(mine, 0, slot_bytes))
        return known[1]

    def _raw_slots(self, header: Header) -> bytes:
        size = header.high_slots * header.slot_bytes
        return os.pread(self.file.fd, size, header.header_bytes).ljust(size, b"\0")

    def _write(self, raw: bytes, offset: int) -> None:
        try:
            written = os.pwrite(self.file.fd, raw, offset)
        except OSError as error:
            raise PeerLost(f"cannot write {self.path}: {error.strerror}") from error
        if written != len(raw):
            raise PeerLost(f"cannot write {self.path}: {written} of {len(raw)} bytes")


def card_path(run_dir: Path, uuid: str) -> Path:
    return run_dir / (quote(uuid, safe="") + SUFFIX)


def card_paths(run_dir: Path) -> Sequence[Path]:
    return sorted(run_dir.glob(f"*{SUFFIX}"))


def open_existing(path: Path) -> Segment:
    """Raises `OSError`."""
    return Segment(path, LOCKS.open(path))


def open_or_create(path: Path, access: Access, new_header: Callable[[], Header]) -> Segment:
    """The card's file; made with `new_header()` when it is absent or damaged.

    Raises `SettingError` for a run directory that strangers can write to, `PeerLost` when the file cannot be made.
    """
    try:
        for _ in range(_OPEN_ATTEMPTS):
            segment = _open_or_create_once(path, access, new_header)
            if segment is not None:
                return segment
    except OSError as error:
        raise PeerLost(f"cannot open the card's file {path}: {error.strerror}") from error
    raise PeerLost(f"{path} is deleted again and again by somebody else")


def _open_or_create_once(path: Path, access: Access, new_header: Callable[[], Header]) -> Segment | None:
    group_id = prepare_run_dir(path.parent, access)
    try:
        segment = open_existing(path)
    except FileNotFoundError:
        _create(path, access, group_id, new_header())
        return None
    if not segment.file.is_writable:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    try:
        segment.header()
    except Damaged:
        with segment.file.ledger(_DISCARD_DEADLINE_S) as held:
            if held:
                segment.discard()
        return None
    return segment


def prepare_run_dir(run_dir: Path, access: Access) -> int:
    """Make the run directory or check it. Returns the group that its files get. Raises `SettingError`, `OSError`."""
    try:
        os.makedirs(run_dir.parent, exist_ok=True)
        os.mkdir(run_dir, access.directory_mode)
    except FileExistsError:
        pass
    else:
        os.chmod(run_dir, access.directory_mode)
    status = os.stat(run_dir)
    forbidden = stat.S_IWOTH if access.group else stat.S_IWOTH | stat.S_IWGRP
    owner_ok = access.group or status.st_uid in (os.geteuid(), 0)
    if status.st_mode & forbidden or not owner_ok or not stat.S_ISDIR(status.st_mode):
        facts = f"mode {stat.filemode(status.st_mode)} and owner {status.st_uid}"
        allowed = "that only its group can write to" if access.group else "of your own that nobody else can write to"
        raise SettingError(f"run directory {run_dir} has {facts}; needed is a directory {allowed}")
    return status.st_gid


def _create(path: Path, access: Access, group_id: int, header: Header) -> None:
    """Publish a complete file under `path` in one step; an existing one wins."""
    temporary = path.with_name(TEMPORARY_PREFIX + secrets.token_hex(8))
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, access.file_mode)
    try:
        if access.group and os.fstat(fd).st_gid != group_id:
            os.fchown(fd, -1, group_id)
        os.fchmod(fd, access.file_mode)
        os.posix_fallocate(fd, 0, header.file_bytes)  # a full file system shows here, not in a later lease
        os.pwrite(fd, encode_header(header), header_copy_offset(header))
        os.link(temporary, path)
    except FileExistsError:
        os.close(fd)  # nobody else ever saw this file, and no lock is on it
    except OSError:
        os.close(fd)
        raise
    else:
        LOCKS.adopt(fd)
    finally:
        temporary.unlink(missing_ok=True)
