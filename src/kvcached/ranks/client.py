# SPDX-License-Identifier: Apache-2.0
"""The owner's end of the socket: a mapper in another process, behind the same port as one in this process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import struct
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Final

from kvcached.errors import PeerError, PeerLost, PeerRefused, PeerTimeout
from kvcached.ranks.api import LimitsRequest, MapperStatus, Outcome, Report, Runs
from kvcached.ranks.messages import (
    Hello,
    MapRequest,
    Message,
    StatusRequest,
    TrimRequest,
    UnmapRequest,
    check_hello,
    encode,
)
from kvcached.ranks.server import receive_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_log = logging.getLogger("kvcached.ranks")
_RETRY_S: Final = 0.05
_SEND_TIMEOUT_S: Final = 1  # a mapper that has not read for so long, with its buffer full, is as good as gone


class RemoteMapper:
    """Connects to a mapper that may start later than its owner. Safe to use from any thread.

    Raises `PeerTimeout` when nobody answers at `path` within `timeout_s`, `HandshakeMismatch` when the peer differs.
    """

    def __init__(self, path: Path, hello: Hello, timeout_s: float) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Message]] = {}
        self._lock = threading.Lock()
        self._lost: PeerLost | None = None
        self._closing = False
        self._reporting: Future[Outcome] | None = None
        self._tell: Callable[[str], None] | None = None
        self._socket = self._connect(timeout_s)
        try:
            self.hello = self._greet(hello, timeout_s)
        except PeerError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._read, name="kvcached-owner", daemon=True)
        self._thread.start()

    def _connect(self, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._path))
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise PeerTimeout(f"no mapper answers at {self._path} after {timeout_s:g} s: {error}") from error
                time.sleep(_RETRY_S)
            else:
                return connection

    def _greet(self, hello: Hello, timeout_s: float) -> Hello:
        self._socket.settimeout(timeout_s)
        self._socket.sendall(encode(hello, 0))
        theirs, _ = receive_frame(self._socket)
        if not isinstance(theirs, Hello):
            raise PeerRefused(f"the mapper at {self._path} did not answer the greeting")
        check_hello(hello, theirs)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        return theirs

    def _read(self) -> None:
        try:
            while True:
                message, number = receive_frame(self._socket)
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is None:
                    _log.warning("the mapper at %s answered number %d, which nobody asked", self._path, number)
                else:
                    future.set_result(message)
        except PeerError as error:
            self._lose(error)

    def _lose(self, error: PeerError) -> None:
        with self._lock:
            self._lost = PeerLost(f"the mapper at {self._path} is gone: {error}")
            waiting, self._waiting = list(self._waiting.values()), {}
            tell = self._tell
        for future in waiting:
            future.set_exception(self._lost)
        if not self._closing:
            _log.error("%s", self._lost)
            if tell is not None:
                tell(str(self._lost))

    def when_lost(self, tell: Callable[[str], None]) -> None:
        with self._lock:
            self._tell, lost = tell, self._lost
        if lost is not None:
            tell(str(lost))

    def _ask(self, message: Message) -> Future[Message]:
        future: Future[Message] = Future()
        with self._lock:
            if self._lost is not None:
                future.set_exception(self._lost)
                return future
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                self._socket.sendall(encode(message, number))
            except OSError as error:
                failure: PeerError = PeerLost(f"the mapper at {self._path} is gone: {error}")
                with contextlib.suppress(OSError):  # part of a frame may have been sent: nothing more can follow it
                    self._socket.shutdown(socket.SHUT_RDWR)
            except PeerRefused as error:  # too long to send: nothing was sent
                failure = error
            else:
                return future
            del self._waiting[number]
        future.set_exception(failure)
        return future

    def _ask_outcome(self, message: Message) -> Future[Outcome]:
        result: Future[Outcome] = Future()

        def settle(answer: Future[Message]) -> None:
            error = answer.exception()
            reply = None if error else answer.result()
            if isinstance(reply, Outcome):
                result.set_result(reply)
            else:
                result.set_exception(error or PeerRefused(f"the mapper at {self._path} answered {type(reply).__name__}"))

        self._ask(message).add_done_callback(settle)
        return result

    def map(self, runs: Runs, *, urgent: bool) -> Future[Outcome]:
        return self._ask_outcome(MapRequest(tuple(runs), urgent))

    def unmap(self, runs: Runs, after_step: int) -> Future[Outcome]:
        return self._ask_outcome(UnmapRequest(tuple(runs)))

    def trim(self) -> Future[Outcome]:
        return self._ask_outcome(TrimRequest())

    def set_limits(self, limits: LimitsRequest) -> Future[Outcome]:
        return self._ask_outcome(limits)

    def report(self, report: Report) -> None:
        if self._reporting is None or self._reporting.done():
            self._reporting = self._ask_outcome(report)

    def status(self, timeout_s: float) -> MapperStatus:
        try:
            answer = self._ask(StatusRequest()).result(timeout_s)
        except FutureTimeout as error:
            raise PeerTimeout(f"the mapper at {self._path} did not answer within {timeout_s:g} s") from error
        if not isinstance(answer, MapperStatus):
            raise PeerRefused(f"the mapper at {self._path} answered {type(answer).__name__}")
        return answer

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._socket.close()
