# SPDX-License-Identifier: Apache-2.0
"""A process that carries event streams from servers' connections to clients', and knows nothing else: `python -m` this, and a descriptor.

The descriptor is one end of a socket of whole messages. `{"take": 7}` comes with two connections, the server's and the client's, of which
the body's next chunk is the next to be read; `{"leave": 7}` asks to stop. `Ended` is said once of each. When the socket's other end is
closed, for instance since its owner died, this process ends, and with it what it carries.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Final

from kvcached.controller.chunks import Chunks, frame
from kvcached.controller.usage import Meter

MESSAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """`how`: whole, lost (the server is), gone (the client is), or left (as was asked). `is_clean`: the client has whole chunks only.

    `events`, `tokens_in`, `tokens_out`: see `Meter`.
    """

    ticket: int
    how: str
    is_clean: bool
    events: int
    tokens_in: int | None
    tokens_out: int | None


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

    async def start(self, server: socket.socket, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: _Client(self), sock=client)
        await loop.create_connection(lambda: _Server(self), sock=server)
        if self.how or self._is_left:
            self._close()

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
        self._desk.say(Ended(self.ticket, self.how, self.is_clean, self.meter.events, *self.meter.said()))


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
        asyncio.get_running_loop().call_soon(transport.pause_reading)  # Python 3.10 begins to read after this call

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

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._carriages: dict[int, Carriage] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self.closed = asyncio.Event()

    def read(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._line, MESSAGE_BYTES, 2)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed.set()
            asyncio.get_running_loop().remove_reader(self._line)
            return
        message = json.loads(data)
        if "leave" in message:
            if message["leave"] in self._carriages:
                self._carriages[message["leave"]].leave()
            return
        carriage = self._carriages[message["take"]] = Carriage(message["take"], self)
        ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if len(ends) < 2:  # this process may not have so many
            for end in ends:
                end.close()
            carriage.client_closed(None)
            return
        server, client = ends
        start = asyncio.get_running_loop().create_task(carriage.start(server, client))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    def say(self, ended: Ended) -> None:
        del self._carriages[ended.ticket]
        try:
            self._line.send(json.dumps(asdict(ended)).encode())
        except OSError:  # its owner is gone, which `read` hears too
            self.closed.set()


async def carry_all(line: socket.socket) -> None:
    line.setblocking(False)
    desk = Desk(line)
    asyncio.get_running_loop().add_reader(line, desk.read)
    await desk.closed.wait()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # its owner lets streams end, and hangs up then
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    asyncio.run(carry_all(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
