# SPDX-License-Identifier: Apache-2.0
"""What a client is sent while its model wakes, and errors in the shape of the API that it asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from gateway_stage import PIECES, Stage, cut_after, play, stage, until

from kvcached.controller.states import State

STREAM = {"model": "chat", "stream": True}
OFTEN = {"keep_alive_s": 0.01}
COMMENT = b": waiting for the model\n\n"


async def waiting(it: Stage, body: dict[str, Any] = STREAM, path: str = "/v1/chat/completions") -> Any:
    """The response of a request that has been told to wait."""
    it.upstream.gate.clear()
    response = await it.client.post(it.url + path, json=body)
    assert (await response.content.readexactly(len(COMMENT))) == COMMENT
    assert (response.status, response.content_type) == (200, "text/event-stream")
    it.upstream.gate.set()
    return response


async def rest_of(response: Any) -> bytes:
    """Without further comments."""
    return bytes((await response.read()).replace(COMMENT, b""))


def event_of(data: bytes) -> dict[str, Any]:
    return dict(json.loads(data.split(b"data: ")[-1]))


class TestKeepAlive:
    def test_comments_come_before_the_stream_and_never_in_it(self) -> None:
        async def scene() -> None:
            async with stage(OFTEN) as it:
                body = await (await waiting(it)).read()
                assert body.endswith(b"".join(PIECES))
                assert body.removesuffix(b"".join(PIECES)).replace(COMMENT, b"") == b""
                assert len(it.upstream.calls) == 1

        play(scene)

    def test_none_comes_while_the_engine_thinks_between_two_tokens(self) -> None:
        async def scene() -> None:
            async with stage(OFTEN) as it:

                async def slow(request: web.Request) -> web.StreamResponse:
                    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                    await response.prepare(request)
                    await response.write(b"data: 1\n")
                    await asyncio.sleep(0.2)
                    await response.write(b"\n")
                    return response

                it.upstream.script.append(slow)
                assert (await (await waiting(it)).read()).partition(b"data: 1\n")[2] == b"\n"

        play(scene)

    def test_while_a_model_wakes(self) -> None:
        async def scene() -> None:
            async with stage({**OFTEN, "sleep": "host"}) as it:
                await it.post()
                assert (await it.client.post(it.url + "/action/sleep/chat?wait_s=50")).status == 200
                it.upstream.wake_gate.clear()
                response = await it.client.post(it.url + "/v1/chat/completions", json=STREAM)
                assert (await response.content.readexactly(len(COMMENT))) == COMMENT
                assert it.state() is State.WAKING
                it.upstream.wake_gate.set()
                assert await rest_of(response) == b"".join(PIECES)

        play(scene)

    @pytest.mark.parametrize(("keys", "body"), [(OFTEN, {"model": "chat"}), (OFTEN, {"model": "chat", "stream": False}), ({}, STREAM)])
    def test_who_did_not_ask_for_it_gets_none(self, keys: dict[str, Any], body: dict[str, Any]) -> None:
        async def scene() -> None:
            async with stage(keys) as it:
                it.upstream.gate.clear()
                asked = it.client.post(it.url + "/v1/chat/completions", json=body)
                it.owner._loop.call_later(0.1, it.upstream.gate.set)
                async with asked as response:
                    assert COMMENT not in await response.read()

        play(scene)

    def test_an_error_of_the_server_becomes_an_event(self) -> None:
        async def scene() -> None:
            async with stage(OFTEN) as it:

                async def wrong(request: web.Request) -> web.StreamResponse:
                    return web.Response(text='{\n  "error": {"message": "no\\nway"}\n}\n', status=400)

                it.upstream.script.append(wrong)
                assert await rest_of(await waiting(it)) == b'data: { "error": {"message": "no\\nway"} }\n\n'

        play(scene)

    def test_a_model_that_fails_becomes_an_event(self) -> None:
        async def scene() -> None:
            async with stage({**OFTEN, "queue_timeout_s": 0.2, "concurrency": 1}) as it:
                assert (await it.client.post(it.url + "/action/wakeup/chat?wait_s=50")).status == 200  # so that the first waits for nothing
                it.upstream.gate.clear()
                other = await it.client.post(it.url + "/v1/chat/completions", json=STREAM)
                late = await it.client.post(it.url + "/v1/chat/completions", json=STREAM)
                assert event_of(await late.read())["error"]["code"] == "queue_timeout"
                it.upstream.gate.set()
                assert await rest_of(other) == b"".join(PIECES)

        play(scene)

    def test_a_server_that_is_lost_before_it_answered_is_asked_again(self) -> None:
        async def scene() -> None:
            async with stage(OFTEN) as it:
                it.upstream.script.append(cut_after(b"", {"Content-Type": "text/event-stream"}))
                assert await rest_of(await waiting(it)) == b"".join(PIECES)
                assert len(it.upstream.calls) == 2

        play(scene)

    def test_a_client_that_leaves_while_it_waits_is_forgotten(self) -> None:
        async def scene() -> None:
            async with stage(OFTEN) as it:
                it.upstream.gate.clear()
                response = await it.client.post(it.url + "/v1/chat/completions", json=STREAM)
                await response.content.readexactly(len(COMMENT))
                await it.upstream.arrived.wait()
                response.close()
                await it.upstream.hung_up.wait()
                await until(lambda: not it.owner.fleet.models["chat"].busy)

        play(scene)


class TestAnthropic:
    @pytest.mark.parametrize(
        ("body", "status", "kind"),
        [({"model": "none"}, 404, "not_found_error"), (b"[", 400, "invalid_request_error"), ({"model": 3}, 400, "invalid_request_error")],
    )
    def test_errors_have_its_shape(self, body: object, status: int, kind: str) -> None:
        async def scene() -> None:
            async with stage() as it:
                for path in ("/v1/messages", "/v1/messages/count_tokens?x=1"):
                    got, said, _ = await it.post(path, body)
                    error = json.loads(said)
                    assert (got, error["type"], set(error), error["error"]["type"]) == (status, "error", {"type", "error"}, kind)
                    assert error["error"]["message"]
                assert "code" in json.loads((await it.post("/v1/messages-of-others", body))[1])["error"]

        play(scene)

    def test_a_wrong_key_and_a_full_queue(self) -> None:
        async def scene() -> None:
            async with stage(top={"api_keys": ["right-key"]}) as it:
                status, said, _ = await it.post("/v1/messages", headers={"x-api-key": "wrong-key"})
                assert (status, json.loads(said)["error"]["type"]) == (401, "authentication_error")
                assert (await it.post("/v1/messages", headers={"x-api-key": "right-key"}))[0] == 200
            async with stage({"queue": 0, "concurrency": 1}) as it:
                assert (await it.client.post(it.url + "/action/wakeup/chat?wait_s=50")).status == 200
                it.upstream.gate.clear()
                first = it.owner._loop.create_task(it.post("/v1/messages"))
                await until(lambda: bool(it.owner.fleet.models["chat"].open))
                status, said, headers = await it.post("/v1/messages")
                assert (status, json.loads(said)["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")
                it.upstream.gate.set()
                assert (await first)[0] == 200

        play(scene)

    def test_a_stream_that_breaks_ends_with_its_event(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                it.upstream.script.append(cut_after(b"event: ping\ndata: {}\n\n", {"Content-Type": "text/event-stream"}))
                _, body, _ = await it.post("/v1/messages", STREAM)
                assert body.startswith(b"event: ping\ndata: {}\n\n")
                assert b"\n\nevent: error\ndata: " in body
                assert event_of(body)["error"]["type"] == "api_error"

        play(scene)
