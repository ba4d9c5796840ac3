# SPDX-License-Identifier: Apache-2.0
"""Records of the servers that run, beside their logs, by which the next gateway of that folder finds what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached import processes
from kvcached.controller.adoption import Record, record_from
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_log = logging.getLogger("kvcached.controller")
SUFFIX: Final = ".process"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_TERM_GRACE_S: Final = 20.0
_KILL_GRACE_S: Final = 10.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that has a record, and of which something is there. `record`: None where nobody can adopt it."""

    file: Path
    pid: int
    record: Record | None


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """`folder` is this gateway's alone. Raises `SettingError` while another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".gateway").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"log_dir: another gateway uses {folder}; name a folder for each") from None
        yield


def boot() -> str:
    """Which start of this machine it is; empty where the kernel does not tell."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def note(log: Path, record: Record) -> None:
    """Whole or not at all, and for this user only: a command line may have a secret. Raises `OSError`."""
    new, data = log.with_suffix(".record"), json.dumps(record.as_json()).encode()
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        new.replace(_file_of(log))
    except OSError:
        if not _overwrite(_file_of(log), data):
            raise


def _overwrite(file: Path, data: bytes) -> bool:
    """On a disk that is full, and where there is a record of that size already: a state that has changed needs no more room."""
    try:
        with file.open("r+b", buffering=0) as old:
            size_bytes = os.fstat(old.fileno()).st_size
            return len(data) <= size_bytes and old.write(data.ljust(size_bytes)) == size_bytes
    except OSError:
        return False


def forget(log: Path) -> None:
    """Nothing of that group is left."""
    _file_of(log).unlink(missing_ok=True)


def groups_in(folder: Path) -> list[Group]:
    """What earlier gateways left. Records of what is no more are removed."""
    found = {file: _group_of(file) for file in sorted(folder.glob(f"*{SUFFIX}"))}
    for file, group in found.items():
        if group is None:
            file.unlink(missing_ok=True)
    return [group for group in found.values() if group is not None]


def end_all(groups: Sequence[Group]) -> None:
    """SIGTERM to all, then SIGKILL to what stays. Raises `SettingError` for what stays even then."""
    left = [group.pid for group in groups]
    for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        left = _wait_gone(left, grace_s)
    if left:
        raise SettingError(f"log_dir: process groups of an earlier gateway do not end: {', '.join(map(str, left))}")
    for group in groups:
        group.file.unlink(missing_ok=True)


def _file_of(log: Path) -> Path:
    return log.with_suffix(SUFFIX)


def _group_of(file: Path) -> Group | None:
    """The group that it names, if that is still the same. Its number is not given away while any process of it is there."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        pid, start = int(given["pid"]), given["start"]
        is_of_this_boot = given["boot"] == boot()
    except (OSError, ValueError, KeyError, TypeError):
        _log.warning("%s is no record of a process, and is removed", file)
        return None
    is_same = is_of_this_boot and processes.start_of(pid) in (start, None)
    if pid <= 1 or not is_same or not processes.of_group(pid):
        return None
    return Group(file, pid, record_from(given) if processes.is_there(pid) else None)


def _wait_gone(groups: list[int], timeout_s: float) -> list[int]:
    """Those that are still there after that time."""
    end_s = time.monotonic() + timeout_s
    left = [group for group in groups if processes.of_group(group)]
    while left and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        left = [group for group in left if processes.of_group(group)]
    return left
