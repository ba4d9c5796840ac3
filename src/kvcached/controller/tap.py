# SPDX-License-Identifier: Apache-2.0
"""The short way of an event stream: from the server's connection to the client's, without a task that wakes for each token."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from kvcached.controller.chunks import LAST, Chunks, frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web
    from aiohttp.abc import AbstractStreamWriter

    from kvcached.controller.usage import Meter

_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_LONGEST_HEAD_BYTES: Final = 65536
_INFORMS: Final = re.compile(rb"HTTP/1\.[01] 1\d\d")


class TappedConnector(aiohttp.TCPConnector):
    """Every connection has a `Tap`."""

    async def connect(self, *given: Any, **named: Any) -> Any:
        connection = await super().connect(*given, **named)
        transport = connection.transport
        if transport is not None:
            tap = transport.get_protocol()
            if not isinstance(tap, Tap):
                assert isinstance(tap, asyncio.Protocol)
                tap = Tap(tap, transport)
                transport.set_protocol(tap)
            tap.expect()
        return connection


class Tap(asyncio.Protocol):
    """Stands before aiohttp's protocol of a connection and looks at what passes; from `divert` on chunks of the body go elsewhere.

    aiohttp sees the beginning of such a body and its end, and nothing of what is between them.
    """

    def __init__(self, inner: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.chunks: Chunks | None = None
        self._inner = inner
        self._head: bytes | None = None
        self._sink: Callable[[bytes], None] | None = None
        self._on_end: Callable[[], None] | None = None

    def expect(self) -> None:
        """The next message begins."""
        self._head, self.chunks, self._sink = b"", None, None

    def divert(self, sink: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Payload goes there; `on_end` is called once, after the last of it or when the server is lost."""
        self._sink, self._on_end = sink, on_end

    def restore(self, whole: bool) -> None:
        """aiohttp hears how it ended. Not `whole`: the connection is of no use any more."""
        self._sink = None
        if whole and self.chunks is not None:
            self.transport.resume_reading()
            self._inner.data_received(LAST + self.chunks.rest)
        else:
            self.transport.abort()

    # ------------------------------------------------------------------ the transport's calls

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            self._watch(data)
            self._inner.data_received(data)
            return
        assert self.chunks is not None
        try:
            payload = self.chunks.feed(data)
        except ValueError:
            self.transport.abort()
            return
        if payload:
            self._sink(payload)
        if self.chunks.ended:
            try:
                self.restore(whole=True)
            finally:
                self._end()

    def _watch(self, data: bytes) -> None:
        if self._head is not None:
            data = self._skip_head(data)
        if self.chunks is not None and data:
            try:
                self.chunks.feed(data)
            except ValueError:  # aiohttp says so too
                self.chunks = None

    def _skip_head(self, data: bytes) -> bytes:
        """What of it is body."""
        assert self._head is not None
        self._head += data
        head, found, body = self._head.partition(b"\r\n\r\n")
        while found and _INFORMS.match(head):
            self._head = body
            head, found, body = body.partition(b"\r\n\r\n")
        if not found:
            if len(self._head) > _LONGEST_HEAD_BYTES:  # a body, since not all servers end their heads as they should
                self._head = None
            return b""
        self._head = None
        if _CHUNKED.search(head + b"\r\n"):
            self.chunks = Chunks()
        return body

    def connection_lost(self, error: Exception | None) -> None:
        try:
            self._inner.connection_lost(error)
        finally:
            self._end()

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class Passage:
    """One stream that can go the short way. `client`: the connection of who asked; nothing but whole chunks is written there."""

    def __init__(self, tap: Tap, client: asyncio.Transport, writer: AbstractStreamWriter, meter: Meter) -> None:
        self.tap = tap
        self.client = client
        self.meter = meter
        self._writer = writer
        self._most_bytes = client.get_write_buffer_limits()[1]
        self._news = asyncio.Event()
        self._ended = False

    def is_free(self, passed_bytes: int) -> bool:
        """Whether the rest of the body can go: aiohttp holds nothing of it, nor of anything before it."""
        chunks = self.tap.chunks
        return chunks is not None and chunks.payload_bytes == passed_bytes and chunks.is_between and not chunks.ended and not self._is_full

    @property
    def _is_full(self) -> bool:
        return self.client.get_write_buffer_size() > self._most_bytes

    def descriptors(self) -> tuple[int, int] | None:
        """The server's connection and the client's, for another process. None: one is encrypted, or this has not sent all yet."""
        ends = (self.tap.transport, self.client)
        if any(end.is_closing() or end.get_extra_info("sslcontext") or end.get_write_buffer_size() for end in ends):
            return None
        server, client = (end.get_extra_info("socket").fileno() for end in ends)
        return server, client

    async def carry(self) -> None:
        """Until the body has ended or the server is lost: which of the two, its `aiohttp.ClientResponse` says."""
        self.tap.divert(self._pass_on, self._end)
        try:
            while not self._ended:
                await self._news.wait()
                self._news.clear()
                await self._writer.drain()
                if not self._ended:  # else the connection may be another request's by now
                    self.tap.transport.resume_reading()
        finally:
            if not self._ended:
                self.tap.restore(whole=False)

    def _pass_on(self, payload: bytes) -> None:
        self.meter.feed(payload)
        self.client.write(frame(payload))
        if self._is_full:
            self.tap.transport.pause_reading()
            self._news.set()

    def _end(self) -> None:
        self._ended = True
        self._news.set()


async def passage_of(upstream: aiohttp.ClientResponse, request: web.Request, response: web.StreamResponse, meter: Meter) -> Passage | None:
    """None: aiohttp has to pass it on, since one of the two sides is not chunked, or has no `Tap`."""
    connection = upstream.connection
    transport = None if connection is None else connection.transport
    tap = None if transport is None else transport.get_protocol()
    if not isinstance(tap, Tap) or request.transport is None or response.headers.get("Transfer-Encoding") != "chunked":
        return None
    writer = await response.prepare(request)  # it is prepared, and so this only says it
    return None if writer is None else Passage(tap, request.transport, writer, meter)
