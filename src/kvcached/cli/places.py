# SPDX-License-Identifier: Apache-2.0
"""The places where processes of a machine meet, for `kvcached doctor`: shared memory and the run directory."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.card.segment import card_paths
from kvcached.cli.findings import Row, Verdict
from kvcached.errors import SettingError
from kvcached.runtime.endpoint import endpoint_path
from kvcached.units import MIB, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.config import Settings

SHARED_MEMORY: Final = Path("/dev/shm")
_LEAST_SHARED_BYTES: Final = 16 * MIB
_CONTAINER_SHARED_BYTES: Final = 64 * MIB  # what a container gets unless it is told otherwise
_LIKELY_INSTANCE: Final = "an-engine-of-usual-name"
_TRIAL_BYTES: Final = MIB
_OWN_DIRECTORY: Final = "set KVCACHED_RUN_DIR to a directory of your own"


def check_shared_memory(place: Path = SHARED_MEMORY) -> Row:
    subject = "shared memory"
    if not place.is_dir():
        advice = "the run directory is under /tmp then, which works too; engines with several processes need it: mount a tmpfs there"
        return Row(subject, Verdict.WARNING, f"there is no {place}", advice)
    if not os.access(place, os.W_OK | os.X_OK):
        return Row(subject, Verdict.WARNING, f"{place} is not writable", "the run directory is under /tmp then, which works too")
    usage = shutil.disk_usage(place)
    found = f"{format_size(usage.free)} of {format_size(usage.total)} free in {place}"
    if usage.free < _LEAST_SHARED_BYTES:
        return Row(subject, Verdict.WARNING, found, "remove files there; in a container: docker run --shm-size=1g or --ipc=host")
    if usage.total <= _CONTAINER_SHARED_BYTES:
        advice = "enough for KVCacheD, too little for an engine with several workers: docker run --shm-size=1g or --ipc=host"
        return Row(subject, Verdict.WARNING, found, advice)
    return Row(subject, Verdict.OK, found)


def check_run_dir(settings: Settings) -> Row:
    """Every process of the card must see the same directory, and nobody else may write there."""
    run_dir = settings.run_dir
    try:
        endpoint_path(run_dir, settings.instance_name or _LIKELY_INSTANCE)
        found = run_dir.stat()
    except SettingError as error:
        return _problem(str(error), "a directory such as /dev/shm/kvcached is short enough")
    except FileNotFoundError:
        return _absent_run_dir(run_dir)
    except OSError as error:
        return _problem(str(error), _OWN_DIRECTORY)
    shown = f"{run_dir}, {stat.filemode(found.st_mode)}, user {found.st_uid}, {format_size(shutil.disk_usage(run_dir).free)} free"
    if found.st_uid not in (0, os.geteuid()) and found.st_gid != settings.run_group:
        return _problem(f"{shown}: it belongs to another user", f"{_OWN_DIRECTORY}, or share this one: KVCACHED_RUN_GROUP")
    allowed = stat.S_IWOTH if settings.run_group is not None else stat.S_IWOTH | stat.S_IWGRP
    if found.st_mode & allowed or not stat.S_ISDIR(found.st_mode) or not os.access(run_dir, os.W_OK | os.X_OK):
        return _problem(shown, f"make it a directory that you can write to and others cannot: chmod 700 {run_dir}, or set KVCACHED_RUN_DIR")
    return _tried(run_dir, shown)


def _absent_run_dir(run_dir: Path) -> Row:
    above = next(parent for parent in run_dir.parents if parent.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return _tried(above, f"{run_dir} will be made by the first engine")
    return _problem(f"{run_dir} cannot be made in {above}", _OWN_DIRECTORY)


def _tried(place: Path, shown: str) -> Row:
    """Some file systems, such as network ones, take no locks or no sockets, and a full one no bytes: only a try tells."""
    try:
        with tempfile.TemporaryDirectory(prefix=".try-", dir=place) as scratch:
            _write_and_lock(Path(scratch) / "file")
            _bind(Path(scratch) / "s")
    except OSError as error:
        return _problem(f"{shown}, but {error}", f"{_OWN_DIRECTORY}, on a local file system with room, such as /dev/shm")
    return Row("run directory", Verdict.OK, shown)


def _write_and_lock(path: Path) -> None:
    with path.open("wb") as file:
        file.write(bytes(_TRIAL_BYTES))
        file.flush()
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)


def _bind(path: Path) -> None:
    """By way of the folder's descriptor: the path itself may be too long for an address, which says nothing about the place."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    finally:
        os.close(descriptor)


def check_other_run_dirs(settings: Settings) -> Iterator[Row]:
    """Who meets elsewhere counts the same card's memory a second time."""
    for other in sorted(settings.run_dir.parent.glob("kvcached-*")):
        if other == settings.run_dir or not _has_cards(other):
            continue
        advice = f"let all engines of a card meet in one: KVCACHED_RUN_DIR, or KVCACHED_RUN_GROUP; or remove it: rm -r {other}"
        yield Row("run directory", Verdict.WARNING, f"there are cards in {other} too: engines there and here do not see each other", advice)


def _has_cards(directory: Path) -> bool:
    try:
        return any(card_paths(directory))
    except OSError:
        return False


def _problem(finding: str, advice: str) -> Row:
    return Row("run directory", Verdict.PROBLEM, finding, advice)
