# SPDX-License-Identifier: Apache-2.0
"""One address for a real vLLM and a real SGLang: what it answers is what they answer; they sleep, wake, and one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gateway import ALPHA, BETA, BUDGET_BYTES, KINDS, Running, call, lines_of, wait_for
from serving import ROOT, missing

from kvcached import processes
from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path
from kvcached.testing.kinds import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3_600),
    pytest.mark.xdist_group("gateway"),
    pytest.mark.skipif(bool(missing(VLLM, SGLANG)), reason=missing(VLLM, SGLANG)),
]

TOGETHER = 5
OF_ONE_ANSWER = re.compile(rb'"(id|created)":("[^"]*"|\d+)')


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    it = Running(tmp_path_factory.mktemp("gateway"))
    try:
        for name in KINDS:
            it.until(name, "ready")
        yield it
        assert it.close() == [], "an engine outlived the gateway"
    finally:
        it.kill()


def question(name: str, prompt: str = "Name three rivers.", tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0, **more}


def with_the_openai_client(port: int, name: str) -> list[dict[str, Any]]:
    """A streamed and a whole answer, of the official client."""
    asked = [{"prompt": "Name three rivers.", "max_tokens": 16, "stream": stream, "hang_up_after": None} for stream in (True, False)]
    command = [str(SGLANG.python(ROOT)), str(Path(__file__).with_name("crowd.py")), f"http://127.0.0.1:{port}/v1", name]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=1_900, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def without_what_differs(body: bytes) -> bytes:
    return OF_ONE_ANSWER.sub(rb'"\1":0', body)


def as_if_token_by_token(body: bytes) -> tuple[str, list[bytes]]:
    """A stream's text, and its lines without that, each once: engines put tokens that are ready together into one event."""
    text, lines = "", []
    for line in without_what_differs(body).split(b"\n"):
        pieces = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        for choice in pieces.get("choices", ()):
            text += choice["delta"].pop("content", None) or ""
        bare = json.dumps(pieces).encode() if pieces else line
        lines += [bare] if bare and bare not in lines[-1:] else []
    return text, lines


def test_models_are_listed_and_their_answers_are_those_of_their_engines(gateway: Running) -> None:
    listed = json.loads(call(gateway.port, "GET", "/v1/models")[1])
    assert [card["id"] for card in listed["data"]] == [ALPHA, BETA]
    for name in KINDS:
        engine_port, _ = gateway.server_of(name)
        (status, direct), (_, through) = (
            call(port, "POST", "/v1/chat/completions", question(name)) for port in (engine_port, gateway.port)
        )
        assert (status, without_what_differs(through)) == (200, without_what_differs(direct))
        (choice,) = json.loads(direct)["choices"]
        expected = {"text": choice["message"]["content"], "ended": choice["finish_reason"]}

        streamed = [call(port, "POST", "/v1/chat/completions", question(name, stream=True)) for port in (engine_port, gateway.port)]
        (_, direct), (status, through) = streamed
        assert (status, as_if_token_by_token(through)) == (200, as_if_token_by_token(direct))
        assert as_if_token_by_token(through)[0] == expected["text"]
        assert with_the_openai_client(gateway.port, name) == [expected, expected]
        wrong = question(name, tokens=-1)
        assert call(gateway.port, "POST", "/v1/chat/completions", wrong) == call(engine_port, "POST", "/v1/chat/completions", wrong)


def test_an_idle_model_gives_its_memory_back_and_many_requests_wake_it_once(gateway: Running) -> None:
    for name in KINDS:
        call(gateway.port, "POST", "/v1/chat/completions", question(name, "Tell a long story. " * 30, 32))
        gateway.change(name, ttl_s=0.5)
        gateway.until(name, "asleep")
        control = ControlClient(endpoint_path(gateway.run_dir, name))
        page_bytes = control.status().page_bytes
        wait_for(lambda control=control, page_bytes=page_bytes: control.status().held_bytes == page_bytes)  # a last step may still end
        limited = json.loads(call(gateway.port, "POST", f"/action/limit/{name}?limit=50%25")[1])
        assert limited["limit_bytes"] == [control.status().limit_bytes] == [BUDGET_BYTES // 2]
        gateway.change(name, ttl_s=None)
        pid = gateway.server_of(name)[1]
        with ThreadPoolExecutor(TOGETHER) as threads:
            answers = list(
                threads.map(lambda _, name=name: call(gateway.port, "POST", "/v1/chat/completions", question(name)), range(TOGETHER))
            )
        assert [status for status, _ in answers] == [200] * TOGETHER
        assert gateway.count(f"{name}: wake up (") == 1
        assert gateway.server_of(name)[1] == pid


def test_kill_9_loses_nothing_that_had_not_begun_to_stream(gateway: Running) -> None:
    whole = question(ALPHA, "Count to a thousand.", 400, ignore_eos=True)
    long = {**whole, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    prompts = [f"Write about the number {number}." for number in range(TOGETHER)]
    began, lines = threading.Event(), []

    def follow() -> None:
        for line in lines_of(gateway.port, "/v1/chat/completions", long):
            lines.append(line)
            if len(lines) > 20:
                began.set()

    stream = threading.Thread(target=follow)
    stream.start()
    assert began.wait(600)
    _, pid = gateway.server_of(ALPHA)
    with ThreadPoolExecutor(TOGETHER) as threads:
        asked = [
            threads.submit(call, gateway.port, "POST", "/v1/chat/completions", question(ALPHA, prompt, 96, ignore_eos=True))
            for prompt in prompts
        ]
        wait_for(lambda: gateway.facts(ALPHA)["open"] == 1 + TOGETHER)
        os.killpg(pid, signal.SIGKILL)
        stream.join(600)
        assert call(gateway.port, "POST", "/v1/chat/completions", question(BETA))[0] == 200, "the other model went on"
        answers = [one.result() for one in asked]

    said = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert said[-1]["error"]["code"] == "upstream_lost"
    assert all("choices" in piece for piece in said[:-1])
    assert not any(b"[DONE]" in line for line in lines)

    assert [status for status, _ in answers] == [200] * TOGETHER
    assert gateway.server_of(ALPHA)[1] != pid
    assert gateway.count(f"{ALPHA}: start (") == 2
    metrics = call(gateway.port, "GET", f"/upstream/{ALPHA}/metrics")[1].decode()
    ended = re.findall(r"^vllm:request_success_total\{.*\} ([0-9.]+)$", metrics, re.MULTILINE)
    assert sum(float(count) for count in ended) == TOGETHER, "the new engine was asked something twice, or the broken stream again"

    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in said[:-1])
    tokens = said[-2]["usage"]["completion_tokens"]  # an event has all that are ready: several, where the reader was slow
    again = json.loads(call(gateway.port, "POST", "/v1/chat/completions", {**whole, "max_tokens": tokens + 1})[1])
    assert text
    assert again["choices"][0]["message"]["content"].startswith(text)


def test_engines_go_on_while_their_gateway_is_killed_or_hands_over(gateway: Running) -> None:
    def found() -> dict[str, Any]:
        facts = {name: (gateway.facts(name)["state"], gateway.server_of(name)) for name in KINDS}
        answers = {name: call(gateway.port, "POST", "/v1/chat/completions", question(name)) for name in KINDS}
        return {name: (*facts[name], answers[name][0], without_what_differs(answers[name][1])) for name in KINDS}

    gateway.until(BETA, "ready")
    before = found()
    assert {status for _, _, status, _ in before.values()} == {200}
    gateway.process.kill()
    gateway.process.wait()
    gateway.start()
    assert found() == before

    with ThreadPoolExecutor(1) as threads:
        body = question(ALPHA, "Count to a thousand.", 128, ignore_eos=True, stream=True)
        stream = threads.submit(lambda: list(lines_of(gateway.port, "/v1/chat/completions", body)))
        wait_for(lambda: gateway.facts(ALPHA)["open"] == 1)
        gateway.process.send_signal(signal.SIGUSR1)
        assert gateway.process.wait(600) == 0
        assert b"data: [DONE]\n" in stream.result()
    gateway.start()
    assert found() == before
    assert gateway.count("adopted process") == 2 * len(KINDS)


def test_engines_end_with_their_model_and_what_nobody_adopts_with_the_next_gateway(gateway: Running) -> None:
    leaders = {name: gateway.server_of(name)[1] for name in KINDS}
    gateway.remove(BETA)
    wait_for(lambda: gateway.count(f"{BETA}: removed"))
    assert processes.of_session(leaders[BETA]) == []
    assert call(gateway.port, "POST", "/v1/chat/completions", question(BETA))[0] == 404

    gateway.process.kill()
    gateway.process.wait()
    assert leaders[ALPHA] in processes.of_session(leaders[ALPHA])
    gateway.models[ALPHA] |= {"preload": False, "env": {**gateway.models[ALPHA]["env"], "COLOUR": "red"}}
    gateway.start()
    assert processes.of_session(leaders[ALPHA]) == []
    assert gateway.facts(ALPHA)["state"] == "stopped"
