# SPDX-License-Identifier: Apache-2.0
"""The control endpoint of a pool: a Unix socket in the run directory, for `kvctl` and for the other pools of the card.

One request and one answer per connection, a deadline on everything; the kernel says which user is at the other end.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Final

from kvcached.config import package_version
from kvcached.errors import (
    DeviceError,
    HandshakeMismatch,
    Misuse,
    PeerError,
    PeerLost,
    PeerRefused,
    PeerTimeout,
    PoolExhausted,
)
from kvcached.log_lines import fields
from kvcached.runtime.control_messages import (
    PROTOCOL,
    A,
    Answer,
    BytesAnswer,
    ChangeAnswer,
    Deadline,
    EvictRequest,
    ExplainRequest,
    ExplainRow,
    Explanation,
    Failure,
    FloorRequest,
    LimitRequest,
    MetricsRequest,
    PingRequest,
    Pong,
    PoolControl,
    PoolMetrics,
    PoolRequest,
    PoolStatus,
    PressureRequest,
    Request,
    StatusRequest,
    TrimRequest,
    WeightAnswer,
    WeightRequest,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
    receive_frame,
    send_frame,
)
from kvcached.runtime.endpoint import SocketFile, endpoint_path, prepare_run_dir
from kvcached.runtime.forking import in_forked_child

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = [
    "BytesAnswer",
    "ChangeAnswer",
    "ControlClient",
    "ControlServer",
    "ExplainRow",
    "Explanation",
    "Pong",
    "PoolControl",
    "PoolMetrics",
    "PoolStatus",
    "WeightAnswer",
    "endpoint_path",
    "prepare_run_dir",
]

_log = logging.getLogger("kvcached.control")
_PEER_GROUPS: Final = 59  # SO_PEERGROUPS, which the socket module does not name
_FULL_TABLE_PAUSE_S: Final = 0.05
_MAX_FAILURE_CHARS: Final = 4000
_CLIENT_ERRORS: Final[dict[str, type[PeerError]]] = {"HandshakeMismatch": HandshakeMismatch, "PeerTimeout": PeerTimeout}


class ControlServer:
    """Answers for `pool` at `path` from its own threads. `group` (a gid) may connect too, besides this user and root.

    `io_timeout_s` bounds the reading of a request and the writing of an answer; the pool bounds its own work.
    `max_connections` are served at a time, further ones wait in the kernel's queue. Use it as a context manager, or start and stop.
    """

    def __init__(
        self, path: Path, pool: PoolControl, *, group: int | None = None, io_timeout_s: float = 2.0, max_connections: int = 16
    ) -> None:
        self._file = SocketFile(path, group)
        self._pool = pool
        self._group = group
        self._io_timeout_s = io_timeout_s
        self._slots = threading.Semaphore(max_connections)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._threads: set[threading.Thread] = set()

    @property
    def path(self) -> Path:
        return self._file.path

    def start(self) -> None:
        """Listen. Raises `SettingError` if a live process has the path, `OSError` if it cannot be made, `PeerTimeout` on a held lock."""
        with self._lock:
            if self._listener is not None or self._stopping.is_set():
                raise Misuse("a control server starts once")
            self._open()
        in_forked_child(self, ControlServer._forget)

    def ensure_bound(self) -> bool:
        """Listen anew if the file was deleted or replaced under us. True if that was needed. Raises as `start` does."""
        with self._lock:
            if self._stopping.is_set() or self._listener is None or self._file.is_ours():
                return False
            lost = self._listener
            self._open()
            _close_listener(lost)
        return True

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Refuse new requests, let running ones finish, unlink the socket last. False if one was still running after `timeout_s`."""
        with self._lock:
            self._stopping.set()
            listener, self._listener = self._listener, None
        if listener is None:
            return True
        _close_listener(listener)
        self._slots.release()  # wakes the accepting thread where it waits for a slot
        deadline = time.monotonic() + timeout_s
        while (running := self._running()) and (left_s := deadline - time.monotonic()) > 0:
            running[0].join(left_s)
        self._file.remove()
        return not self._running()

    def __enter__(self) -> ControlServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _running(self) -> list[threading.Thread]:
        with self._lock:
            return [thread for thread in self._threads if thread.is_alive() and thread is not threading.current_thread()]

    def _open(self) -> None:
        listener = self._file.listen()
        self._listener = listener
        self._launch(threading.Thread(target=self._accept, args=(listener,), name="kvcached-control", daemon=True))

    def _launch(self, thread: threading.Thread) -> None:
        thread.start()
        self._threads = {running for running in self._threads if running.is_alive()} | {thread}

    def _forget(self) -> None:
        """In a forked child: let go of the listener, or the endpoint would seem alive after the parent's death."""
        self._lock = threading.Lock()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        while True:
            self._slots.acquire()
            connection = self._next_connection(listener)
            if connection is None:
                self._slots.release()
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="kvcached-control-request", daemon=True)
            try:
                with self._lock:
                    self._launch(thread)
            except RuntimeError as error:  # the system has no thread left just now; the next client may be luckier
                _log.warning("refused a control request: %s", error)
                connection.close()
                self._slots.release()

    def _next_connection(self, listener: socket.socket) -> socket.socket | None:
        """None when the listener was closed."""
        while True:
            try:
                return listener.accept()[0]
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED):
                    return None
                self._stopping.wait(_FULL_TABLE_PAUSE_S)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._exchange(connection)
        except PeerError as error:
            _log.debug("a control client went away: %s", error)
        finally:
            self._slots.release()

    def _exchange(self, connection: socket.socket) -> None:
        """Answer one request. An error that is our bug, or an unknown state, is told to the client and then travels on."""
        try:
            frame = encode_answer(self._answer(connection))
        except (PoolExhausted, Misuse, DeviceError, PeerError) as error:
            frame = _failure_frame(error)
        except BaseException as error:
            send_frame(connection, _failure_frame(error), Deadline(self._io_timeout_s))
            raise
        send_frame(connection, frame, Deadline(self._io_timeout_s))

    def _answer(self, connection: socket.socket) -> Answer:
        pid, uid = _allowed_peer(connection, self._group)
        request = decode_request(receive_frame(connection, Deadline(self._io_timeout_s)))
        if isinstance(request, PingRequest):
            return Pong(protocol=PROTOCOL, version=package_version(), instance=self.path.stem, pid=os.getpid())
        answer = _perform(self._pool, request)
        if not isinstance(request, StatusRequest | MetricsRequest | ExplainRequest):
            facts = fields("control", pool=self.path.stem, request=request.model_dump(), answer=answer.model_dump())
            _log.info("control from pid %d uid %d: %r -> %r", pid, uid, request, answer, extra=facts)
        return answer


def _perform(pool: PoolControl, request: PoolRequest) -> Answer:
    match request:
        case StatusRequest():
            return pool.status()
        case MetricsRequest():
            return pool.metrics()
        case LimitRequest():
            return pool.limit(request.limit_bytes, request.revision)
        case FloorRequest():
            return pool.floor(request.floor_bytes)
        case WeightRequest():
            return pool.weight(request.weight)
        case TrimRequest():
            return pool.trim(request.size_bytes)
        case EvictRequest():
            return pool.evict(request.size_bytes)
        case ExplainRequest():
            return pool.explain()
        case PressureRequest():
            return pool.pressure(request.wanted_bytes)


def _failure_frame(error: BaseException) -> bytes:
    return encode_answer(Failure(type=type(error).__name__, message=str(error)[:_MAX_FAILURE_CHARS]))


def _close_listener(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept()
    listener.close()


def _allowed_peer(connection: socket.socket, group: int | None) -> tuple[int, int]:
    """(pid, uid) of the peer. Raises `PeerRefused` unless it is root, this user, or of the group that may connect."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid in (0, os.geteuid()) or (group is not None and group in {gid, *_further_groups(connection)}):
        return pid, uid
    raise PeerRefused(f"user {uid} may not control a pool of user {os.geteuid()}; KVCACHED_RUN_GROUP names a group that may")


def _further_groups(connection: socket.socket) -> tuple[int, ...]:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _PEER_GROUPS, 1024)
    except OSError:  # more than 256 groups, or an old kernel: the main group alone counts then
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


class ControlClient:
    """Calls the pool that listens at `path`. Every call has `timeout_s` in all and opens its own connection; threads may share it.

    Raises, from every call: `PeerLost` (nobody listens, or it died), `PeerTimeout`, `HandshakeMismatch` (another protocol),
    `PeerRefused` (the pool answered no; the message begins with the name of its error).
    """

    def __init__(self, path: Path, timeout_s: float = 10.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def ping(self) -> Pong:
        return self._call(PingRequest(), Pong)

    def status(self) -> PoolStatus:
        return self._call(StatusRequest(), PoolStatus)

    def metrics(self) -> PoolMetrics:
        return self._call(MetricsRequest(), PoolMetrics)

    def limit(self, limit_bytes: int, revision: int | None = None) -> ChangeAnswer:
        return self._call(LimitRequest(limit_bytes=limit_bytes, revision=revision), ChangeAnswer)

    def floor(self, floor_bytes: int) -> ChangeAnswer:
        return self._call(FloorRequest(floor_bytes=floor_bytes), ChangeAnswer)

    def weight(self, weight: float) -> WeightAnswer:
        return self._call(WeightRequest(weight=weight), WeightAnswer)

    def trim(self, size_bytes: int | None = None) -> BytesAnswer:
        return self._call(TrimRequest(size_bytes=size_bytes), BytesAnswer)

    def evict(self, size_bytes: int) -> BytesAnswer:
        return self._call(EvictRequest(size_bytes=size_bytes), BytesAnswer)

    def explain(self) -> Explanation:
        return self._call(ExplainRequest(), Explanation)

    def pressure(self, wanted_bytes: int) -> BytesAnswer:
        return self._call(PressureRequest(wanted_bytes=wanted_bytes), BytesAnswer)

    def _call(self, request: Request, answer_type: type[A]) -> A:
        deadline = Deadline(self._timeout_s)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            self._connect(connection, deadline)
            # A server that refuses does so without reading: its answer may be there although the sending failed.
            with contextlib.suppress(PeerLost):
                send_frame(connection, encode_request(request), deadline)
            answer = decode_answer(receive_frame(connection, deadline), answer_type)
        if isinstance(answer, Failure):
            raise _CLIENT_ERRORS.get(answer.type, PeerRefused)(f"{answer.type}: {answer.message}")
        return answer

    def _connect(self, connection: socket.socket, deadline: Deadline) -> None:
        # Bounds a connect() that waits for a place in a full queue; settimeout() would make it fail at once instead.
        seconds, fraction = divmod(deadline.left_s(), 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        try:
            connection.connect(str(self._path))
        except BlockingIOError:
            raise PeerTimeout(f"the pool at {self._path} accepts no connection within {self._timeout_s} s") from None
        except PermissionError as error:
            raise PeerRefused(f"this user may not connect to {self._path}: {error}") from None
        except OSError as error:
            raise PeerLost(f"nobody answers at {self._path}: {error}") from None
