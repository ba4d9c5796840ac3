# SPDX-License-Identifier: Apache-2.0
"""What the client of one request is sent: nothing before there is an answer, or comments of an event stream that has none yet."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from aiohttp import web
from multidict import CIMultiDict

from kvcached.controller.api_errors import ApiError, error_event

if TYPE_CHECKING:
    import aiohttp

HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "proxy-connection",
    }
)
_SHOWN: Final = frozenset({"text/html", "application/xhtml+xml", "image/svg+xml", "text/xml", "application/xml"})
_COMMENT: Final = b": waiting for the model\n\n"
_STREAM_HEADERS: Final = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class ClientGone(Exception):
    """The client hung up; there is nobody to tell anything."""


class Reply:
    """Use it as an asynchronous context manager. `keep_alive_s`: how often a comment is sent until `hush`; None: never.

    The first comment makes it a stream of status 200: what fails after that can only be told as an event.
    """

    def __init__(self, request: web.Request, keep_alive_s: float | None = None) -> None:
        self.request = request
        self.begun: web.StreamResponse | None = None
        self._keep_alive_s = keep_alive_s
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Reply:
        if self._keep_alive_s is not None:
            self._task = asyncio.get_running_loop().create_task(self._comment(self._keep_alive_s))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._task is not None and kind is asyncio.CancelledError:
            self._task.cancel()  # at once: it may be waiting for a client that reads nothing
        else:
            await self.hush()

    async def _comment(self, pause_s: float) -> None:
        with contextlib.suppress(ConnectionError):  # the client is gone, which its handler hears too
            while True:
                await asyncio.sleep(pause_s)
                async with self._writing:
                    if self.begun is None:
                        self.begun = web.StreamResponse(headers=_STREAM_HEADERS)
                        await self.begun.prepare(self.request)
                    await self.begun.write(_COMMENT)

    async def hush(self) -> bool:
        """No comment from here on. Whether there was one."""
        async with self._writing:
            if self._task is not None:
                self._task.cancel()
        return self.begun is not None

    async def begin(self, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """After `hush`. Status and headers are those of `upstream`, but for a stream that has begun."""
        if self.begun is None:
            self.begun = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=answer_headers(upstream))
            await self.begun.prepare(self.request)
        return self.begun

    async def send_whole(self, upstream: aiohttp.ClientResponse, body: bytes) -> web.StreamResponse:
        """Instead of `begin`, where all of a body is there: with its head in one piece, which is half the work."""
        headers = answer_headers(upstream)
        headers["Content-Length"] = str(len(body))
        self.begun = web.Response(status=upstream.status, reason=upstream.reason, headers=headers, body=body)
        await self.begun.prepare(self.request)
        await self.begun.write_eof()
        return self.begun

    async def fail(self, error: ApiError | bytes) -> web.StreamResponse:
        """After `hush`, of a stream that has begun: its last event. `bytes`: what a server said instead of streaming. Any other answer
        is cut, so that nobody takes it for whole."""
        assert self.begun is not None
        if self.begun.content_type != "text/event-stream":
            self._cut()
            return self.begun
        path = self.request.path
        try:
            await self.begun.write(error.event(path) if isinstance(error, ApiError) else error_event(b" ".join(error.split()), path))
            await self.begun.write_eof()
        except ConnectionError as gone:
            raise ClientGone from gone
        return self.begun

    async def break_off(self, upstream: aiohttp.ClientResponse) -> None:
        """An event stream ends with an error event; any other body is cut, so that nobody takes it for whole."""
        assert self.begun is not None
        if is_event_stream(upstream):
            error = ApiError(502, "the model's server was lost in the middle of the answer", "upstream_lost")
            await self.begun.write(error.event(self.request.path))
        else:
            self._cut()

    def _cut(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


def answer_headers(upstream: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """What a browser would show is kept from acting in the gateway's name."""
    headers = CIMultiDict((name, value) for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP)
    if upstream.content_type in _SHOWN:
        headers["Content-Security-Policy"] = "sandbox"
    return headers


def is_event_stream(upstream: aiohttp.ClientResponse) -> bool:
    return upstream.content_type == "text/event-stream"
