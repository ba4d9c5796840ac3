# SPDX-License-Identifier: Apache-2.0
"""One request to one server of a model and back, byte for byte; tried again only while the client has seen nothing of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from kvcached.controller.api_errors import ApiError, reshaped, without_reason
from kvcached.controller.choice import choose, failed, tried, worked
from kvcached.controller.reply import HOP_BY_HOP, ClientGone, Reply, is_event_stream
from kvcached.controller.tap import passage_of
from kvcached.controller.traffic import Finished
from kvcached.controller.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.controller.choice import Replica
    from kvcached.controller.forwarding import Forwarders
    from kvcached.controller.owner import Owner
    from kvcached.controller.traces import RequestTrace, Traces

_log = logging.getLogger("kvcached.controller")
_UNABLE: Final = frozenset({502, 503, 504})
"""What a server says that lost what is behind it, or has too much to do."""
TRIES: Final = 5
FIRST_PAUSE_S: Final = 0.05
_NOT_FORWARDED: Final = HOP_BY_HOP | {"host", "content-length", "content-encoding", "authorization", "x-api-key", "expect"}
_LOST: Final = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request, ready to be sent.

    `authorization`: headers that the model's server gets as credentials. `keep_alive_s`: see `Reply`. `key`: see `choose`. `in_full`: the
    client may know why a model fails, which has addresses, and lines of logs.
    """

    model: str
    method: str
    path_and_query: str
    body: bytes
    authorization: Mapping[str, str]
    keep_alive_s: float | None = None
    key: str = ""
    in_full: bool = True


class _NothingSent(Exception):
    """The server was lost before the client saw anything of an answer."""


class Proxy:
    """`session` is used for all servers, and is the caller's to close."""

    def __init__(self, owner: Owner, session: aiohttp.ClientSession, traces: Traces, forwarders: Forwarders) -> None:
        self._owner = owner
        self._forwarders = forwarders
        self._session = session
        self._traces = traces
        self._trips: set[_Trip] = set()

    def under_way(self) -> list[dict[str, Any]]:
        """Each request that has not ended, the oldest first."""
        return [trip.facts() for trip in sorted(self._trips, key=lambda trip: trip.start_s)]

    async def relay(self, request: web.Request, call: Call) -> web.StreamResponse:
        """The server's answer, whatever its status. Raises `ApiError` when there is none."""
        trace = self._traces.begin(request.headers, call.model, call.method, request.path)
        trip, ok, refused = _Trip(self._owner, call, trace), False, False
        self._trips.add(trip)
        try:
            async with Reply(request, call.keep_alive_s) as reply:
                response = await self._try(reply, call, trip)
            trip.status = response.status
            ok = response.status < 500 and trip.complete
        except ApiError as error:
            said = error if call.in_full else without_reason(error, call.model)
            trip.status = error.status if reply.begun is None else reply.begun.status
            refused = error.status in (404, 429, 503) and trip.replica is None
            if reply.begun is None:
                raise said from None
            return await reply.fail(said)
        finally:  # also where the client went away
            self._trips.discard(trip)
            trip.end(ok=ok, refused=refused)
        return response

    async def _try(self, reply: Reply, call: Call, trip: _Trip) -> web.StreamResponse:
        reason = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            async with contextlib.AsyncExitStack() as stack:
                with trip.trace.waiting():
                    trip.waits = True
                    await stack.enter_async_context(self._owner.lease(call.model))
                    trip.waits = False
                trip.replica = choose(self._owner.backends[call.model].replicas, self._owner.now_s, call.key)
                if trip.replica is None:
                    reason = "no server of it is up"
                    continue
                try:
                    return await self._exchange(reply, call, trip, trip.replica)
                except _NothingSent as error:
                    reason = "its server was lost before it answered"  # where that is, is nothing for clients
                    _log.warning("%s: %s", call.model, error)
                    await self._look_at(call.model, trip.replica, str(error))
        raise ApiError(502, f"{call.model}: {reason}", "upstream_lost", 1.0)

    async def _look_at(self, name: str, replica: Replica, reason: str) -> None:
        backend = self._owner.backends[name]
        if await backend.is_gone(replica) and not any(other.up for other in backend.replicas):
            self._owner.ended(name, reason)

    async def _exchange(self, reply: Reply, call: Call, trip: _Trip, replica: Replica) -> web.StreamResponse:
        token = object()
        tried(replica, self._owner.now_s)
        replica.open.add(token)
        try:
            with trip.trace.asking(replica.address) as traced:
                async with self._send(reply.request, call, replica, traced) as upstream:
                    if upstream.status in _UNABLE:
                        failed(replica, self._owner.now_s)
                    else:
                        worked(replica)
                    return await self._answer(reply, upstream, trip)
        except _LOST as error:
            failed(replica, self._owner.now_s)
            raise _NothingSent(f"{replica.address}: {error or type(error).__name__}") from error
        finally:
            replica.open.discard(token)

    def _send(self, request: web.Request, call: Call, replica: Replica, traced: Mapping[str, str]) -> aiohttp.client._RequestContextManager:
        left_out = dropped(request)
        headers = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() not in left_out)
        headers.update(call.authorization)
        headers.update(traced)
        url = URL(replica.address + call.path_and_query, encoded=True)
        skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
        return self._session.request(
            call.method, url, headers=headers, data=call.body or None, allow_redirects=False, skip_auto_headers=skipped
        )

    async def _answer(self, reply: Reply, upstream: aiohttp.ClientResponse, trip: _Trip) -> web.StreamResponse:
        """Nothing of an answer goes to the client before the first bytes of its body are there: until then another server can answer."""
        chunk = await upstream.content.readany()
        trip.first_byte()
        if await reply.hush() and not (upstream.status == 200 and is_event_stream(upstream)):
            trip.complete = upstream.status < 500
            return await reply.fail(chunk + await upstream.content.read())
        other = _in_our_shape(reply.request.path, upstream, chunk)
        try:
            if other is not None or (chunk and reply.begun is None and upstream.content.at_eof()):
                body = chunk if other is None else other
                trip.meter.feed(body)
                response = await reply.send_whole(upstream, body)
            else:
                response = await self._pass_on(reply, upstream, trip, chunk)
        except ConnectionError as error:  # of the client: aiohttp says so from write()
            raise ClientGone from error
        trip.complete = not trip.broke
        return response

    async def _pass_on(self, reply: Reply, upstream: aiohttp.ClientResponse, trip: _Trip, chunk: bytes) -> web.StreamResponse:
        response = await reply.begin(upstream)
        passage = await passage_of(upstream, reply.request, response, trip.meter) if is_event_stream(upstream) else None
        passed_bytes = 0
        while chunk:
            trip.meter.feed(chunk)
            await response.write(chunk)
            passed_bytes += len(chunk)
            if passage is not None and passage.is_free(passed_bytes):
                await self._forwarders.carry(passage)
            chunk = await self._next(upstream, reply, trip)
        await response.write_eof()
        return response

    async def _next(self, upstream: aiohttp.ClientResponse, reply: Reply, trip: _Trip) -> bytes:
        try:
            return await upstream.content.readany()
        except _LOST as error:
            trip.broke = True
            _log.warning("%s was lost in the middle of an answer: %s", upstream.url.origin(), error or type(error).__name__)
            await reply.break_off(upstream)
            return b""


def _in_our_shape(path: str, upstream: aiohttp.ClientResponse, body: bytes) -> bytes | None:
    """See `reshaped`; where the client asked for the server itself, it gets what that says."""
    is_whole = upstream.content_length == len(body) and "Content-Encoding" not in upstream.headers
    return reshaped(upstream.status, body, path) if is_whole and upstream.status >= 400 and not path.startswith("/upstream/") else None


def dropped(request: web.Request) -> frozenset[str]:
    """Names of headers that end here: those of the connection, and what the connection says to be its own."""
    named = request.headers.get("Connection", "")
    return _NOT_FORWARDED | {name.strip().lower() for name in named.split(",")}


class _Trip:
    """What is measured of one request, and told to the traffic monitor once."""

    def __init__(self, owner: Owner, call: Call, trace: RequestTrace) -> None:
        self._owner = owner
        self.trace = trace
        self._traffic = owner.traffic[call.model]
        self._call = call
        self.start_s = owner.now_s
        self._ttft_s: float | None = None
        self.meter = Meter()
        self.replica: Replica | None = None
        self.status: int | None = None
        self.waits = True
        self.complete = False
        self.broke = False
        self._traffic.asked(self.start_s, len(owner.fleet.models[call.model].waiting))

    def first_byte(self) -> None:
        self._ttft_s = self._owner.now_s - self.start_s

    def facts(self) -> dict[str, Any]:
        phase = "answering" if self._ttft_s is not None else "waiting" if self.waits else "sent"
        return {
            "model": self._call.model,
            "path": self._call.path_and_query.partition("?")[0],
            "phase": phase,
            "for_s": round(self._owner.now_s - self.start_s, 3),
        }

    def end(self, ok: bool, refused: bool = False) -> None:
        now_s = self._owner.now_s
        finished = Finished(ok, now_s - self.start_s, self._ttft_s, *self.meter.tokens())
        self.trace.end(finished, self.status, refused)
        if refused:
            self._traffic.refused(now_s)
        else:
            self._traffic.finished(finished, now_s)
