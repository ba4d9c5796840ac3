# SPDX-License-Identifier: Apache-2.0
"""Three real engines, two models of two kinds, behind one gateway, seen by the official clients of OpenAI and Anthropic.

What may happen to a gateway in a year happens here in minutes, while nine clients never stop: no request is lost that had not begun to
stream, and no token of any stream is lost, repeated or told in another order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from gateway import Running, wait_for
from serving import MODEL, missing
from three import CHAT, CHAT_KEY, GEMMA, NAMES, OTHER, PHRASES, Crowd, Follow, ask, question, references, start

from kvcached.testing.kinds import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from three import Reference

pytestmark = [
    pytest.mark.full,
    pytest.mark.engine,
    pytest.mark.timeout(7_200),
    pytest.mark.xdist_group("gateway_three"),
    pytest.mark.skipif(bool(missing(VLLM, SGLANG)), reason=missing(VLLM, SGLANG)),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    it = start(tmp_path_factory.mktemp("three"))
    try:
        for name in NAMES:
            it.until(name, "ready")
        yield it
        assert it.close() == [], "an engine outlived the gateway"
    finally:
        it.kill()


@pytest.fixture(scope="module")
def known(gateway: Running) -> dict[str, list[Reference]]:
    with ThreadPoolExecutor(len(NAMES)) as threads:  # each engine has its own question only
        return dict(zip(NAMES, threads.map(lambda name: references(gateway, name), NAMES), strict=True))


def test_both_clients_get_the_same_streamed_or_not(gateway: Running, known: dict[str, list[Reference]]) -> None:
    for name in NAMES:
        one = known[name][0]
        asked = [question(name, one.content, client, stream=stream) for client in PHRASES for stream in (True, False)]
        for client, answer in zip(("openai", "openai", "anthropic", "anthropic"), ask(gateway, *asked), strict=True):
            assert (answer["error"], answer["text"], answer["ended"]) == (None, one.text, PHRASES[client][one.ended])
            assert answer["tokens"] == (one.tokens if client == "openai" else [])
            assert not answer["began"] or answer["pieces"] > 5, "it was no stream"


def error_of(answer: dict[str, Any]) -> tuple[str, int]:
    """The client's exception and its status; the body has the shape of its API."""
    error = answer["error"]
    assert error is not None, answer
    body = error["body"]
    if answer["question"]["client"] == "anthropic":
        assert isinstance(body["error"]["message"], str), body
    else:
        assert isinstance(body["message"], str), body
    return error["type"], error["status"]


def test_each_failure_is_the_exception_of_its_kind(gateway: Running) -> None:
    for client in PHRASES:
        unknown, wrong, closed = ask(
            gateway,
            question("nobody", "Hi", client),
            question(CHAT, "Hi", client, key="wrong-key"),
            question(GEMMA, "Hi", client, key=CHAT_KEY),
        )
        assert error_of(unknown) == ("NotFoundError", 404)
        assert error_of(wrong) == ("AuthenticationError", 401)
        assert error_of(closed) == ("PermissionDeniedError", 403)
        for name in NAMES:
            negative, long = ask(gateway, question(name, "Hi", client, max_tokens=-1), question(name, "word " * 3_000, client))
            assert error_of(negative) == ("BadRequestError", 400)
            assert error_of(long) == ("BadRequestError", 400)

        gateway.change(CHAT, concurrency=1, queue=0)
        answers = ask(gateway, *[question(CHAT, "Count to a thousand.", client, max_tokens=200)] * 4, how="together")
        full = [answer for answer in answers if answer["error"] is not None]
        assert [error_of(answer) for answer in full] == [("RateLimitError", 429)] * len(full)
        assert full
        assert all(int(answer["error"]["retry_after"]) >= 1 for answer in full)
        gateway.change(CHAT, concurrency=None, queue=None)


def test_what_an_engine_does_not_have_is_its_404_in_the_shape_of_the_api(gateway: Running) -> None:
    for name in NAMES:
        status, body = gateway.call("POST", "/v1/messages/nothing", {"model": name})
        assert (status, json.loads(body)) == (404, {"type": "error", "error": {"type": "not_found_error", "message": "Not Found"}})
        status, body = gateway.call("POST", "/v1/nothing", {"model": name})
        assert (status, json.loads(body)["error"]["type"]) == (404, "invalid_request_error")


def test_a_model_that_cannot_start_is_503_with_its_cause(gateway: Running) -> None:
    broken = {**gateway.models[CHAT], "model": str(MODEL), "args": ["--no-such-option"], "preload": False}
    gateway.models["broken"] = broken
    gateway.change(CHAT)
    by_openai, by_anthropic = ask(gateway, *(question("broken", "Hi", client) for client in PHRASES))
    assert error_of(by_openai) == ("InternalServerError", 503)
    assert error_of(by_anthropic)[1] == 503
    for answer in (by_openai, by_anthropic):
        assert "unrecognized arguments: --no-such-option" in answer["error"]["text"]
        assert str(gateway.folder / "logs" / "broken.log") in answer["error"]["text"]
        assert int(answer["error"]["retry_after"]) >= 1
    gateway.remove("broken")


def until_it_is_back(gateway: Running, name: str) -> None:
    """In spite of failures."""
    wait_for(lambda: gateway.facts(name)["state"] == "ready")


def sleep_and_wake(gateway: Running, crowd: Crowd) -> None:
    for name in NAMES:
        before = [gateway.count(f"{name}: {what} took") for what in ("sleep", "wake up")]
        assert gateway.call("POST", f"/action/sleep/{name}")[0] in (200, 202)
        wait_for(lambda name=name, before=before: not crowd.is_there or gateway.count(f"{name}: wake up took") > before[1])
        assert gateway.count(f"{name}: sleep took") > before[0]
    crowd.goes_on()


def kill_an_engine_and_change_the_file(gateway: Running, crowd: Crowd) -> Follow:
    """One is killed and, while it starts again, a second gets an argument and a third an alias, after a mistake that changes nothing."""
    pids = {name: gateway.server_of(name)[1] for name in NAMES}
    killed, changed = Follow(gateway, CHAT, 700), Follow(gateway, GEMMA, 60)
    with crowd.while_cut("by an engine's end", CHAT):
        os.killpg(pids[CHAT], signal.SIGKILL)
        killed.join()
        gateway.mistake(OTHER, colour="red")
        gateway.change(OTHER, aliases=["gpt-4o-mini"])
        gateway.change(GEMMA, args=[*gateway.models[GEMMA]["args"], "--max-num-batched-tokens", "1024"])
        changed.join()
        wait_for(lambda: gateway.count(f"{GEMMA}: end took"))
        for name in (CHAT, GEMMA):
            until_it_is_back(gateway, name)
    assert {name for name in NAMES if gateway.server_of(name)[1] != pids[name]} == {CHAT, GEMMA}
    assert killed.events[-1]["error"]["code"] == "upstream_lost"
    assert not killed.is_whole
    assert (changed.is_whole, len(changed.tokens)) == (True, 60)
    return killed


def restart_the_gateway(gateway: Running, crowd: Crowd, number: signal.Signals) -> Follow:
    stream = Follow(gateway, OTHER, 700)
    with crowd.while_cut(f"by a gateway's {number.name}"):
        gateway.process.send_signal(number)
        assert gateway.process.wait(900) == (0 if number is signal.SIGTERM else -number)
        stream.join()
        gateway.start()
        for name in NAMES:
            until_it_is_back(gateway, name)
    return stream


def test_nothing_is_lost_while_engines_and_the_gateway_come_and_go(gateway: Running, known: dict[str, list[Reference]]) -> None:
    crowd = Crowd(gateway, known)
    try:
        crowd.goes_on()
        sleep_and_wake(gateway, crowd)
        streams = [kill_an_engine_and_change_the_file(gateway, crowd)]
        streams.append(restart_the_gateway(gateway, crowd, signal.SIGKILL))
        assert not streams[-1].is_whole
        streams.append(restart_the_gateway(gateway, crowd, signal.SIGTERM))
        assert streams[-1].is_whole or streams[-1].events[-1]["error"]["code"] == "shutting_down"
        crowd.end()
    finally:
        crowd.kill()
    counts = crowd.check()
    sys.stdout.write(f"{json.dumps(counts, indent=1)}\n")
    assert counts["whole"] >= 5 * len(NAMES) * len(PHRASES), "all models answered both clients between any two of the things that were done"
    (alias,) = ask(gateway, question("gpt-4o-mini", known[OTHER][0].content))
    assert alias["tokens"] == known[OTHER][0].tokens
    for stream in streams:
        stream.check(gateway)
