# SPDX-License-Identifier: Apache-2.0
"""How requests come in: for how long their heads and bodies are waited for, and what a client is told when one is given up."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvcached.controller.api_errors import ApiError, shutting_down

_LEAST_BYTES_PER_S: Final = 16 * 1024
"""A body that comes as fast is not given up, however long it is."""
_LAST_S: Final = 2.0
"""For bodies of which the rest is on its way when the gateway leaves."""
_LOOK_S: Final = 0.2


class Intake:
    """`timeout_s`: for a head, counted from its first byte, or from when the connection was made; and for a body, counted from its head,
    and a second more for each 16 KiB that have come. It may be changed at any time."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._last_s: float | None = None

    def hurry(self) -> None:
        """The gateway leaves: who sends no more is told to come again."""
        if self._last_s is None:
            self._last_s = self._loop.time() + _LAST_S

    async def read(self, request: web.Request) -> bytes:
        """The body. Raises `ApiError`: 408 when it does not come in time, 503 when the gateway leaves, 400 for what is no body."""
        if request.content.is_eof():
            return await request.read()
        begin_s, reading = self._loop.time(), self._loop.create_task(request.read())
        reading.add_done_callback(_hear)
        try:
            while not reading.done():
                self._refuse_late(begin_s, request.content.total_bytes)
                await asyncio.wait({reading}, timeout=_LOOK_S)
            return reading.result()
        except web.RequestPayloadError as error:
            raise ApiError(400, f"The body cannot be read: {error}", "invalid_body") from error
        finally:
            reading.cancel()

    def _refuse_late(self, begin_s: float, come_bytes: int) -> None:
        now_s = self._loop.time()
        if self._last_s is not None and now_s >= self._last_s:
            raise shutting_down()
        if now_s >= begin_s + self.timeout_s + come_bytes / _LEAST_BYTES_PER_S:
            raise too_slow("body", self.timeout_s)


def too_slow(what: str, timeout_s: float) -> ApiError:
    return ApiError(408, f"The {what} of the request did not come within {timeout_s:g} s.", "request_timeout")


class Connection(RequestHandler):
    """A client's. Whatever goes wrong in an answer, the client gets an error in the API's shape, or is cut off where it has a part."""

    __slots__ = ("_has_begun", "_intake", "_patience")

    def __init__(self, server: web.Server, intake: Intake) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]  # as `AppRunner` says it, too
        self._intake = intake
        self._patience: asyncio.TimerHandle | None = None
        self._has_begun = False

    @property
    def is_idle(self) -> bool:
        """It waits for the next request: none is there, under way, or about to begin."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def is_lingering(self) -> bool:
        """Its request was answered, and the rest of the body that still comes is nobody's."""
        return self._waiter is None and not self._request_in_progress

    # ------------------------------------------------------------------ heads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._wait_no_more()
        elif data:  # it is not a whole head
            self._has_begun = True
            if self._patience is None:
                self._wait_for_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(self._intake.timeout_s, self._lose_patience)

    def _wait_no_more(self) -> None:
        self._has_begun = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        """A browser opens connections in advance, and would take an answer there for one to its next request."""
        if self._has_begun and isinstance(self.transport, asyncio.Transport):
            self.transport.write(_whole(too_slow("head", self._intake.timeout_s)))
        self.force_close()

    # ------------------------------------------------------------------ failures

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Raises `ConnectionError` where an answer has begun."""
        if request.writer.output_size and isinstance(self.transport, asyncio.Transport):
            self.transport.abort()
        super().handle_error(request, status, exc, message)  # it writes to the log
        error = ApiError(status, message or "The gateway failed; its log says why.", HTTPStatus(status).name.lower())
        answer = web.Response(status=status, body=error.body(request.path), headers=error.headers())
        answer.force_close()
        return answer


def _whole(error: ApiError) -> bytes:
    """An answer to a request of which nothing is known."""
    body = error.body("/")
    headers = {**error.headers(), "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _hear(reading: asyncio.Task[bytes]) -> None:
    """Why nobody waits for it any more is known."""
    if not reading.cancelled():
        reading.exception()
