# SPDX-License-Identifier: Apache-2.0
"""The demo's client and its bursts, against a small HTTP server that answers as an OpenAI-compatible one does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from examples.demo.ask import Server, ask, healthy
from examples.demo.load import Load, LoadPlan, Questioner
from examples.demo.series import Answer, Story

from kvcached.controller.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator


class OpenAiDouble(ThreadingHTTPServer):
    """Counts requests and how many ran at once. A prompt that holds `boom` fails, one that holds `garbage` gets no JSON."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.guard = threading.Lock()
        self.seen: list[dict[str, Any]] = []

    @property
    def server(self) -> Server:
        return Server("facts", self.server_address[1], max_tokens=7, timeout_s=5.0)


class _Handler(BaseHTTPRequestHandler):
    server: OpenAiDouble

    def do_GET(self) -> None:
        self._reply(200 if self.path == "/health" else 404, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.guard:
            self.server.seen.append(body)
        prompt = body["messages"][-1]["content"]
        if "boom" in prompt:
            self._reply(500, b"no memory")
        elif "garbage" in prompt:
            self._reply(200, b"not json")
        else:
            message = {"choices": [{"message": {"content": f" about {prompt} "}}], "usage": {"completion_tokens": 3}}
            self._reply(200, json.dumps(message).encode())

    def _reply(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def double() -> Iterator[OpenAiDouble]:
    with OpenAiDouble() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_has_text_and_tokens(double: OpenAiDouble) -> None:
    answer = ask(double.server, "bees")
    assert (answer.engine, answer.prompt, answer.text, answer.tokens, answer.error) == ("facts", "bees", "about bees", 3, "")
    (body,) = double.seen
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("facts", 7, 0)


@pytest.mark.parametrize(("prompt", "error"), [("boom", "HTTP 500: no memory"), ("garbage", "JSONDecodeError")])
def test_a_bad_reply_is_an_answer_with_an_error(double: OpenAiDouble, prompt: str, error: str) -> None:
    answer = ask(double.server, prompt)
    assert answer.text == ""
    assert error in answer.error


def test_nobody_listening_is_an_error_and_not_healthy() -> None:
    server = Server("facts", free_ports(1)[0], 1)
    assert "refused" in ask(server, "hello").error
    assert not healthy(server)


def test_a_listening_server_is_healthy(double: OpenAiDouble) -> None:
    assert healthy(double.server)


def run_load(double: OpenAiDouble, plan: LoadPlan, prompts: tuple[str, ...] = ("a", "b", "c")) -> tuple[Story, list[int]]:
    story = Story(("facts", "stories"), 1)
    other = Server("stories", double.server.port, 7)
    ticks: list[int] = []
    questioners = [Questioner(double.server, prompts), Questioner(other, prompts)]
    Load(questioners, plan, story, ask, lambda: ticks.append(len(story.answers)), lambda _: None).run()
    return story, ticks


def test_every_burst_of_both_engines_is_answered(double: OpenAiDouble) -> None:
    story, ticks = run_load(double, LoadPlan(bursts=4, size=3, seconds=30, tick_s=0.02))
    assert story.asked == {"facts": 6, "stories": 6}
    assert [story.running(name) for name in story.names] == [0, 0]
    assert sorted(answer.prompt for answer in story.answered("stories")) == ["a", "a", "b", "b", "c", "c"]
    assert ticks[-1] == 12


def test_failed_requests_end_a_burst_too(double: OpenAiDouble) -> None:
    story, _ = run_load(double, LoadPlan(bursts=2, size=2, seconds=30, tick_s=0.02), prompts=("boom",))
    assert [answer.error != "" for answer in story.answers] == [True] * 4


def test_no_burst_starts_after_the_time_is_over(double: OpenAiDouble) -> None:
    story, _ = run_load(double, LoadPlan(bursts=50, size=1, seconds=0.0, tick_s=0.02))
    assert 1 <= len(story.answers) < 50


def test_an_interrupt_stops_the_load(double: OpenAiDouble) -> None:
    story = Story(("facts",), 1)

    def interrupt() -> None:
        raise KeyboardInterrupt

    load = Load([Questioner(double.server, ("a",))], LoadPlan(8, 2, 30, 0.02), story, ask, interrupt, lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        load.run()
    assert story.asked == {"facts": 2}


def test_an_answer_of_an_unexpected_shape_is_an_error(double: OpenAiDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.demo.ask._post", lambda *_: {"choices": []})
    assert ask(double.server, "x") == Answer("facts", "x", error="IndexError: list index out of range")
