# SPDX-License-Identifier: Apache-2.0
"""The socket file of an endpoint: where it lies, who may reach it, and that one live process at most listens there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import time
from typing import TYPE_CHECKING, Final

from kvcached.config import INSTANCE_PATTERN
from kvcached.errors import PeerTimeout, SettingError
from kvcached.runtime.control_messages import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_log = logging.getLogger("kvcached.control")
_MAX_PATH_BYTES: Final = 107  # of a Unix socket's address
_LOCK_TIMEOUT_S: Final = 2.0


def endpoint_path(run_dir: Path, instance: str) -> Path:
    """Where the pool `instance` listens. Raises `SettingError` for a name that cannot be a file name or is too long for a socket."""
    path = run_dir / "pools" / f"{instance}.sock"
    if INSTANCE_PATTERN.fullmatch(instance) is None:
        raise SettingError(f"KVCACHED_IPC_NAME={instance} is not allowed; allowed: letters, digits, '.', '_' and '-', at most 40")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise SettingError(f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes; set KVCACHED_RUN_DIR to a shorter directory")
    return path


def prepare_run_dir(run_dir: Path, group: int | None = None) -> None:
    """Make the run directory and what is in it, private to this user or shared with `group` (a gid).

    Raises `SettingError` if one of them belongs to somebody else or everybody may write there.
    """
    for directory in (run_dir, run_dir / "pools", run_dir / "ranks", run_dir / "other"):
        prepare_directory(directory, group)


def prepare_directory(directory: Path, group: int | None = None) -> None:
    """Make one directory, as `prepare_run_dir` does."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)
        if group is not None:
            os.chown(directory, -1, group)
            os.chmod(directory, 0o2770)  # a umask must not take the group's right away
    found = os.stat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_IWOTH:
        raise SettingError(f"{directory} is no private directory (mode {stat.filemode(found.st_mode)}); KVCACHED_RUN_DIR names another")
    if found.st_uid not in (0, os.geteuid()) and found.st_gid != group:
        raise SettingError(f"{directory} belongs to user {found.st_uid}; KVCACHED_RUN_DIR names another, KVCACHED_RUN_GROUP shares one")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """No other process binds or unlinks in `directory` meanwhile. The kernel drops the lock when its holder dies."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = Deadline(_LOCK_TIMEOUT_S, f"another process holds the lock of {directory}")
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(min(0.01, deadline.left_s()))
        yield
    finally:
        os.close(descriptor)


class SocketFile:
    """The file at `path`: at most one live process listens there."""

    def __init__(self, path: Path, group: int | None) -> None:
        self.path = path
        self._group = group
        self._identity: tuple[int, int] | None = None

    def listen(self) -> socket.socket:
        """Take the path over unless a live process has it (`SettingError`)."""
        prepare_run_dir(self.path.parent.parent, self._group)
        with _locked(self.path.parent):
            self._remove_stale()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._bind(listener)
            except OSError:
                listener.close()
                raise
            return listener

    def is_ours(self) -> bool:
        return self._identity is not None and self._found() == self._identity

    def remove(self) -> None:
        """Unlink the file if it is still ours."""
        try:
            with _locked(self.path.parent):
                if self.is_ours():
                    self.path.unlink()
        except (OSError, PeerTimeout) as error:
            _log.warning("left the socket %s behind: %s", self.path, error)

    def _bind(self, listener: socket.socket) -> None:
        os.fchmod(listener.fileno(), 0o600)  # before bind: the file never has a wider mode, whatever the umask
        listener.bind(str(self.path))
        if self._group is not None:
            os.chown(self.path, -1, self._group)
            os.chmod(self.path, 0o660)
        listener.listen(128)
        self._identity = self._found()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _remove_stale(self) -> None:
        try:
            is_socket = stat.S_ISSOCK(os.lstat(self.path).st_mode)
        except FileNotFoundError:
            return
        if not is_socket or is_live(self.path):
            raise SettingError(
                f"{self.path} is in use by another engine of the same name; give this one another KVCACHED_IPC_NAME, or end the other"
            )
        self.path.unlink()


def is_live(path: Path) -> bool:
    """Whether a process listens at `path`; never waits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def remove_abandoned(path: Path) -> bool:
    """Unlink the socket that a dead process left at `path`. False if there is none, or a live one. Raises `PeerTimeout`, `OSError`."""
    if not path.parent.is_dir():
        return False
    with _locked(path.parent):
        abandoned = path.is_socket() and not is_live(path)
        if abandoned:
            path.unlink()
    return abandoned
