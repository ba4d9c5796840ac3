# SPDX-License-Identifier: Apache-2.0
"""Clients that send a part of a request and wait: they are told so, and hold nothing up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

import pytest
from gateway_stage import error_of, play, stage, until

from kvcached.controller import intake

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway_stage import Stage

SOON = {"request_timeout_s": 0.2}
LATER_S = 0.6
"""Long after that, so that what had to be given up was."""
BODY = json.dumps({"model": "chat"}).encode()
WHOLE = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
)
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes, bytes]:
        """Status, head and body."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        size = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return int(head.split()[1]), head, await self._reader.readexactly(size)

    async def rest(self) -> bytes:
        """All until the gateway closes."""
        return await self._reader.read()


@contextlib.asynccontextmanager
async def connected(it: Stage, sent: bytes = b"") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", it.door.port)
    try:
        client = Client(reader, writer)
        await client.send(sent)
        yield client
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("path", [b"/v1/completions", b"/upstream/chat/any"])
def test_a_body_that_does_not_come_is_answered_with_408_and_asks_nobody(path: bytes) -> None:
    async def scene() -> None:
        async with stage(top=SOON) as it, connected(it, WHOLE.replace(b"/v1/completions", path)[:-3]) as client:
            status, head, body = await client.answer()
            assert (status, error_of(body)["code"]) == (408, "request_timeout")
            assert "0.2 s" in error_of(body)["message"]
            assert b"\r\nConnection: close\r\n" in head
            assert it.upstream.calls == []
            assert (await it.post())[0] == 200

    play(scene)


def test_a_body_that_comes_is_waited_for() -> None:
    async def scene() -> None:
        big = json.dumps({"model": "chat", "prompt": "x" * (1 << 19)}).encode()
        async with stage(top=SOON) as it, connected(it, WHOLE.replace(b": %d" % len(BODY), b": %d" % len(big))[: -len(BODY)]) as client:
            await client.send(big[:-5])
            await asyncio.sleep(LATER_S)
            await client.send(big[-5:])
            assert (await client.answer())[0] == 200
            assert it.upstream.bodies == [big]

    play(scene)


@pytest.mark.parametrize("before", [b"", GET])
def test_a_head_that_does_not_end_is_answered_with_408(before: bytes) -> None:
    async def scene() -> None:
        async with stage(top=SOON) as it, connected(it, before) as client:
            if before:
                assert (await client.answer())[0] == 200
            await client.send(WHOLE[:30])
            status, _, body = await client.answer()
            assert (status, error_of(body)["code"]) == (408, "request_timeout")
            assert await client.rest() == b""

    play(scene)


def test_a_byte_now_and_then_gives_a_head_no_more_time() -> None:
    async def scene() -> None:
        async with stage(top=SOON) as it, connected(it, b"GET / HTTP/1.1\r\nX: ") as client:

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        await client.send(b"x")
                        await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            assert (await client.answer())[0] == 408
            dripping.cancel()

    play(scene)


def test_who_connects_and_says_nothing_is_left_without_a_word() -> None:
    async def scene() -> None:
        async with stage(top=SOON) as it, connected(it) as client:
            assert await client.rest() == b""

    play(scene)


def test_a_connection_is_kept_between_requests_and_while_one_is_worked_on() -> None:
    async def scene() -> None:
        async with stage(top=SOON) as it, connected(it, GET) as client:
            assert (await client.answer())[0] == 200
            await asyncio.sleep(LATER_S)
            it.upstream.gate.clear()
            await client.send(WHOLE)
            await it.upstream.arrived.wait()
            await asyncio.sleep(LATER_S)
            it.upstream.gate.set()
            assert (await client.answer())[0] == 200

    play(scene)


@pytest.mark.parametrize(
    ("field", "body", "expected"), [(b"Content-Encoding: gzip", b"?" * 30, 400), (b"Transfer-Encoding: chunked", b"?\r\n", 408)]
)
def test_a_body_that_is_none_is_the_clients_mistake(field: bytes, body: bytes, expected: int) -> None:
    """After chunks that are none nothing can be read any more, so that the rest does not come."""

    async def scene() -> None:
        head = WHOLE[: -len(BODY)].replace(b"Content-Length: %d" % len(BODY), field)
        length = b"" if expected == 408 else b"Content-Length: 30\r\n\r\n"
        async with stage(top=SOON) as it, connected(it, head[:-2] + length if length else head) as client:
            await asyncio.sleep(0.1)  # the head is heard alone
            await client.send(body)
            status, _, said = await client.answer()
            assert (status, error_of(said)["type"]) == (expected, "invalid_request_error")

    play(scene)


def test_what_is_no_request_is_told_in_the_apis_shape() -> None:
    async def scene() -> None:
        async with stage() as it, connected(it, b"this is no request\r\n\r\n") as client:
            status, _, body = await client.answer()
            assert (status, error_of(body)["code"]) == (400, "bad_request")

    play(scene)


def test_the_end_is_not_held_up_by_bodies_that_do_not_come_nor_by_those_that_nobody_reads() -> None:
    async def scene() -> None:
        async with stage(top={"request_timeout_s": 600}) as it:
            unread = WHOLE.replace(b"/v1/completions", b"/nowhere")[:-3]
            async with connected(it, WHOLE[:-3]) as half, connected(it, unread) as refused, connected(it, WHOLE[:30]) as headless:
                assert (await refused.answer())[0] == 404
                for connection in it.door._connections:
                    connection._lingering_time = 600.0
                emptied = await it.door.shut()
                status, head, body = await half.answer()
                assert (status, error_of(body)["code"]) == (503, "shutting_down")
                assert b"\r\nRetry-After: 5\r\n" in head
                await emptied
                assert [await client.rest() for client in (half, refused, headless)] == [b""] * 3

    play(scene)


def test_a_body_of_which_the_rest_is_on_its_way_at_the_end_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_LAST_S", 60.0)

    async def scene() -> None:
        async with stage() as it, connected(it, WHOLE[:-3]) as client:
            await until(lambda: any(not connection.is_idle for connection in it.door._connections))
            emptied = await it.door.shut()
            await client.send(WHOLE[-3:])
            assert (await client.answer())[0] == 200
            await emptied

    play(scene)
