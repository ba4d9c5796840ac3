# SPDX-License-Identifier: Apache-2.0
"""A log that a server writes itself, so that it needs no gateway to do so: followed as it grows, and cut when it is full."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
from typing import TYPE_CHECKING, Final

from kvcached.controller.leader import readable

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("kvcached.controller")
MOST_BYTES: Final = 16 * 1024 * 1024
_CHUNK_BYTES: Final = 65_536
_LONGEST_LINE_BYTES: Final = 16_384
_LOOK_S: Final = 1.0
_IN_MODIFY: Final = 0x2


def open_to_append(path: Path) -> int:
    """For a server's output. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


class ServerLog:
    """Read from its end on, or from so many bytes before. Raises `OSError` where it cannot be opened."""

    def __init__(self, path: Path, back_bytes: int = 0) -> None:
        self._path = path
        self._file = path.open("r+b", buffering=0)
        self._changes = _Changes(path)
        self._late = b""
        self._rest = b""
        self._at = self._begin(back_bytes)

    def _begin(self, back_bytes: int) -> int:
        """Where a line begins."""
        at = self._file.seek(max(0, self._file.seek(0, os.SEEK_END) - back_bytes))
        if not back_bytes or not at:
            return at
        return self._file.seek(at + self._file.read(back_bytes).find(b"\n") + 1)

    def lines(self) -> list[str] | None:
        """Of what was written since, or a first part of it; None when there is no more. Cuts the log then, if it is full."""
        chunk, self._late = self._late or self._file.read(_CHUNK_BYTES), b""
        self._at = self._file.tell()
        if not chunk:
            return [] if self._tidy() else None
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = rest[-_LONGEST_LINE_BYTES:]
        return [_text(line) for line in lines]

    def last(self) -> str:
        """What is left without an end of line."""
        rest, self._rest = self._rest, b""
        return _text(rest)

    async def grown(self) -> None:
        """Returns when more was written, or may have been."""
        await self._changes.next()

    def close(self) -> None:
        self._changes.close()
        self._file.close()

    def _tidy(self) -> bool:
        """At its end. Whether there is more to read after all."""
        if self._at > os.fstat(self._file.fileno()).st_size:  # somebody else has cut it
            self._at = self._file.seek(0)
            return True
        if self._at > MOST_BYTES:
            self._cut()
        return bool(self._late)

    def _cut(self) -> None:
        """Keep what it has beside it. The server, which only appends, goes on at the start of the same file."""
        try:
            with self._path.with_suffix(".log.1").open("wb") as kept:
                self._file.seek(0)
                shutil.copyfileobj(self._file, kept)
                copied = self._file.tell()
                self._file.seek(self._at)
                self._late = self._file.readall()  # written while it was copied
                kept.write(self._late[copied - self._at :])
        except OSError as error:
            _log.error("%s: what it had is lost, since no copy can be written: %s", self._path, error)
        os.ftruncate(self._file.fileno(), 0)
        self._at = self._file.seek(0)


class _Changes:
    """Of one file, as the kernel tells them; where it does not, the file may have changed every second."""

    def __init__(self, path: Path) -> None:
        self._fd = _watch(path)

    async def next(self) -> None:
        if self._fd is None:
            await asyncio.sleep(_LOOK_S)
            return
        await readable(self._fd)
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, _CHUNK_BYTES)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _watch(path: Path) -> int | None:
    library = ctypes.CDLL(None, use_errno=True)
    try:
        fd = int(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if fd >= 0 and library.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) >= 0:
            return fd
    except AttributeError:  # a C library without it
        return None
    if fd >= 0:
        os.close(fd)
    return None


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
