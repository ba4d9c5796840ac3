# SPDX-License-Identifier: Apache-2.0
"""The end of a gateway that hands over: what becomes of requests and models that take too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from aiohttp import web
from gateway_stage import WAIT_S, error_of, play, stage, until

from kvcached.controller.config import parse_config
from kvcached.controller.handover import Door
from kvcached.controller.intake import Intake
from kvcached.controller.serve import serve
from kvcached.controller.states import State
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvcached.controller.config import ServeConfig

WHOLE = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"


@contextlib.asynccontextmanager
async def open_door(gate: asyncio.Event | None = None) -> AsyncIterator[Door]:
    """Says what it was told, after `gate`."""
    with contextlib.closing(await Door.at("127.0.0.1", 0)) as door:
        async with opened(door, gate):
            yield door


@contextlib.asynccontextmanager
async def opened(door: Door, gate: asyncio.Event | None = None) -> AsyncIterator[None]:

    async def echo(request: web.Request) -> web.Response:
        if gate is not None:
            await gate.wait()
        return web.Response(body=await request.read())

    app = web.Application()
    app.add_routes([web.post("/", echo)])
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await door.open(runner, Intake(WAIT_S))
    yield
    door.close()
    await runner.cleanup()


def connected(door: Door, sent: bytes) -> socket.socket:
    """The kernel has it all, and the loop does not know yet."""
    client = socket.create_connection(("127.0.0.1", door.port))
    client.sendall(sent)
    client.setblocking(False)
    return client


async def everything_from(client: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(sock=client)
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("turns", range(8))
def test_what_was_sent_before_the_end_is_answered_however_far_the_loop_has_got(turns: int) -> None:
    async def scene() -> None:
        async with open_door() as door:
            client = connected(door, WHOLE)
            for _ in range(turns):
                await asyncio.sleep(0)
            emptied = await door.shut()
            answer = await everything_from(client)
            assert (answer[:15], answer[-5:]) == (b"HTTP/1.1 200 OK", b"hello")
            await emptied

    play(scene)


def test_a_body_that_still_comes_is_taken_and_who_says_nothing_is_not_waited_for() -> None:
    async def scene() -> None:
        async with open_door() as door:
            silent, half = connected(door, b""), connected(door, WHOLE[:-2])
            emptied = await door.shut()
            assert await everything_from(silent) == b""
            assert not emptied.done()
            half.sendall(WHOLE[-2:])
            assert (await everything_from(half)).endswith(b"\r\n\r\nhello")
            await emptied

    play(scene)


def test_a_request_that_is_on_its_way_at_the_end_is_answered() -> None:
    async def scene() -> None:
        async with open_door() as door:
            client = connected(door, b"")
            for _ in range(8):
                await asyncio.sleep(0)
            emptied = await door.shut()
            client.sendall(WHOLE)
            assert (await everything_from(client)).endswith(b"hello")
            await emptied

    play(scene)


def test_it_is_not_empty_before_the_last_answer_and_no_connection_serves_on() -> None:
    async def scene() -> None:
        gate = asyncio.Event()
        async with open_door(gate) as door:
            client = connected(door, WHOLE)
            emptied = await door.shut()
            done, _ = await asyncio.wait({emptied}, timeout=0.5)
            assert not done
            gate.set()
            answer = await everything_from(client)
            assert answer.endswith(b"hello")
            assert b"\r\nConnection: close\r\n" in answer
            await emptied
            assert await door.shut() is emptied

    play(scene)


def test_a_change_is_heard_before_it_is_ready_and_taken_then(tmp_path: Path) -> None:
    async def scene() -> None:
        config = parse_config(
            json.dumps(
                {
                    "listen": "127.0.0.1:0",
                    "log_dir": str(tmp_path),
                    "models": {"chat": {"engine": "remote", "address": "http://127.0.0.1:9"}},
                }
            )
        )
        said: list[str] = []

        def read_again() -> ServeConfig:
            said.append("read")
            return config

        serving = asyncio.create_task(serve(config, {}, said.append, read_again))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(said) == 2)
        assert said[0] == "read"
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(said) == 3)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

    play(scene)


def test_requests_without_an_answer_are_told_to_come_again_after_the_grace() -> None:
    async def scene() -> None:
        async with stage({"concurrency": 1}) as it:
            it.upstream.gate.clear()
            asking = [asyncio.create_task(it.post()) for _ in range(2)]
            await until(lambda: bool(it.owner.fleet.models["chat"].open and it.owner.fleet.models["chat"].waiting))
            await it.upstream.arrived.wait()
            await it.owner.hand_over(lambda: False)
            for status, body, headers in await asyncio.gather(*asking):
                assert (status, error_of(body)["code"], headers["Retry-After"]) == (503, "shutting_down", "5")
            await until(lambda: not it.owner.fleet.models)

    play(scene)


def test_a_stream_that_has_begun_ends_with_an_error_after_the_grace() -> None:
    async def scene() -> None:
        async with stage() as it:
            begun = asyncio.Event()

            async def endless(request: web.Request) -> web.StreamResponse:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(b"data: {}\n\n")
                begun.set()
                await asyncio.Event().wait()
                return response

            it.upstream.script.append(endless)
            asking = asyncio.create_task(it.post(body={"model": "chat", "stream": True}))
            await begun.wait()
            await it.owner.hand_over(lambda: False)
            status, body, _ = await asking
            assert (status, b"shutting_down" in body, b"[DONE]" in body) == (200, True, False)

    play(scene)


def test_a_model_that_goes_to_sleep_is_left_when_it_is_asleep() -> None:
    async def scene() -> None:
        async with stage({"sleep": "host"}, grace_s=WAIT_S) as it:
            assert (await it.post())[0] == 200
            it.upstream.wake_gate.clear()
            it.owner.sleep("chat", hurry=False)
            await until(lambda: it.state() is State.GOING_TO_SLEEP)
            handing = asyncio.create_task(it.owner.hand_over(lambda: True))
            await asyncio.sleep(0)
            assert it.state() is State.GOING_TO_SLEEP
            it.upstream.wake_gate.set()
            await handing
            assert it.owner.fleet.models == {}
            assert [what for _, what, _ in it.owner.operations] == ["start", "sleep"], "nothing is ended"

    play(scene)


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"], ids=["taken", "not of this machine"])
def test_an_address_that_cannot_be_had_says_what_to_do(host: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(SettingError, match=rf"^listen: .*{re.escape(host)}.*; end what listens there, or name another address$"),
    ):
        asyncio.run(Door.at(host, other.getsockname()[1]))


def test_of_two_that_start_at_once_the_second_is_told_before_it_touches_anything() -> None:
    async def scene() -> None:
        with contextlib.closing(await Door.at("127.0.0.1", 0)) as first:
            port = first.port
            with pytest.raises(SettingError, match=r"^listen: "):
                await Door.at("127.0.0.1", port)
        with contextlib.closing(await Door.at("127.0.0.1", port)) as third:
            assert third.port == port

    play(scene)


def test_who_comes_before_the_gateway_is_ready_is_answered_then() -> None:
    async def scene() -> None:
        with contextlib.closing(await Door.at("127.0.0.1", 0)) as door:
            early = connected(door, WHOLE)
            async with opened(door):
                answering = asyncio.create_task(everything_from(early))
                await until(lambda: bool(door._connections))
                emptied = await door.shut()
                assert (await answering).endswith(b"hello")
                await emptied

    play(scene)
