# SPDX-License-Identifier: Apache-2.0
"""The owner's end of the connection to one rank: connect, greet, send without waiting, receive."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from kvcached.errors import PeerError, PeerLost, PeerRefused, PeerTimeout
from kvcached.ranks.frames import FrameReader, close_in_forked_child, hello_of_rank, trusted_peer_of
from kvcached.ranks.messages import Hello, Message, check_hello, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RETRY_S: Final = 0.05
_MOST_WAITING_BYTES: Final = 64 << 20
"""What may wait for a rank that does not read: far beyond what the bounds on operations and transactions allow."""


class Link:
    """One rank that may start later than its owner. Used under its group's lock. `said_goodbye`: it stops in good order, hears nothing
    any more, and is still giving its memory back; `gone`: its end of the connection is closed.

    Raises `PeerTimeout` when nobody answers at `path` before `deadline_s` (monotonic), `HandshakeMismatch` when the peer differs,
    `PeerRefused` for a mapper of another user, `PeerLost` when it goes away meanwhile.
    """

    def __init__(self, rank: int, path: Path, hello: Hello, deadline_s: float) -> None:
        self.rank = rank
        self.path = path
        self.gone = False
        self.said_goodbye = False
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._socket = self._connect(deadline_s)
        with contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            self.pid = trusted_peer_of(self._socket)
            self._reader = FrameReader(self._socket)
            self.hello = self._greet(hello_of_rank(hello, rank), deadline_s)
            undo.pop_all()
        self.name = f"{path}, pid {self.pid}"
        close_in_forked_child(self._socket)

    def _connect(self, deadline_s: float) -> socket.socket:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_RETRY_S)  # a mapper that has an owner accepts nobody: its queue is full some time
            try:
                connection.connect(str(self.path))
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline_s:
                    raise PeerTimeout(f"no mapper answers at {self.path} in time: {error}") from error
                time.sleep(_RETRY_S)
            else:
                return connection

    def _greet(self, hello: Hello, deadline_s: float) -> Hello:
        self._socket.settimeout(max(0.01, deadline_s - time.monotonic()))
        try:
            self._socket.sendall(encode(hello, 0))
            theirs, _ = self._reader.receive()
        except TimeoutError as error:
            raise PeerTimeout(f"the mapper at {self.path} did not answer the greeting in time; does it serve another owner?") from error
        except (OSError, PeerLost) as error:
            raise PeerLost(f"the mapper at {self.path} went away while it was greeted: {error}") from error
        if not isinstance(theirs, Hello):
            raise PeerRefused(f"the mapper at {self.path} did not answer the greeting")
        check_hello(hello, theirs)
        self._socket.setblocking(False)
        return theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def listens(self) -> bool:
        return not (self.gone or self.said_goodbye)

    @property
    def has_waiting(self) -> bool:
        """Whether something is left to `flush`."""
        return bool(self._waiting)

    def send(self, message: Message, number: int = 0) -> None:
        """Send, or keep for `flush` what the rank does not take now. Raises `PeerLost`, and `PeerRefused` for a message too long."""
        frame = encode(message, number)
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        self.flush()
        if self._waiting_bytes > _MOST_WAITING_BYTES:
            raise PeerLost(f"it has not read {self._waiting_bytes} bytes that wait for it")

    def flush(self) -> None:
        """Send what waits, as far as the rank takes it. Raises `PeerLost`."""
        try:
            while self._waiting:
                sent = self._socket.send(self._waiting[0])
                self._waiting_bytes -= sent
                if sent < len(self._waiting[0]):
                    self._waiting[0] = self._waiting[0][sent:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it reads no more; whether it stops or is gone is told by what can be read
            self._waiting.clear()
            self._waiting_bytes = 0
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error

    def receive(self) -> Iterator[tuple[Message, int]]:
        """What has come, message by message. Raises `PeerLost` when the rank is gone, `PeerError` for nonsense."""
        with contextlib.suppress(BlockingIOError):
            self._reader.fill()
        while (frame := self._reader.next()) is not None:
            yield frame

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect_all(paths: list[Path], hello: Hello, timeout_s: float) -> list[Link]:
    """A link to every rank, in order; all of them or none."""
    deadline_s = time.monotonic() + timeout_s
    links: list[Link] = []
    try:
        for rank, path in enumerate(paths):
            links.append(Link(rank, path, hello, deadline_s))
    except PeerError:
        for link in links:
            link.close()
        raise
    return links
