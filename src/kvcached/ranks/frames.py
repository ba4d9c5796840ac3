# SPDX-License-Identifier: Apache-2.0
"""Unix sockets between an owner and its mappers: private, of one user, carrying frames."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvcached.errors import PeerLost, PeerRefused
from kvcached.ranks.messages import HEADER, Hello, Message, decode_body, decode_header

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK_BYTES: Final = 1 << 16
_PEER_CREDENTIALS: Final = struct.Struct("3i")
_PROBE_TIMEOUT_S: Final = 1.0


def hello_of_rank(hello: Hello, rank: int) -> Hello:
    """What owner and mapper of this rank both say: a socket that leads to another rank is refused like another instance."""
    return replace(hello, instance=f"{hello.instance}-{rank}")


class FrameReader:
    """Frames from a stream. `read` blocks as the socket does."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = bytearray()

    def receive(self) -> tuple[Message, int]:
        """The next message and its number. Raises `PeerLost` when the connection ends, `PeerError` for nonsense."""
        while True:
            frame = self.next()
            if frame is not None:
                return frame
            self.fill()

    def fill(self) -> None:
        """Take what has come. Raises `PeerLost` at the end, `BlockingIOError` or `TimeoutError` (as the socket is set) if nothing comes."""
        try:
            chunk = self._connection.recv(_CHUNK_BYTES)
        except (BlockingIOError, TimeoutError):
            raise
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        if not chunk:
            raise PeerLost("the connection was closed")
        self._bytes += chunk

    def next(self) -> tuple[Message, int] | None:
        """The next frame that has come as a whole. Raises `PeerRefused`, `HandshakeMismatch` for nonsense."""
        if len(self._bytes) < HEADER.size:
            return None
        kind, length, number = decode_header(bytes(self._bytes[: HEADER.size]))
        end = HEADER.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[HEADER.size : end])
        del self._bytes[:end]
        return decode_body(kind, body), number


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows it."""
    pid, uid, _ = _PEER_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size))
    return int(pid), int(uid)


def trusted_peer_of(connection: socket.socket) -> int:
    """The pid of the process at the other end. Raises `PeerRefused` unless it is this user's, or root's."""
    pid, uid = peer_of(connection)
    if uid not in (os.getuid(), 0):
        raise PeerRefused(f"the process {pid} at the other end belongs to user {uid}")
    return pid


def listen_private(path: Path) -> socket.socket:
    """Listen at `path`, mode 0600. A socket file that nobody listens at is replaced; a live one is `PeerRefused`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise PeerRefused(f"cannot listen at {path}: {error}") from error
    except PeerRefused:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except (BlockingIOError, TimeoutError):
            pass  # it lives, and has an owner: it accepts nobody else
    raise PeerRefused(f"another live process listens at {path}: two instances with the same name; set KVCACHED_IPC_NAME to tell them apart")


def close_in_forked_child(connection: socket.socket) -> None:
    """Or a child that outlives this process would keep the peer from noticing that it is gone."""
    reference = weakref.ref(connection)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    os.register_at_fork(after_in_child=close)
