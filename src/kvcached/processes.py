# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC: Final = Path("/proc")
_LISTENS: Final = "0A"
_STATE, _GROUP, _SESSION, _START = 0, 2, 3, 19  # fields of `stat`, counted from the state on


def start_of(pid: int) -> int | None:
    """When it started, in the kernel's ticks since boot; None when there is no such process."""
    fields = _stat(_PROC / str(pid))
    return None if fields is None else int(fields[_START])


def is_there(pid: int) -> bool:
    """Whether any thread of it still runs: until then its memory, locks and ports are its own.

    A process whose first thread has ended looks like a zombie, whatever its other threads do.
    """
    return any(fields[_STATE] not in "ZX" for fields in _threads(_PROC / str(pid)))


def of_group(group: int) -> list[int]:
    """The processes of this group that are there."""
    return _with(_GROUP, group)


def of_session(session: int) -> list[int]:
    """The processes of this session that are there."""
    return _with(_SESSION, session)


def listens_in(session: int, port: int) -> bool:
    """Whether a process of this session, of this user's, listens on that TCP port."""
    links = {f"socket:[{inode}]" for inode in _listeners(port)}
    return any(link in links for pid in of_session(session) for link in _links(_PROC / str(pid) / "fd"))


def _listeners(port: int) -> Iterator[str]:
    """The inodes of the sockets."""
    for table in ("tcp", "tcp6"):
        for line in _lines(_PROC / "self" / "net" / table)[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:  # a kernel without IPv6
        return []


def _links(folder: Path) -> Iterator[str]:
    try:
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield os.readlink(entry)
    except OSError:  # the process has ended meanwhile
        return


def _with(field: int, number: int) -> list[int]:
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    found = ((pid, _stat(_PROC / str(pid))) for pid in pids)
    return [pid for pid, fields in found if fields is not None and int(fields[field]) == number and is_there(pid)]


def _threads(process: Path) -> Iterator[list[str]]:
    try:
        threads = list((process / "task").iterdir())
    except OSError:  # it has ended
        return
    yield from (fields for fields in map(_stat, threads) if fields is not None)


def _stat(folder: Path) -> list[str] | None:
    """The fields from the state on: the name before it may hold anything. None when it has ended."""
    try:
        return (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
