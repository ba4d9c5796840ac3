# SPDX-License-Identifier: Apache-2.0
"""Engines that a killed gateway left: each has a record beside its log, and the next gateway of that folder ends them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached import processes
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("kvcached.controller")
SUFFIX: Final = ".process"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_TERM_GRACE_S: Final = 20.0
_KILL_GRACE_S: Final = 10.0
_POLL_S: Final = 0.05


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """`folder` is this gateway's alone, and what an earlier one left in it has ended. Raises `SettingError` while another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".gateway").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingError(f"log_dir: another gateway uses {folder}; name a folder for each") from None
        end_all(folder)
        yield


def note(log: Path, pid: int) -> None:
    """`pid` leads a process group and writes to `log`."""
    record = {"pid": pid, "start": processes.start_of(pid), "boot": _boot()}
    _record_of(log).write_text(json.dumps(record), encoding="utf-8")


def forget(log: Path) -> None:
    """Nothing of that group is left."""
    _record_of(log).unlink(missing_ok=True)


def end_all(folder: Path) -> None:
    """End the groups that have a record: SIGTERM to all, then SIGKILL to what stays."""
    records = {record: _group_of(record) for record in sorted(folder.glob(f"*{SUFFIX}"))}
    groups = [pid for pid in records.values() if pid is not None]
    for record, pid in records.items():
        if pid is not None:
            _log.warning("%s: process %d was left by an earlier gateway and is ended", record.stem, pid)
    for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_GRACE_S)):
        for pid in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
        groups = _wait_gone(groups, grace_s)
    if groups:
        raise SettingError(f"log_dir: process groups of an earlier gateway do not end: {', '.join(map(str, groups))}")
    for record in records:
        record.unlink(missing_ok=True)


def _record_of(log: Path) -> Path:
    return log.with_suffix(SUFFIX)


def _group_of(record: Path) -> int | None:
    """The group that it names, if that is still the same. Its number is not given away while any process of it is there."""
    try:
        given = json.loads(record.read_text(encoding="utf-8"))
        pid, start, boot = int(given["pid"]), given["start"], given["boot"]
    except (OSError, ValueError, KeyError, TypeError):
        _log.warning("%s is no record of a process, and is removed", record)
        return None
    is_other = boot != _boot() or processes.start_of(pid) not in (start, None)
    return None if pid <= 1 or is_other or not processes.of_group(pid) else pid


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _wait_gone(groups: list[int], timeout_s: float) -> list[int]:
    """Those that are still there after that time."""
    end_s = time.monotonic() + timeout_s
    left = [group for group in groups if processes.of_group(group)]
    while left and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        left = [group for group in left if processes.of_group(group)]
    return left
