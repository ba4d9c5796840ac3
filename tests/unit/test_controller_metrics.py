# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads of a gateway with real HTTP servers behind it."""

from __future__ import annotations

from aiohttp import web
from gateway_stage import Stage, play, stage, until
from prometheus_client.parser import text_string_to_metric_families

from kvcached.controller.traffic import at_most, bin_of


async def samples(it: Stage, **more: object) -> dict[tuple[str, ...], float]:
    """Name and values of labels, without the model's, to value."""
    async with it.client.get(it.url + "/metrics", **more) as response:  # type: ignore[arg-type]
        assert (response.status, response.content_type) == (200, "text/plain")
        families = list(text_string_to_metric_families(await response.text()))
    found = [sample for family in families for sample in family.samples]
    assert all(sample.name.startswith("kvcached_gateway_") and sample.labels["model"] == "chat" for sample in found)
    return {
        (
            sample.name.removeprefix("kvcached_gateway_"),
            *(value for name, value in sorted(sample.labels.items()) if name != "model"),
        ): sample.value
        for sample in found
    }


def test_requests_tokens_and_durations_are_counted() -> None:
    async def scene() -> None:
        async with stage() as it:
            for _ in range(3):
                await it.post()
            seen = await samples(it)
            assert seen["requests_total", "ok"] == 3
            assert seen["requests_total", "error"] == seen["requests_total", "refused"] == 0
            assert (seen["tokens_total", "in"], seen["tokens_total", "out"]) == (9, 12)
            for name in ("latency_seconds", "ttft_seconds"):
                assert seen[name + "_count",] == seen[name + "_bucket", "+Inf"] == seen[name + "_bucket", "600.0"] == 3
                assert seen[name + "_sum",] > 0
                bounds = [value for key, value in seen.items() if key[0] == name + "_bucket"]
                assert bounds == sorted(bounds)
            assert seen["operations_total", "ok", "start"] == 1

    play(scene)


async def broken(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500)


def test_errors_and_refusals() -> None:
    async def scene() -> None:
        async with stage() as it:
            it.upstream.script.append(broken)
            assert [(await it.post())[0] for _ in range(3)] == [500, 200, 200]
            seen = await samples(it)
            assert (seen["requests_total", "ok"], seen["requests_total", "error"]) == (2, 1)
        async with stage({"queue": 0, "concurrency": 1}) as it:
            await it.post()
            it.upstream.healthy = False
            assert (await samples(it))["requests_total", "refused"] == 1
            assert (await it.client.post(it.url + "/action/wakeup/chat?wait_s=0.2")).status == 202
            await until(lambda: it.owner.operations["chat", "start", False] > 0)
            assert (await samples(it))["operations_total", "failed", "start"] >= 1

    play(scene)


def test_what_is_now() -> None:
    async def scene() -> None:
        async with stage({"concurrency": 1}) as it:
            await it.post()
            it.upstream.gate.clear()
            asking = [it.owner._loop.create_task(it.post()) for _ in range(3)]
            await until(lambda: len(it.owner.fleet.models["chat"].waiting) == 2)
            seen = await samples(it)
            assert (seen["open_requests",], seen["waiting_requests",], seen["idle_seconds",]) == (1, 2, 0)
            assert {key[1]: value for key, value in seen.items() if key[0] == "model_state" and value} == {"ready": 1}
            assert (seen["server_up", "0"], seen["server_open_requests", "0"]) == (1, 1)
            it.upstream.gate.set()
            for one in asking:
                await one

    play(scene)


def test_it_needs_the_key_that_opens_all() -> None:
    async def scene() -> None:
        async with stage(top={"api_keys": ["opens-all", {"key": "opens-chat", "models": ["chat"]}]}) as it:
            assert (await it.client.get(it.url + "/metrics")).status == 401
            assert (await it.client.get(it.url + "/metrics", headers={"Authorization": "Bearer opens-chat"})).status == 403
            assert await samples(it, headers={"Authorization": "Bearer opens-all"})

    play(scene)


def test_how_many_were_at_most_so_long() -> None:
    bins = {bin_of(0.009): 2, bin_of(0.2): 3, bin_of(100_000.0): 1}
    assert [at_most(bins, bound) for bound in (0.001, 0.01, 0.1, 0.25, 10_000.0, 1e9)] == [0, 2, 2, 5, 5, 6]
