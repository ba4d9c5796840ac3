# SPDX-License-Identifier: Apache-2.0
"""A gateway and real HTTP servers that do what a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web
from yarl import URL

from kvcached.controller.access import Access
from kvcached.controller.build import build_backends, card_bytes, specs_of
from kvcached.controller.config import parse_config
from kvcached.controller.forwarding import Forwarders
from kvcached.controller.gateway import Gateway
from kvcached.controller.handover import Door
from kvcached.controller.owner import Owner
from kvcached.controller.tap import TappedConnector
from kvcached.controller.traces import traces_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kvcached.controller.states import State

WAIT_S = 60.0
PIECES = [
    b'data: {"choices": [{"text": "\xc3',
    b'\xa9"}]}\n\n',
    b"data: {}\r\n\r\n",
    b'data: {"usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n',
    b"data: [DONE]\n\n",
]


class Upstream:
    """A model's server. `gate` holds back answers; `script` replaces the next ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list[bytes] = []
        self.peers: list[object] = []
        self.headers: list[dict[str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.wake_gate = asyncio.Event()
        self.wake_gate.set()
        self.arrived = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.script: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = []
        self.healthy = True
        self.address = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.post("/sleep", self._control), web.post("/wake_up", self._control)])
        app.add_routes([web.route("*", "/{path:.*}", self._answer)])
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append(str(request.rel_url))
        await self.wake_gate.wait()
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.raw_path)
        self.headers.append(dict(request.headers))
        self.peers.append(request.transport and request.transport.get_extra_info("peername"))
        body = await request.read()
        self.bodies.append(body)
        self.arrived.set()
        try:
            await self.gate.wait()
            if self.script:
                return await self.script.pop(0)(request)
            return await self._usual(request, body)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise

    async def _usual(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if b'"stream"' not in body:
            return web.json_response(
                {"path": request.raw_path, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, headers={"X-From": "upstream"}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in PIECES:
            await response.write(piece)
            await asyncio.sleep(0)
        return response


@contextlib.asynccontextmanager
async def listening(app: web.Application, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def behind_a_door(gateway: Gateway) -> AsyncIterator[Door]:
    """As `serve` does it; at the end whatever is open is broken off."""
    runner = gateway.runner()
    with contextlib.closing(await Door.at("127.0.0.1", 0)) as door:
        try:
            await door.open(runner, gateway.intake)
            yield door
        finally:
            for connection in runner.server.connections if runner.server else ():
                connection.force_close()
            await runner.cleanup()


class Stage:
    """A gateway with one remote model `chat` (alias `gpt`) and what the test adds."""

    def __init__(self, upstream: Upstream, owner: Owner, door: Door, client: aiohttp.ClientSession, forwarders: Forwarders) -> None:
        self.upstream = upstream
        self.forwarders = forwarders
        self.owner = owner
        self.door = door
        self.url = f"http://127.0.0.1:{door.port}"
        self.client = client

    async def post(self, path: str = "/v1/chat/completions", body: object = None, **more: Any) -> tuple[int, bytes, dict[str, str]]:
        given = {"model": "chat"} if body is None else body
        async with self.client.post(
            URL(self.url + path, encoded=True), data=given if isinstance(given, bytes) else json.dumps(given), **more
        ) as response:
            return response.status, await response.read(), dict(response.headers)

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        async with self.client.get(self.url + path, **more) as response:
            return response.status, await response.json()

    def state(self, name: str = "chat") -> State:
        return self.owner.fleet.models[name].state


@contextlib.asynccontextmanager
async def stage(
    more: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
    addresses: list[str] | None = None,
    grace_s: float = 0.2,
) -> AsyncIterator[Stage]:
    upstream = Upstream()
    async with contextlib.AsyncExitStack() as stack:
        upstream.address = await stack.enter_async_context(listening(upstream.app()))
        chat = {"engine": "remote", "address": addresses or upstream.address, "aliases": ["gpt"], **(more or {})}
        given = dict(top or {})
        models = {
            "chat": chat,
            **{name: {"engine": "remote", "address": upstream.address, **rest} for name, rest in given.pop("models", {}).items()},
        }
        config = parse_config(json.dumps({**given, "models": models}))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=TappedConnector(), auto_decompress=False))
        environ = {"UPSTREAM_KEY": "their-key"}
        owner = Owner(specs_of(config), build_backends(config, environ, session), card_bytes(config), hold_s=0.0, grace_s=grace_s)
        await stack.enter_async_context(owner)
        traces = traces_to(config.traces)
        stack.push_async_callback(asyncio.to_thread, traces.close)
        forwarders = await stack.enter_async_context(Forwarders(config.processes - 1))
        gateway = Gateway(config, Access(config, environ), owner, session, traces, forwarders)
        door = await stack.enter_async_context(behind_a_door(gateway))
        client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield Stage(upstream, owner, door, client, forwarders)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        await asyncio.wait_for(scene(), WAIT_S)

    asyncio.run(in_time())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def cut_after(first: bytes, headers: dict[str, str]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        if first:
            await response.write(first)
            await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    return cut


async def cut_at_once(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()
