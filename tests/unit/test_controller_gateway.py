# SPDX-License-Identifier: Apache-2.0
"""The gateway against real HTTP servers that do what the test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import pytest
from aiohttp import web
from gateway_stage import PIECES, Upstream, cut_after, cut_at_once, error_of, listening, play, stage, until

from kvcached.controller.proxy import TRIES
from kvcached.controller.states import State
from kvcached.controller.usage import Meter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class TestRouting:
    @pytest.mark.parametrize(
        "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/rerank", "/tokenize"]
    )
    def test_by_name_and_with_the_same_bytes(self, path: str) -> None:
        async def scene() -> None:
            async with stage(top={"models": {"other": {}}}) as it:
                body = b'{ "model" :"chat", "x": "\xc3\xa9" }'
                status, answer, headers = await it.post(
                    f"{path}?a=%2F1", body, headers={"X-Mine": "1", "Connection": "keep-alive, X-Hop", "X-Hop": "2"}
                )
                assert (status, json.loads(answer)["path"], headers["X-From"]) == (200, f"{path}?a=%2F1", "upstream")
                assert it.upstream.bodies == [body]
                assert it.upstream.headers[0]["X-Mine"] == "1"
                assert "X-Hop" not in it.upstream.headers[0]

        play(scene)

    def test_an_alias_is_replaced_by_the_name_that_the_server_knows(self) -> None:
        async def scene() -> None:
            async with stage({"model": "real/name"}) as it:
                assert (await it.post(body={"model": "gpt", "n": 1}))[0] == 200
                assert json.loads(it.upstream.bodies[0]) == {"model": "real/name", "n": 1}

        play(scene)

    def test_one_model_needs_no_name_and_two_do(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                assert (await it.post(body={}))[0] == 200
            async with stage(top={"models": {"other": {}}}) as it:
                status, body, _ = await it.post(body={})
                assert (status, error_of(body)["param"]) == (400, "model")

        play(scene)

    def test_a_form_names_its_model_too(self) -> None:
        async def scene() -> None:
            async with stage(top={"models": {"other": {}}}) as it:
                form = aiohttp.FormData({"model": "chat"})
                form.add_field("file", b"\0\1", filename="a.wav")
                form.add_field("file", b"other", filename="model")
                async with it.client.post(it.url + "/v1/audio/transcriptions", data=form) as response:
                    assert response.status == 200
                assert b"a.wav" in it.upstream.bodies[0]

        play(scene)

    def test_an_alias_in_a_form_is_replaced_too(self) -> None:
        async def scene() -> None:
            async with stage({"model": "real/name"}) as it:
                async with it.client.post(
                    it.url + "/v1/audio/transcriptions", data=aiohttp.FormData({"model": "gpt", "n": "1"}, default_to_multipart=True)
                ) as response:
                    assert response.status == 200
                assert b"real/name" in it.upstream.bodies[0]
                assert b"gpt" not in it.upstream.bodies[0]

        play(scene)

    def test_a_form_of_many_lines_is_read_once(self) -> None:
        async def scene() -> None:
            async with stage(top={"models": {"other": {}}}) as it:
                headers = {"Content-Type": "multipart/form-data; boundary=x"}
                body = b"; name=model\r\n" * 60_000  # minutes, where every line begins a search through all that follow
                assert (await it.post("/v1/audio/transcriptions", body, headers=headers))[0] == 400

        play(scene)

    def test_half_a_character_goes_through_by_any_name(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                assert (await it.post(body=b'{"model": "gpt", "prompt": "\\ud83d"}'))[0] == 200
                assert b"\\ud83d" in it.upstream.bodies[0]

        play(scene)

    def test_a_whole_address_as_target_goes_to_the_models_server(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                host, _, port = it.url.removeprefix("http://").partition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"POST http://elsewhere.test/v1/completions?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                assert b" 200 " in await reader.readline()
                writer.close()
                assert it.upstream.calls == ["/v1/completions?a=1"]

        play(scene)

    @pytest.mark.parametrize(
        ("path", "body", "status", "code"),
        [
            ("/v1/completions", {"model": "none"}, 404, "model_not_found"),
            ("/v1/completions", b"{", 400, "invalid_json"),
            ("/v1/completions", b"[]", 400, "invalid_json"),
            ("/v1/completions", b"[" * 100_000, 400, "invalid_json"),
            ("/v1/completions", {"model": 3}, 400, "invalid_model"),
            ("/sleep", {"model": "chat"}, 404, "not_found"),
            ("/v1/%2e%2e/sleep", {"model": "chat"}, 400, "invalid_path"),
            ("/health", {"model": "chat"}, 405, "method_not_allowed"),
        ],
    )
    def test_what_is_wrong_is_said_in_the_shape_of_the_api(self, path: str, body: object, status: int, code: str) -> None:
        async def scene() -> None:
            async with stage() as it:
                found, answer, _ = await it.post(path, body)
                assert (found, error_of(answer)["code"]) == (status, code)
                assert it.upstream.calls == []

        play(scene)

    def test_the_list_of_models(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                status, answer = await it.get("/v1/models")
                assert (status, [card["id"] for card in answer["data"]]) == (200, ["chat", "gpt"])
                assert (await it.get("/v1/models/gpt"))[1]["root"] == "chat"
                assert (await it.get("/v1/models/none"))[0] == 404

        play(scene)

    def test_any_path_of_one_server(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                assert (await it.get("/upstream/chat/metrics?x=1"))[1]["path"] == "/metrics?x=1"

        play(scene)


class TestStreams:
    def test_byte_for_byte(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                status, body, headers = await it.post(body={"model": "chat", "stream": True})
                assert (status, body, headers["Content-Type"]) == (200, b"".join(PIECES), "text/event-stream; charset=utf-8")

        play(scene)

    def test_the_first_bytes_come_before_the_last_are_made(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                more = asyncio.Event()

                async def slow(request: web.Request) -> web.StreamResponse:
                    response = web.StreamResponse()
                    await response.prepare(request)
                    await response.write(b"first")
                    await more.wait()
                    await response.write(b"last")
                    return response

                it.upstream.script.append(slow)
                async with it.client.post(it.url + "/v1/completions", json={"model": "chat"}) as response:
                    assert await response.content.readany() == b"first"
                    assert it.owner.fleet.models["chat"].open
                    more.set()
                    assert await response.content.read() == b"last"
                await until(lambda: not it.owner.fleet.models["chat"].open)

        play(scene)

    def test_a_client_that_leaves_cancels_the_request_to_the_server(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                it.upstream.gate.clear()
                asking = asyncio.create_task(it.post())
                await it.upstream.arrived.wait()
                asking.cancel()
                await it.upstream.hung_up.wait()
                await until(lambda: not it.owner.fleet.models["chat"].open)

        play(scene)

    def test_a_server_that_is_lost_each_time_is_told_without_its_address(self, caplog: pytest.LogCaptureFixture) -> None:
        async def scene() -> None:
            async with stage() as it:
                it.upstream.script += [cut_at_once] * TRIES
                status, body, _ = await it.post()
                assert (status, error_of(body)["code"]) == (502, "upstream_lost")
                assert error_of(body)["message"] == "chat: its server was lost before it answered"
                assert it.upstream.address in caplog.text

        play(scene)

    def test_a_server_lost_in_the_middle_of_a_stream_is_told_as_an_event(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                it.upstream.script.append(cut_after(b"data: 1\n\n", {"Content-Type": "text/event-stream"}))
                status, body, _ = await it.post()
                assert (status, body[:9]) == (200, b"data: 1\n\n")
                assert error_of(body.split(b"data: ")[-1])["code"] == "upstream_lost"
                assert len(it.upstream.calls) == 1

        play(scene)

    def test_a_server_lost_in_the_middle_of_another_body_cuts_it(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                it.upstream.script.append(cut_after(b'{"half":', {}))
                with pytest.raises(aiohttp.ClientPayloadError):
                    await it.post()
                assert (await it.get("/traffic"))[1]["models"]["chat"]["total"]["errors"] == 1

        play(scene)


class TestFailures:
    @pytest.mark.parametrize("failure", [cut_at_once, cut_after(b"", {})])
    def test_it_is_tried_again_while_the_client_has_seen_nothing(
        self, failure: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> None:
        async def scene() -> None:
            async with stage() as it:
                it.upstream.script += [failure, failure]
                assert (await it.post())[0] == 200
                assert len(it.upstream.calls) == 3

        play(scene)

    @pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
    def test_a_servers_own_error_is_passed_on_as_it_is_and_not_repeated(self, status: int) -> None:
        async def scene() -> None:
            async with stage() as it:

                async def wrong(request: web.Request) -> web.StreamResponse:
                    return web.Response(status=status, body=b'{"error": {"message": "theirs"}}', headers={"Retry-After": "7"})

                it.upstream.script.append(wrong)
                found, body, headers = await it.post()
                assert (found, body, headers["Retry-After"]) == (status, b'{"error": {"message": "theirs"}}', "7")
                assert len(it.upstream.calls) == 1

        play(scene)

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/v1/nothing", {"error": {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": "not_found"}}),
            ("/v1/messages/nothing", {"type": "error", "error": {"type": "not_found_error", "message": "Not Found"}}),
            ("/upstream/chat/nothing", {"detail": "Not Found"}),
        ],
    )
    def test_what_a_server_does_not_have_is_told_in_the_shape_of_the_api(self, path: str, expected: dict[str, Any]) -> None:
        async def scene() -> None:
            async with stage() as it:

                async def nothing(request: web.Request) -> web.StreamResponse:
                    return web.json_response({"detail": "Not Found"}, status=404, headers={"X-From": "upstream"})

                it.upstream.script.append(nothing)
                status, body, headers = await it.post(path)
                assert (status, json.loads(body), headers["X-From"]) == (404, expected, "upstream")

        play(scene)

    def test_nobody_there(self) -> None:
        async def scene() -> None:
            async with stage({"queue_timeout_s": 0.3}, addresses=["http://127.0.0.1:9"]) as it:
                status, body, headers = await it.post()
                assert (status, error_of(body)["code"], headers["Retry-After"]) == (503, "queue_timeout", "1")

        play(scene)

    def test_another_replica_answers_for_one_that_is_gone(self) -> None:
        async def scene() -> None:
            second = Upstream()
            async with listening(second.app()) as address:
                async with stage(addresses=[address, "http://127.0.0.1:9"]) as it:
                    assert [(await it.post())[0] for _ in range(3)] == [200] * 3
                    assert len(second.calls) == 3

        play(scene)

    def test_a_replica_that_dies_is_left_out_and_nobody_notices(self) -> None:
        async def scene() -> None:
            first, second = Upstream(), Upstream()
            async with listening(first.app()) as one, contextlib.AsyncExitStack() as mortal:
                two = await mortal.enter_async_context(listening(second.app()))
                async with stage(addresses=[two, one]) as it:
                    assert (await it.post())[0] == 200
                    assert second.calls
                    await mortal.aclose()
                    assert [(await it.post())[0] for _ in range(3)] == [200] * 3
                    assert [replica.up for replica in it.owner.backends["chat"].replicas] == [False, True]

        play(scene)

    def test_a_replica_whose_requests_have_ended_has_none(self) -> None:
        async def scene() -> None:
            first, second = Upstream(), Upstream()
            async with listening(first.app()) as one, listening(second.app()) as two, stage(addresses=[one, two]) as it:
                first.gate.clear()
                asking = asyncio.create_task(it.post())
                await first.arrived.wait()
                assert [(await it.post())[0] for _ in range(3)] == [200] * 3
                assert len(second.calls) == 3
                first.gate.set()
                await asking

        play(scene)

    def test_the_replica_with_the_fewest_requests_gets_the_next(self) -> None:
        async def scene() -> None:
            first, second = Upstream(), Upstream()
            async with listening(first.app()) as one, listening(second.app()) as two, stage(addresses=[one, two]) as it:
                first.gate.clear()
                second.gate.clear()
                asking = [asyncio.create_task(it.post()) for _ in range(6)]
                await until(lambda: len(first.calls) + len(second.calls) == 6)
                assert len(first.calls) == len(second.calls) == 3
                first.gate.set()
                second.gate.set()
                await asyncio.gather(*asking)

        play(scene)


class TestQueue:
    def test_no_more_than_the_limit_and_429_beyond_the_queue(self) -> None:
        async def scene() -> None:
            async with stage({"concurrency": 2, "queue": 1}) as it:
                it.upstream.gate.clear()
                asking = [asyncio.create_task(it.post())]
                await it.upstream.arrived.wait()
                asking += [asyncio.create_task(it.post()) for _ in range(2)]
                await until(lambda: bool(it.owner.fleet.models["chat"].waiting))
                status, body, headers = await it.post()
                assert (status, error_of(body)["type"], error_of(body)["code"], headers["Retry-After"]) == (
                    429,
                    "rate_limit_error",
                    "queue_full",
                    "1",
                )
                assert len(it.upstream.calls) == 2
                it.upstream.gate.set()
                assert [answer[0] for answer in await asyncio.gather(*asking)] == [200] * 3

        play(scene)

    def test_a_client_that_leaves_the_queue_is_forgotten(self) -> None:
        async def scene() -> None:
            async with stage({"concurrency": 1}) as it:
                it.upstream.gate.clear()
                first = asyncio.create_task(it.post())
                await it.upstream.arrived.wait()
                second = asyncio.create_task(it.post())
                await until(lambda: bool(it.owner.fleet.models["chat"].waiting))
                second.cancel()
                await until(lambda: not it.owner.fleet.models["chat"].waiting)
                it.upstream.gate.set()
                assert (await first)[0] == 200
                assert len(it.upstream.calls) == 1

        play(scene)


class TestSleep:
    def test_fifty_requests_to_a_sleeping_model_make_one_wake_up(self) -> None:
        async def scene() -> None:
            async with stage({"sleep": "host"}) as it:
                await it.post()
                async with it.client.post(it.url + "/action/sleep/gpt?wait_s=50") as response:
                    assert (response.status, (await response.json())["state"]) == (200, "asleep")
                it.upstream.wake_gate.clear()
                asking = [asyncio.create_task(it.post()) for _ in range(50)]
                await until(lambda: len(it.owner.fleet.models["chat"].waiting) == 50)
                it.upstream.wake_gate.set()
                assert [answer[0] for answer in await asyncio.gather(*asking)] == [200] * 50
                assert [call for call in it.upstream.calls if "wake" in call or "sleep" in call] == [
                    "/wake_up",
                    "/sleep?level=1&mode=wait",
                    "/wake_up",
                ]

        play(scene)

    def test_an_open_stream_is_never_put_to_sleep_but_in_a_hurry(self) -> None:
        async def scene() -> None:
            async with stage({"sleep": "host", "ttl_s": 0.01}) as it:
                it.upstream.gate.clear()
                asking = asyncio.create_task(it.post())
                await it.upstream.arrived.wait()
                async with it.client.post(it.url + "/action/sleep/chat") as response:
                    assert (response.status, (await response.json())["state"]) == (202, "draining")
                await asyncio.sleep(0.05)
                assert "/sleep?level=1&mode=wait" not in it.upstream.calls
                async with it.client.post(it.url + "/action/sleep/chat?mode=abort&wait_s=50") as response:
                    assert (response.status, (await response.json())["state"]) == (200, "asleep")
                status, body, headers = await asking
                assert (status, error_of(body)["code"], headers["Retry-After"]) == (503, "model_put_to_sleep", "1")

        play(scene)

    def test_what_outlasts_the_grace_of_an_orderly_end_is_told_why(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                it.upstream.gate.clear()
                asking = asyncio.create_task(it.post())
                await it.upstream.arrived.wait()
                await it.owner.close()
                status, body, headers = await asking
                assert (status, error_of(body)["code"], headers["Retry-After"]) == (503, "shutting_down", "5")

        play(scene)

    def test_a_model_that_an_orderly_end_has_ended_already_is_worth_to_ask_again(self) -> None:
        async def scene() -> None:
            async with stage({}, {"models": {"other": {}}}) as it:
                it.upstream.gate.clear()
                asking = asyncio.create_task(it.post())
                await it.upstream.arrived.wait()
                closing = asyncio.create_task(it.owner.close())
                await until(lambda: "other" not in it.owner.fleet.models)
                status, body, headers = await it.post(body={"model": "other"})
                assert (status, error_of(body)["code"], headers["Retry-After"]) == (503, "shutting_down", "5")
                assert (await it.post(body={"model": "nobody"}))[0] == 404
                it.upstream.gate.set()
                await asyncio.gather(closing, asking)

        play(scene)

    def test_by_itself_after_its_ttl(self) -> None:
        async def scene() -> None:
            async with stage({"sleep": "host", "ttl_s": 0.05}) as it:
                await it.post()
                await until(lambda: it.state() is State.ASLEEP)
                assert (await it.post())[0] == 200

        play(scene)

    def test_what_cannot_be_is_said(self) -> None:
        async def scene() -> None:
            async with stage() as it:
                for path, status in (
                    ("/action/sleep/chat", 409),
                    ("/action/sleep/none", 404),
                    ("/action/wakeup/chat?wait_s=x", 400),
                    ("/action/limit/chat?limit=1GiB", 409),
                    ("/action/limit/chat?limit=much", 400),
                    ("/action/limit/chat", 400),
                    ("/action/limit/none?limit=1GiB", 404),
                ):
                    assert (await it.post(path))[0] == status
                assert (await it.post("/action/wakeup/chat?wait_s=50"))[0] == 200

        play(scene)


class TestKeys:
    TOP: ClassVar[dict[str, Any]] = {
        "api_keys": ["all-of-them", {"key": "chat-alone", "models": ["chat"]}],
        "models": {"other": {"upstream_key": "env:UPSTREAM_KEY"}},
    }

    @pytest.mark.parametrize(
        ("headers", "model", "status"),
        [
            ({}, "chat", 401),
            ({"Authorization": "Bearer wrong-key"}, "chat", 401),
            ({"Authorization": "Bearer chat-alon"}, "chat", 401),
            ({"Authorization": "Basic chat-alone"}, "chat", 401),
            ({"Authorization": "Bearer chat-alone"}, "chat", 200),
            ({"x-api-key": "chat-alone"}, "chat", 200),
            ({"Authorization": "Bearer chat-alone"}, "other", 403),
            ({"Authorization": "Bearer all-of-them"}, "other", 200),
        ],
    )
    def test_who_may_use_what(self, headers: dict[str, str], model: str, status: int) -> None:
        async def scene() -> None:
            async with stage(top=dict(self.TOP)) as it:
                found, body, _ = await it.post(body={"model": model}, headers=headers)
                assert found == status
                assert status == 200 or error_of(body)["code"] in ("invalid_api_key", "not_allowed")
                assert len(it.upstream.calls) == (status == 200)

        play(scene)

    def test_our_keys_stay_here_and_the_servers_get_theirs(self) -> None:
        async def scene() -> None:
            async with stage(top=dict(self.TOP)) as it:
                for model in ("chat", "other"):
                    await it.post(body={"model": model}, headers={"Authorization": "Bearer all-of-them"})
                assert [headers.get("Authorization") for headers in it.upstream.headers] == [None, "Bearer their-key"]
            async with stage() as it:
                await it.post(headers={"Authorization": "Bearer of-the-client"})
                assert it.upstream.headers[0]["Authorization"] == "Bearer of-the-client"

        play(scene)

    def test_actions_and_figures_need_a_key_for_all_and_health_none(self) -> None:
        async def scene() -> None:
            async with stage(top=dict(self.TOP)) as it:
                for path in ("/traffic", "/models/idle", "/sleep/status", "/sleep/candidates", "/upstream/chat/x"):
                    assert (await it.get(path))[0] == 401
                    assert (await it.get(path, headers={"x-api-key": "chat-alone"}))[0] == 403
                    assert (await it.get(path, headers={"x-api-key": "all-of-them"}))[0] == 200
                assert await it.get("/health") == (200, {"status": "ok"})
                assert await it.get("/health/chat") == (200, {"model": "chat", "state": "ready"})
                assert [card["id"] for card in (await it.get("/v1/models", headers={"x-api-key": "chat-alone"}))[1]["data"]] == [
                    "chat",
                    "gpt",
                ]

        play(scene)


class TestFigures:
    def test_traffic_counts_what_went_through(self) -> None:
        async def scene() -> None:
            async with stage(top={"models": {"never": {}}}) as it:
                await it.post()
                await it.post(body={"model": "chat", "stream": True})
                models = (await it.get("/traffic"))[1]["models"]
                total = models["chat"]["total"]
                assert (total["requests"], total["errors"], total["tokens_in"], total["tokens_out"]) == (2, 0, 10, 6)
                assert models["chat"]["windows"]["60s"]["ttft_s"]["p50"] > 0
                idle = (await it.get("/models/idle"))[1]["models"]
                assert [one["model"] for one in idle] == ["never", "chat"]
                assert (await it.get("/models/idle?idle_s=1000"))[1]["models"] == []

        play(scene)

    def test_health_and_who_sleeps(self) -> None:
        async def scene() -> None:
            async with stage({"sleep": "host"}) as it:
                assert (await it.get("/health"))[1] == {"status": "ok", "models": {"chat": "stopped"}}
                assert (await it.get("/sleep/candidates"))[1]["models"] == []
                await it.post()
                assert (await it.get("/health/gpt"))[1]["state"] == "ready"
                assert (await it.get("/sleep/status"))[1]["models"]["chat"]["open"] == 0
                assert [one["model"] for one in (await it.get("/sleep/candidates"))[1]["models"]] == ["chat"]
                assert (await it.get("/health/none"))[0] == 404

        play(scene)


def test_a_stream_without_usage_counts_its_events_whatever_its_chunks() -> None:
    meter = Meter()
    for chunk in (b'data: {"a"', b': 1}\n\ndata: {"b": 2}\n\n', b"data: [DONE]\n\n"):
        meter.feed(chunk)
    assert meter.tokens() == (0, 2)
