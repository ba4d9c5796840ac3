# SPDX-License-Identifier: Apache-2.0
"""Liveness and exclusion by locks that the kernel holds for a process: POSIX record locks on the bytes of a card's file.

Byte 0 is the ledger lock, byte 1 + i says that the process of slot i lives. The kernel drops them when the process ends, however
it ends; they mean the same in every PID namespace and for every uid; a fork does not inherit them.

The kernel also drops *all* of a process's locks on a file when the process closes *any* descriptor of that file. So each file is
opened once per process and never closed while a lock is held, and whoever needs it, tools included, asks the table in this module:
the one piece of process-wide state in the package, because the locks are process-wide too. Nothing here maps the file: `mmap`
keeps a duplicate of the descriptor and closes it some day.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary, finalize

from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEDGER_BYTE: Final = 0
_FLOCK: Final = struct.Struct("hhqqi0q")  # l_type, l_whence, l_start, l_len, l_pid
_FIRST_PAUSE_S: Final = 50e-6
_LONGEST_PAUSE_S: Final = 1e-3


def slot_byte(slot: int) -> int:
    return 1 + slot


class LockFile:
    """One file, by inode, as this process has it open. Safe to use from any thread."""

    def __init__(self, fd: int, key: tuple[int, int], pinned: set[LockFile]) -> None:
        self.fd: Final = fd
        self.key: Final = key
        self._pinned = pinned
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._held: set[int] = set()  # record locks do not exclude threads of one process; this does

    @property
    def is_writable(self) -> bool:
        return fcntl.fcntl(self.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR

    def disown(self) -> None:
        """Called in a forked child: the parent's locks are not the child's."""
        self._pid = -1

    def check_process(self) -> None:
        """Raises `Misuse` in a process that did not open the file itself."""
        if os.getpid() != self._pid:
            raise Misuse("this process was forked from the one that opened the card; open the card again in the child")

    def try_lock(self, byte: int) -> bool:
        """Take a byte without waiting. False when this or another process has it."""
        self.check_process()
        with self._guard:
            if byte in self._held or not self._set(byte):
                return False
            self._held.add(byte)
            self._pinned.add(self)
            return True

    def unlock(self, byte: int) -> None:
        self.check_process()
        with self._guard:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, byte)
            self._held.discard(byte)
            if not self._held:
                self._pinned.discard(self)

    def is_locked(self, byte: int) -> bool:
        """Whether any process, this one included, holds the byte. Takes nothing and works on a read-only descriptor."""
        self.check_process()
        if byte in self._held:
            return True
        answer = fcntl.fcntl(self.fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    @contextmanager
    def ledger(self, deadline_s: float) -> Iterator[bool]:
        """Hold the ledger lock in the body if it could be had within `deadline_s`; the value says whether it is held."""
        held = self._wait(LEDGER_BYTE, time.monotonic() + deadline_s)
        try:
            yield held
        finally:
            if held:
                self.unlock(LEDGER_BYTE)

    def _wait(self, byte: int, end_s: float) -> bool:
        pause_s = _FIRST_PAUSE_S
        while not self.try_lock(byte):
            rest_s = end_s - time.monotonic()
            if rest_s <= 0:
                return False
            time.sleep(min(pause_s, rest_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _set(self, byte: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


class LockTable:
    """The files that this process has open, by (device, inode), for as long as somebody uses them or holds a lock in them.

    A file that is open keeps its inode number from being used again.
    """

    def __init__(self) -> None:
        self._guard = threading.RLock()  # a file may come to its end while its own thread is in here
        self._files: WeakValueDictionary[tuple[int, int], LockFile] = WeakValueDictionary()
        self._descriptors: dict[tuple[int, int], list[int]] = {}
        self._pinned: set[LockFile] = set()
        os.register_at_fork(after_in_child=self._start_anew)

    def open(self, path: Path) -> LockFile:
        """The file at `path`, opened for writing where that is allowed. Raises `OSError`."""
        with self._guard:
            known = self._files.get(_key(os.stat(path)))
            return known if known is not None else self.adopt(_open(path))

    def adopt(self, fd: int) -> LockFile:
        """Take over a descriptor. One of a file that is open already stays open as long as that does."""
        with self._guard:
            key = _key(os.fstat(fd))
            self._descriptors.setdefault(key, []).append(fd)
            file = self._files.get(key)
            if file is None:
                self._files[key] = file = LockFile(fd, key, self._pinned)
                finalize(file, self._forget, key, os.getpid()).atexit = False  # type: ignore[misc]  # typeshed forgets the slot
            return file

    def _forget(self, key: tuple[int, int], pid: int) -> None:
        """Close a file that nobody uses. Not the parent's in a forked child: that would drop the child's own locks on the file."""
        with self._guard:
            if pid == os.getpid() and key not in self._files:
                for fd in self._descriptors.pop(key, ()):
                    os.close(fd)

    def _start_anew(self) -> None:
        for file in self._files.values():
            file.disown()
        self._guard = threading.RLock()
        self._files = WeakValueDictionary()
        self._descriptors = {}
        self._pinned = set()


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


LOCKS: Final = LockTable()
