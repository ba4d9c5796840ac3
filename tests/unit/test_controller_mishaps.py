# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in the gateway itself while it carries an answer: the client sees an end, the place is free, and the log says why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from gateway_stage import PIECES, play, stage, until
from test_controller_forwarding import STREAM, Lent, Paced, both, running, top

from kvcached.controller.forwarder import carry_all
from kvcached.controller.forwarding import Forwarder
from kvcached.controller.reply import Reply
from kvcached.controller.tap import Passage
from kvcached.controller.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def no_stream_of_bytes() -> Iterator[tuple[int, int]]:
    """Two descriptors that nothing can be carried between: datagrams."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with one, other:
        yield one.fileno(), other.fileno()


@pytest.mark.parametrize("wrong", ["server", "client", "both", "no socket"])
def test_what_cannot_be_carried_is_told_and_costs_no_other_stream(wrong: str) -> None:
    async def scene() -> None:
        forwarder, lent = Forwarder(), Lent()
        async with running(forwarder) as pid:
            await lent.add(forwarder)
            lent.servers[0].send(b"a\r\ndata: {}\n\n\r\n")
            lent.clients[0].setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(lent.clients[0], 4096)  # it carries that one
            before = len(os.listdir(f"/proc/{pid}/fd"))
            far, near = socket.socketpair()
            with far, near, no_stream_of_bytes() as (one, other), open(os.devnull, "rb") as file:
                given = {"server": (one, near.fileno()), "client": (near.fileno(), one), "both": (one, other)}
                answer = forwarder.lend(*given.get(wrong, (file.fileno(), near.fileno())))
                assert answer is not None
                ended = await answer[1]
            assert (ended.how, ended.is_clean) == ("lost", True)
            assert ended.mishap.startswith("OSError" if wrong == "no socket" else "ValueError: A Stream Socket was expected")
            await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) == before)
            lent.servers[0].send(b"0\r\n\r\n")
            assert (await lent.ended[0]).how == "whole"
        for end in lent.servers + lent.clients:
            end.close()

    play(scene)


def test_a_stream_that_could_not_be_carried_ends_with_an_error_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with stage(top=top(2)) as it:
            await until(lambda: all(process.pid for process in it.forwarders.processes))
            with no_stream_of_bytes() as pair:
                monkeypatch.setattr(Passage, "descriptors", lambda _: pair)
                it.upstream.script.append(Paced(PIECES))
                said = (await it.post(body=STREAM))[1]
            assert said.startswith(PIECES[0])
            assert b"upstream_lost" in said
            await it.upstream.hung_up.wait()
            await until(lambda: not it.owner.fleet.models["chat"].busy)
            assert it.owner.traffic["chat"].total.errors == 1

    play(scene)
    assert "A Stream Socket was expected" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_went_wrong_with_no_one_knows_which_stream_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            carrying = asyncio.create_task(carry_all(theirs))
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(lambda: [][0])
            await carrying

    play(scene)
    assert "IndexError" in caplog.text


class Broken(Exception):
    pass


@pytest.mark.parametrize("fed", [1, 2])
@both
def test_whatever_goes_wrong_here_ends_the_answer_visibly(
    processes: int, fed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After its head, and while it is carried."""
    feed, count = Meter.feed, 0

    def broken(meter: Meter, chunk: bytes) -> None:
        nonlocal count
        count += 1
        if count == fed:
            raise Broken("by the test")
        feed(meter, chunk)

    async def scene() -> None:
        async with stage(top=top(processes)) as it:
            await until(lambda: all(process.pid for process in it.forwarders.processes))
            monkeypatch.setattr(Meter, "feed", broken)
            monkeypatch.setattr(Passage, "descriptors", lambda _: None)
            paced = Paced(PIECES)
            it.upstream.script.append(paced)
            response = await it.client.post(it.url + "/v1/chat/completions", json=STREAM)
            if fed == 1:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
            else:
                assert await response.content.readexactly(len(PIECES[0])) == PIECES[0]
                paced.go.set()
                assert b"upstream_lost" in await response.read()
            await until(lambda: not it.owner.fleet.models["chat"].busy)
            assert it.owner.traffic["chat"].total.errors == 1
            assert it.forwarders.processes == [] or it.forwarders.processes[0].open == {}
            assert (await it.post())[0] == 200

    play(scene)
    assert "by the test" in caplog.text


@pytest.mark.parametrize(("path", "shape"), [("/v1/completions", {"error"}), ("/v1/messages", {"type", "error"})])
def test_whatever_goes_wrong_before_an_answer_is_told_in_the_apis_shape(
    path: str, shape: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(reply: Reply, upstream: aiohttp.ClientResponse, body: bytes) -> web.StreamResponse:
        raise Broken("by the test")

    async def scene() -> None:
        async with stage() as it:
            with monkeypatch.context() as patch:
                patch.setattr(Reply, "send_whole", broken)
                status, body, headers = await it.post(path)
            said = json.loads(body)
            assert (status, headers["Content-Type"], said.keys()) == (500, "application/json", shape)
            assert said["error"]["message"] == "The gateway failed; its log says why."
            await until(lambda: not it.owner.fleet.models["chat"].busy)
            assert it.owner.traffic["chat"].total.errors == 1
            assert (await it.post(path))[0] == 200

    play(scene)
    assert "by the test" in caplog.text


def test_a_mistake_in_the_middle_of_a_whole_answer_cuts_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with stage() as it:
            go = asyncio.Event()

            async def halves(request: web.Request) -> web.StreamResponse:
                response = web.StreamResponse()
                await response.prepare(request)
                for half in (b"half", b"half"):
                    await response.write(half)
                    await go.wait()
                return response

            def broken(meter: Meter, chunk: bytes) -> None:
                raise Broken("by the test")

            it.upstream.script.append(halves)
            response = await it.client.post(it.url + "/v1/chat/completions", json={"model": "chat"})
            assert await response.content.readexactly(4) == b"half"
            monkeypatch.setattr(Meter, "feed", broken)
            go.set()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
            await until(lambda: not it.owner.fleet.models["chat"].busy)

    play(scene)
    assert "Broken" in caplog.text
