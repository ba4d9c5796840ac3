# SPDX-License-Identifier: Apache-2.0
"""Streams that go the short way, in the gateway's process and in another: real connections, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web
from gateway_stage import PIECES, WAIT_S, play, stage, until
from yarl import URL

from kvcached.controller import forwarding
from kvcached.controller.forwarding import Forwarder
from kvcached.controller.reply import Reply
from kvcached.controller.states import State
from kvcached.controller.tap import Passage, Tap
from kvcached.testing.stopping import stop_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from gateway_stage import Stage

STREAM = {"model": "chat", "stream": True}
EVENTS = {"Content-Type": "text/event-stream"}
both = pytest.mark.parametrize("processes", [1, 2])


class Paced:
    """A server's stream whose pieces after the first wait until the test lets them."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.go = asyncio.Event()
        self.sent = 0
        self.ended = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        try:
            for number, piece in enumerate(self.pieces):
                if number:
                    await self.go.wait()
                await response.write(piece)
                self.sent += len(piece)
        finally:
            self.ended.set()
        return response


async def begun(it: Stage, script: Callable[[web.Request], Awaitable[web.StreamResponse]], first: bytes) -> aiohttp.ClientResponse:
    """A stream that has gone its short way, after its first piece."""
    await until(lambda: all(process.pid for process in it.forwarders.processes))
    it.upstream.script.append(script)
    response = await it.client.post(it.url + "/v1/chat/completions", json=STREAM)
    assert await response.content.readexactly(len(first)) == first
    await until(lambda: all(process.open for process in it.forwarders.processes))
    return response


def top(processes: int, **more: Any) -> dict[str, Any]:
    return {"processes": processes, **more}


@both
def test_byte_for_byte_and_counted(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = []
    carry = Passage.carry

    async def watched(passage: Passage) -> None:
        carried.append(passage)
        await carry(passage)

    monkeypatch.setattr(Passage, "carry", watched)

    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            for _ in range(2):
                paced = Paced(PIECES)
                response = await begun(it, paced, PIECES[0])
                paced.go.set()
                assert await response.read() == b"".join(PIECES[1:])
            await until(lambda: it.owner.traffic["chat"].total.finished == 2)
            total = it.owner.traffic["chat"].total
            assert (total.errors, total.tokens_in, total.tokens_out) == (0, 14, 4)
            assert len(carried) == (2 if processes == 1 else 0)
            connections = {peer for peer in it.upstream.peers if peer}
            assert len(connections) == 1, "the server's connection was not used again"

    play(scene)


@both
def test_what_comes_while_the_first_piece_is_written_is_not_overtaken(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Reply.begin

    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            beginning, second, third = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def begin_late(reply: Reply, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
                beginning.set()
                await second.wait()
                await asyncio.sleep(0.1)
                return await begin(reply, upstream)

            async def three(request: web.Request) -> web.StreamResponse:
                response = web.StreamResponse(headers=EVENTS)
                await response.prepare(request)
                for piece, wait in zip(PIECES, (beginning, third, third), strict=False):
                    await response.write(piece)
                    if wait is third:
                        second.set()
                    await wait.wait()
                return response

            monkeypatch.setattr(Reply, "begin", begin_late)
            response = await begun(it, three, PIECES[0])
            third.set()
            assert await response.read() == b"".join(PIECES[1:3])

    play(scene)


@both
def test_a_first_read_that_is_half_of_a_chunk(processes: int) -> None:
    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            go = asyncio.Event()

            async def halves(request: web.Request) -> web.StreamResponse:
                response = web.StreamResponse(headers=EVENTS)
                await response.prepare(request)
                assert request.transport is not None
                request.transport.write(b"a\r\ndata:")
                await go.wait()
                request.transport.write(b" {}\n\n\r\n")
                await asyncio.sleep(0.1)  # so that what follows can go the short way
                await response.write(b"data: [DONE]\n\n")
                return response

            it.upstream.script.append(halves)
            response = await it.client.post(it.url + "/v1/chat/completions", json=STREAM)
            assert await response.content.readexactly(5) == b"data:"
            go.set()
            assert await response.read() == b" {}\n\ndata: [DONE]\n\n"
            await until(lambda: it.owner.traffic["chat"].total.finished == 1)
            assert it.owner.traffic["chat"].total.errors == 0

    play(scene)


@both
def test_a_large_event_in_many_reads(processes: int) -> None:
    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            paced = Paced([b"data: {}\n\n", b"data: {" + b"x" * 3_000_000 + b"}\n\n", b"data: [DONE]\n\n"])
            response = await begun(it, paced, paced.pieces[0])
            paced.go.set()
            assert await response.read() == b"".join(paced.pieces[1:])

    play(scene)


@both
def test_a_client_that_leaves_ends_it_at_the_server(processes: int) -> None:
    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            response = await begun(it, Paced(PIECES), PIECES[0])
            response.close()
            await it.upstream.hung_up.wait()
            await until(lambda: not it.owner.fleet.models["chat"].busy)
            assert not any(process.open for process in it.forwarders.processes)
            assert it.owner.traffic["chat"].total.errors == 1

    play(scene)


@pytest.mark.parametrize("garbage", [b"", b"this is no chunk\r\n"])
@both
def test_a_server_that_is_lost_is_told_as_an_event(processes: int, garbage: bytes) -> None:
    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            go = asyncio.Event()

            async def lost(request: web.Request) -> web.StreamResponse:
                response = web.StreamResponse(headers=EVENTS)
                await response.prepare(request)
                await response.write(PIECES[0])
                await go.wait()
                assert request.transport is not None
                if garbage:
                    request.transport.write(garbage)
                    await asyncio.Event().wait()
                request.transport.close()
                return response

            response = await begun(it, lost, PIECES[0])
            go.set()
            said = await response.read()
            assert said.startswith(b"data: {") or said.startswith(b"\n\ndata: {")
            assert b"upstream_lost" in said
            await until(lambda: not it.owner.fleet.models["chat"].busy)

    play(scene)


@both
def test_it_is_activity_and_an_action_in_a_hurry_ends_it_with_an_event(processes: int) -> None:
    async def scene() -> None:
        async with stage({"sleep": "host"}, top(processes)) as it:
            response = await begun(it, Paced([b"data: {}\n\n", b""]), b"data: {}\n\n")
            async with it.client.post(it.url + "/action/sleep/chat?wait_s=0.05"):
                assert it.state() is State.DRAINING
                assert it.owner.traffic["chat"].idle_s(it.owner.now_s) == 0
            async with it.client.post(it.url + "/action/sleep/chat?mode=abort&wait_s=50") as slept:
                assert slept.status == 200
            assert b"model_put_to_sleep" in await response.read()
            assert it.state() is State.ASLEEP

    play(scene)


@both
def test_a_client_that_does_not_read_holds_the_server_back(processes: int) -> None:
    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            many = 3000
            paced = Paced([b"data: {}\n\n", *[b"data: {" + b"%05d" % number + b"x" * 32_000 + b"}\n\n" for number in range(many)]])
            response = await begun(it, paced, paced.pieces[0])
            paced.go.set()
            sent = -1
            while sent != paced.sent:  # until nothing moves any more
                sent = paced.sent
                await asyncio.sleep(0.5)
            assert sent < many * 32_000 / 2
            assert await response.read() == b"".join(paced.pieces[1:])
            assert (await it.post())[0] == 200, "the server's connection was left as it was"

    play(scene)


def test_a_process_that_is_killed_ends_its_streams_and_is_started_again() -> None:
    async def scene() -> None:
        async with stage(top=top(2)) as it:
            response = await begun(it, Paced(PIECES), PIECES[0])
            pid = it.forwarders.processes[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                await response.read()
            await it.upstream.hung_up.wait()
            await until(lambda: not it.owner.fleet.models["chat"].busy)
            assert it.owner.traffic["chat"].total.errors == 1
            await until(lambda: it.forwarders.processes[0].pid not in (None, pid))
            paced = Paced(PIECES)
            response = await begun(it, paced, PIECES[0])
            paced.go.set()
            assert await response.read() == b"".join(PIECES[1:])

    play(scene)


def test_a_request_that_is_sent_during_a_stream_is_answered_after_it() -> None:
    async def scene() -> None:
        async with stage(top=top(2)) as it:
            await until(lambda: all(process.pid for process in it.forwarders.processes))
            lent, asked = asyncio.Event(), asyncio.Event()

            async def three(request: web.Request) -> web.StreamResponse:
                response = web.StreamResponse(headers=EVENTS)
                await response.prepare(request)
                for wait in (lent, asked):
                    await response.write(b"data: {}\n\n")
                    await wait.wait()
                await response.write(b"data: [DONE]\n\n")
                return response

            it.upstream.script.append(three)
            url, body = URL(it.url), json.dumps(STREAM).encode()
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await reader.readuntil(b"data: {}\n\n")
            await until(lambda: all(process.open for process in it.forwarders.processes))
            lent.set()
            await reader.readuntil(b"data: {}\n\n")  # the other process carries it
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            time.sleep(0.2)  # not asyncio's: only the other process could read it now
            asked.set()
            said = await reader.read()
            assert b"data: [DONE]" in said
            assert b"HTTP/1.1 200 OK" in said, "the second request was lost"
            writer.close()
            await writer.wait_closed()

    play(scene)


MANY = 300  # messages, which are more than a socket has room for


class Lent:
    """Streams that a process has, and their far ends."""

    def __init__(self) -> None:
        self.servers: list[socket.socket] = []
        self.clients: list[socket.socket] = []
        self.tickets: list[int] = []
        self.ended: list[asyncio.Future[Any]] = []

    async def add(self, forwarder: Forwarder) -> None:
        (far_server, server), (far_client, client) = socket.socketpair(), socket.socketpair()
        with server, client:
            while (lent := forwarder.lend(server.fileno(), client.fileno())) is None:
                await asyncio.sleep(0.005)
        self.servers.append(far_server)
        self.clients.append(far_client)
        self.tickets.append(lent[0])
        self.ended.append(lent[1])

    def hear_ends(self, count: int) -> None:
        """Of the first ones. Without the event loop: nobody reads what the process says to its owner."""
        for client in self.clients[:count]:
            client.settimeout(WAIT_S)
            while client.recv(4096):
                pass


@contextlib.asynccontextmanager
async def running(forwarder: Forwarder) -> AsyncIterator[int]:
    task = asyncio.get_running_loop().create_task(forwarder.run())
    try:
        await until(lambda: forwarder.pid is not None)
        assert forwarder.pid is not None
        yield forwarder.pid
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def many_lent(forwarder: Forwarder) -> AsyncIterator[Lent]:
    lent = Lent()
    try:
        for _ in range(MANY):
            await lent.add(forwarder)
        yield lent
    finally:
        for end in lent.servers + lent.clients:
            end.close()


def test_streams_that_end_at_once_are_all_told() -> None:
    async def scene() -> None:
        forwarder = Forwarder()
        async with running(forwarder) as pid, many_lent(forwarder) as lent:
            for server in lent.servers:
                server.send(b"a\r\ndata: {}\n\n\r\n0\r\n\r\n")
            lent.hear_ends(MANY)
            assert {(await ended).how for ended in lent.ended} == {"whole"}
            assert forwarder.pid == pid

    play(scene)


def test_what_a_process_said_before_it_ended_counts() -> None:
    async def scene() -> None:
        forwarder = Forwarder()
        async with running(forwarder) as pid, many_lent(forwarder) as lent:
            for server in lent.servers[:200]:
                server.send(b"a\r\ndata: {}\n\n\r\n0\r\n\r\n")
            lent.hear_ends(200)
            os.kill(pid, signal.SIGKILL)
            assert [(await ended).how for ended in lent.ended] == ["whole"] * 200 + ["gone"] * (MANY - 200)

    play(scene)


def test_it_can_be_stopped_while_a_process_ends() -> None:
    async def scene() -> None:
        forwarder, lent = Forwarder(), Lent()
        async with running(forwarder) as pid:
            await lent.add(forwarder)
            os.kill(pid, signal.SIGKILL)
            assert (await lent.ended[0]).how == "gone"
        for end in lent.servers + lent.clients:
            end.close()

    play(scene)


def test_streams_that_are_asked_back_at_once_all_come() -> None:
    async def scene() -> None:
        forwarder = Forwarder()
        async with running(forwarder) as pid, many_lent(forwarder) as lent:
            stop_process(pid)
            for ticket in lent.tickets:
                forwarder.ask_back(ticket)
            os.kill(pid, signal.SIGCONT)
            assert {((await ended).how, ended.result().is_clean) for ended in lent.ended} == {("left", True)}

    play(scene)


@contextlib.contextmanager
def files_left(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = [os.dup(0) for _ in range(count + 1)]
    for number in lowest:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 2])  # none for its socket, or none for what starts it
def test_a_process_that_cannot_be_started_is_tried_again(count: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        gc.collect()  # what earlier tests have left is not closed in between
        forwarder = Forwarder()
        task = asyncio.get_running_loop().create_task(forwarder.run())
        before = len(os.listdir("/proc/self/fd"))
        with files_left(count):
            await until(lambda: len(caplog.records) == 2 or task.done())
        assert not task.done()
        assert len(os.listdir("/proc/self/fd")) == before
        assert "Too many open files" in caplog.text
        await until(lambda: forwarder.pid is not None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scene)


@pytest.mark.parametrize(("healthy_s", "pauses"), [(0.0, ["0.1 s", "0.1 s"]), (600.0, ["0.1 s", "0.2 s"])])
def test_the_pause_grows_only_while_runs_are_short(
    healthy_s: float, pauses: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "_HEALTHY_S", healthy_s)

    async def scene() -> None:
        forwarder = Forwarder()
        async with running(forwarder):
            for _ in pauses:
                await until(lambda: forwarder.pid is not None)
                assert forwarder.pid is not None
                os.kill(forwarder.pid, signal.SIGKILL)
                await until(lambda: forwarder.pid is None)
            await until(lambda: len(caplog.records) == len(pauses))

    play(scene)
    assert [record.getMessage().rpartition(" in ")[2] for record in caplog.records] == pauses


class Heard(asyncio.Protocol):
    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


def test_a_head_without_an_end_is_not_kept() -> None:
    heard = Heard()
    tap = Tap(heard, asyncio.Transport())
    body = [b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n", *[b"x" * 30_000] * 3, b"\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n"]
    tap.expect()
    for piece in body:
        tap.data_received(piece)
    assert tap.chunks is None, "a body was looked at as if it were a head"
    assert heard.data == b"".join(body)
    tap.expect()
    tap.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    assert tap.chunks is not None
    assert tap.chunks.payload_bytes == 3


def test_whatever_its_client_says_to_the_loss_of_a_server_the_stream_ends() -> None:
    class Deaf(Heard):
        def connection_lost(self, error: Exception | None) -> None:
            raise RuntimeError("by the test")

    ended: list[bool] = []
    tap = Tap(Deaf(), asyncio.Transport())
    tap.expect()
    tap.divert(lambda _: None, lambda: ended.append(True))
    with pytest.raises(RuntimeError):
        tap.connection_lost(None)
    assert ended == [True]
