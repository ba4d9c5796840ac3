# SPDX-License-Identifier: Apache-2.0
"""The end of a gateway that hands over: what becomes of requests and models that take too long."""

from __future__ import annotations

import asyncio

from aiohttp import web
from gateway_stage import WAIT_S, error_of, play, stage, until

from kvcached.controller.states import State


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
