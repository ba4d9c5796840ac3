# SPDX-License-Identifier: Apache-2.0
"""A process that carries event streams from servers' connections to clients', and knows nothing else: `python -m` this, and a descriptor.

The descriptor is one end of a socket of whole messages. `{"take": 7}` comes with two connections, the server's and the client's, of which
the body's next chunk is the next to be read; `{"leave": 7}` asks to stop. `Ended` is said once of each; the first that is said is
`{"pid": 12}`, when this process is ready. When the socket's other end is closed, for instance since its owner died, this process ends, and
with it what it carries.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import os
import signal
import socket
import sys
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvcached.controller.chunks import Chunks, frame
from kvcached.controller.usage import Meter

MESSAGE_BYTES: Final = 4096
_LONGEST_MISHAP: Final = 500


@dataclass(frozen=True, slots=True)
class Ended:
    """`how`: whole, lost (the server is), gone (the client is), or left (as was asked). `is_clean`: the client has whole chunks only.

    `events`, `tokens_in`, `tokens_out`: see `Meter`. `mishap`: what went wrong here, though neither side did anything; empty: nothing.
    """

    ticket: int
    how: str
    is_clean: bool
    events: int
    tokens_in: int | None
    tokens_out: int | None
    mishap: str = ""


class Line:
    """One end of the socket of whole messages. What that has no room for waits. `lost` is set when the other end is found to be gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self.lost = asyncio.Event()
        self._waiting: deque[bytes] = deque()

    def say(self, message: dict[str, Any]) -> None:
        self._waiting.append(json.dumps(message).encode())
        if len(self._waiting) == 1:
            self._send()

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                self.socket.send(self._waiting[0])
                self._waiting.popleft()
        except BlockingIOError:
            loop.add_writer(self.socket, self._send)
            return
        except OSError:
            self._waiting.clear()
            self.lost.set()
        loop.remove_writer(self.socket)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.socket)
        loop.remove_writer(self.socket)
        self.socket.close()


class Carriage:
    """One stream. Its end is said after its last byte was sent."""

    def __init__(self, ticket: int, desk: Desk) -> None:
        self.ticket = ticket
        self.how = ""
        self.is_clean = True
        self._is_left = False
        self.server: asyncio.Transport | None = None
        self.client: asyncio.Transport | None = None
        self.meter = Meter()
        self._chunks = Chunks()
        self._desk = desk
        self._mishap = ""
        self._ends: list[socket.socket] = []

    async def start(self, descriptors: list[int]) -> None:
        """The server's and the client's, which are closed with it. Whatever it raises is for `fail`."""
        self._open(descriptors)
        if len(self._ends) < 2:
            raise OSError("this process may not open as many files as it is lent")
        server, client = self._ends
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Client(self), sock=client)
        await loop.create_connection(lambda: _Server(self), sock=server)
        if self.how or self._is_left:
            self._close()

    def _open(self, descriptors: list[int]) -> None:
        left = list(descriptors)
        try:
            while left:
                self._ends.append(socket.socket(fileno=left[0]))
                del left[0]
        finally:
            for descriptor in left:
                os.close(descriptor)

    def fail(self, error: BaseException) -> None:
        """It cannot be carried; its owner is told when the client has all that was sent."""
        self._mishap = f"{type(error).__name__}: {error}"[:_LONGEST_MISHAP]
        has_client = self.client is not None
        self.end("lost")
        if not has_client:
            self.client_closed(None)

    def pass_on(self, data: bytes) -> None:
        if self.how or self.client is None:
            return
        try:
            payload = self._chunks.feed(data)
        except ValueError:
            self.end("lost")
            return
        if payload:
            self.meter.feed(payload)
            self.client.write(frame(payload))
        if self._chunks.ended:
            self.end("lost" if self._chunks.rest else "whole")

    def end(self, how: str) -> None:
        if not self.how:
            self.how = how
            self._close()

    def leave(self) -> None:
        """Its owner waits for the client's connection, whatever is still to be sent there."""
        self._is_left = True
        self.how = self.how or "left"
        self._close()

    def _close(self) -> None:
        if self.server is not None:
            self.server.abort()
        if self.client is None:
            return
        if self._is_left:
            self.is_clean = not self.client.get_write_buffer_size()
            self.client.abort()
        else:
            self.client.close()

    def client_closed(self, error: Exception | None) -> None:
        if error is not None or not self.how:
            self.how, self.is_clean = "gone", False
        if self.server is not None:
            self.server.abort()
        self._desk.say(Ended(self.ticket, self.how, self.is_clean, self.meter.events, *self.meter.said(), self._mishap))
        for end in self._ends:  # which a transport that was never made would have closed
            end.close()


class _Server(asyncio.Protocol):
    def __init__(self, carriage: Carriage) -> None:
        self._carriage = carriage

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._carriage.server = transport
        self.data_received = self._carriage.pass_on  # type: ignore[method-assign]  # a call less for each token

    def connection_lost(self, error: Exception | None) -> None:
        self._carriage.end("lost")


class _Client(asyncio.Protocol):
    """Its owner goes on reading from it, to hear when it leaves."""

    def __init__(self, carriage: Carriage) -> None:
        self._carriage = carriage

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._carriage.client = transport
        transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._pause, transport)

    def _pause(self, transport: asyncio.Transport) -> None:
        transport.resume_reading()  # Python 3.10 began to read after `connection_made`, and takes it for paused
        transport.pause_reading()

    def pause_writing(self) -> None:
        if self._carriage.server is not None:
            self._carriage.server.pause_reading()

    def resume_writing(self) -> None:
        if self._carriage.server is not None:
            self._carriage.server.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._carriage.client_closed(error)


class Desk:
    """What comes from the owner, and goes there."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._carriages: dict[int, Carriage] = {}
        self._starts: set[asyncio.Task[None]] = set()

    def read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._line.socket, MESSAGE_BYTES, 2)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._line.lost.set()
            asyncio.get_running_loop().remove_reader(self._line.socket)
            return
        message = json.loads(data)
        if "leave" in message:
            if message["leave"] in self._carriages:
                self._carriages[message["leave"]].leave()
            return
        carriage = self._carriages[message["take"]] = Carriage(message["take"], self)
        start = asyncio.get_running_loop().create_task(carriage.start(descriptors))
        self._starts.add(start)
        start.add_done_callback(functools.partial(self._started, carriage))

    def _started(self, carriage: Carriage, start: asyncio.Task[None]) -> None:
        self._starts.discard(start)
        error = None if start.cancelled() else start.exception()
        if error is not None:
            carriage.fail(error)

    def say(self, ended: Ended) -> None:
        if self._carriages.pop(ended.ticket, None) is not None:
            self._line.say(asdict(ended))


async def carry_all(end: socket.socket) -> None:
    """Until the other end is closed, or something went wrong of which it is not known whose stream it was."""
    line, loop = Line(end), asyncio.get_running_loop()

    def heed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if "handle" in context:  # else a connection's, which asyncio closes, or a task's, which is heard
            line.lost.set()

    loop.set_exception_handler(heed)
    line.say({"pid": os.getpid()})  # before it listens: who sees it wait knows that its owner has been told
    loop.add_reader(end, Desk(line).read)
    await line.lost.wait()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # its owner lets streams end, and hangs up then
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    asyncio.run(carry_all(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
