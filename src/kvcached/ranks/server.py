# SPDX-License-Identifier: Apache-2.0
"""The mapper's end of the socket: one owner, one kept connection, requests answered in two lanes.

Maps, reports and status are answered by the reading thread. An unmap may wait for work in flight, so it and trims have a lane of
their own: a map never waits behind a fence.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvcached.errors import HandshakeMismatch, PeerError, PeerLost, PeerRefused
from kvcached.ranks.api import LimitsRequest, MapperPort, MapperStatus, Outcome, Report, Verdict
from kvcached.ranks.messages import (
    HEADER,
    Hello,
    MapRequest,
    Message,
    StatusRequest,
    TrimRequest,
    UnmapRequest,
    check_hello,
    decode_body,
    decode_header,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = logging.getLogger("kvcached.ranks")
_STATUS_TIMEOUT_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 5.0


def receive_frame(connection: socket.socket) -> tuple[Message, int]:
    """The next message and its number. Raises `PeerLost` when the connection ends, `PeerRefused` for nonsense."""
    kind, length, number = decode_header(_receive_exactly(connection, HEADER.size))
    return decode_body(kind, _receive_exactly(connection, length)), number


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            chunk = connection.recv(size - len(parts))
        except OSError as error:
            raise PeerLost(f"the connection to the peer broke: {error}") from error
        if not chunk:
            raise PeerLost("the peer closed the connection")
        parts += chunk
    return bytes(parts)


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


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
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except (ConnectionRefusedError, TimeoutError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
    raise PeerRefused(f"another live process listens at {path}: two instances with the same name; set KVCACHED_IPC_NAME to tell them apart")


class MapperServer:
    """Serves one mapper to the owner that connects first. `on_owner_lost` is called once when that owner goes away."""

    def __init__(self, path: Path, mapper: MapperPort, hello: Hello, on_owner_lost: Callable[[], None]) -> None:
        self._path = path
        self._mapper = mapper
        self._hello = hello
        self._on_owner_lost = on_owner_lost
        self._stopping = threading.Event()
        self._connection: socket.socket | None = None
        self._send_lock = threading.Lock()
        self._slow_lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvcached-unmap")
        self._listener = listen_private(path)
        self._thread = threading.Thread(target=self._serve, name="kvcached-mapper", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was closed by close()
                return
            with connection:
                if self._admit(connection):
                    self._connection = connection
                    self._answer_until_lost(connection)
                    if not self._stopping.is_set():
                        self._on_owner_lost()
                    return

    def _admit(self, connection: socket.socket) -> bool:
        connection.settimeout(_STOP_TIMEOUT_S)
        if peer_uid(connection) not in (os.getuid(), 0):
            _log.warning("refused an owner of another user at %s", self._path)
            return False
        try:
            theirs, number = receive_frame(connection)
            if not isinstance(theirs, Hello):
                raise PeerRefused("the first message was no greeting")
            self._send(connection, self._hello, number)
            check_hello(self._hello, theirs)
        except (PeerError, OSError) as error:
            _log.warning("refused an owner at %s: %s", self._path, error)
            return False
        connection.settimeout(None)
        return True

    def _answer_until_lost(self, connection: socket.socket) -> None:
        while True:
            try:
                message, number = receive_frame(connection)
            except (PeerLost, HandshakeMismatch, PeerRefused) as error:
                if not self._stopping.is_set():
                    _log.info("the owner of %s went away: %s", self._path, error)
                return
            self._dispatch(connection, message, number)

    def _dispatch(self, connection: socket.socket, message: Message, number: int) -> None:
        match message:
            case MapRequest(runs, urgent):
                self._reply(connection, number, self._mapper.map(runs, urgent=urgent))
            case UnmapRequest(runs):
                self._reply_later(connection, number, lambda: self._mapper.unmap(runs, 0))
            case TrimRequest():
                self._reply_later(connection, number, self._mapper.trim)
            case LimitsRequest():
                self._reply(connection, number, self._mapper.set_limits(message))
            case Report():
                self._mapper.report(message)
                self._send(connection, Outcome(Verdict.DONE), number)
            case StatusRequest():
                self._send(connection, self._mapper.status(_STATUS_TIMEOUT_S), number)
            case _:
                refusal = Outcome(Verdict.REFUSED, reason=f"an owner may not send {type(message).__name__}")
                self._send(connection, refusal, number)

    def _reply_later(self, connection: socket.socket, number: int, call: Callable[[], Future[Outcome]]) -> None:
        """In the slow lane. A call that raises is answered too, or its owner would wait for ever."""

        def perform() -> Outcome:
            return call().result()

        self._slow_lane.submit(perform).add_done_callback(lambda done: self._reply(connection, number, done))

    def _reply(self, connection: socket.socket, number: int, future: Future[Outcome]) -> None:
        error = future.exception()
        outcome = future.result() if error is None else Outcome(Verdict.BROKEN, reason=f"{type(error).__name__}: {error}")
        self._send(connection, outcome, number)

    def _send(self, connection: socket.socket, message: Message | MapperStatus, number: int) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # a lost owner is noticed by the reading thread
            connection.sendall(encode(message, number))

    def close(self) -> None:
        """Refuse new work, let the running driver call end (bounded), remove the socket last."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for sock in (self._listener, self._connection):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_TIMEOUT_S)
        self._slow_lane.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
