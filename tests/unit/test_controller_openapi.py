# SPDX-License-Identifier: Apache-2.0
"""The description of the gateway's own paths has all of them, and nothing else."""

from __future__ import annotations

import json
import re

import pytest
from gateway_stage import error_of, play, stage

from kvcached import __version__
from kvcached.controller.access import Access
from kvcached.controller.config import parse_config
from kvcached.controller.gateway import Gateway
from kvcached.controller.openapi import description
from kvcached.controller.states import State
from kvcached.controller.traces import Traces

OF_OTHERS = re.compile(r"/|/ui.*|/openapi\.json|/upstream/.*|/v1/\{path\}|/(v2/)?\w+")
"""The page's, and what goes to engines. Our own of one word are told apart by their method."""


FILE = "models: {chat: {engine: remote, address: 'http://a:1'}}"


def test_it_has_every_path_of_ours() -> None:
    async def scene() -> None:
        async with stage() as it:
            status, told = await it.get("/openapi.json")
            assert (status, told) == (200, description(__version__))
            ours = {(path, method.upper()) for path, methods in told["paths"].items() for method in methods}
            app = Gateway(parse_config(FILE), Access(parse_config(FILE), {}), it.owner, it.client, Traces()).app()
            served = {
                (route.resource.canonical, route.method) for route in app.router.routes() if route.resource and route.method != "HEAD"
            }
            assert ours <= served
            others = {path for path, method in served - ours}
            assert all(OF_OTHERS.fullmatch(path) for path in others), others
            assert all(method != "GET" or path in ("/", "/ui", "/ui/{file}", "/openapi.json") for path, method in served - ours)

    play(scene)


def test_what_it_refers_to_is_there() -> None:
    text = json.dumps(description(__version__))
    named = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert named == set(description(__version__)["components"]["schemas"])


def test_it_knows_every_state() -> None:
    assert description(__version__)["components"]["schemas"]["Card"]["properties"]["state"]["enum"] == [state.value for state in State]


def test_a_path_that_is_asked_in_another_way_says_how() -> None:
    async def scene() -> None:
        async with stage() as it, it.client.post(it.url + "/traffic") as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")

    play(scene)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/chat"])
def test_the_list_of_models_is_not_an_engines(path: str) -> None:
    async def scene() -> None:
        async with stage() as it:
            status, _, headers = await it.post(path)
            assert (status, headers["Allow"], it.upstream.calls) == (405, "GET,HEAD", [])
            assert (await it.post("/v1/modelsandmore"))[0] == 200

    play(scene)


@pytest.mark.parametrize("limit", ["", "9" * 400 + ".5GiB", "9" * 30, "9" * 5000, "8589934592GiB", "101%", "-1"])
def test_no_limit_is_beyond_what_a_message_can_carry(limit: str) -> None:
    async def scene() -> None:
        async with stage() as it:
            status, body, _ = await it.post(f"/action/limit/chat?limit={limit}")
            assert (status, error_of(body)["code"]) == (400, "invalid_size")

    play(scene)


@pytest.mark.parametrize("query", ["wait_s=", "wait_s=x", "wait_s=-1", "wait_s=nan", "wait_s=1e9"])
def test_seconds_are_seconds(query: str) -> None:
    async def scene() -> None:
        async with stage() as it:
            status, body, _ = await it.post(f"/action/wakeup/chat?{query}")
            assert (status, error_of(body)["code"]) == (400, "invalid_seconds")

    play(scene)
