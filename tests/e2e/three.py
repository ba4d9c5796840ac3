# SPDX-License-Identifier: Apache-2.0
"""Three engines behind one gateway, and clients that never stop asking them: what they are asked, and what must be true of the answers."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import Running, engine_of, lines_of, wait_for
from serving import MIB, RELEASES, ROOT

from kvcached.controller.ports import free_port
from kvcached.testing.kinds import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

GEMMA_MODEL = ROOT / ".cache" / "models" / "gemma3-270m"
CHAT, GEMMA, OTHER = "chat", "gemma", "other"
NAMES = (CHAT, GEMMA, OTHER)
KEY, CHAT_KEY = "opens-everything", "opens-the-chat"
PHRASES = {"openai": {"stop": "stop", "length": "length"}, "anthropic": {"stop": "end_turn", "length": "max_tokens"}}
CLEAR = 0.02
"""By how much in logarithm a token was likelier than the next: far more than what a batch of another size does to a float32."""
SUBJECTS = ("rivers", "the moon", "bread", "trains", "a lighthouse", "winter")
TOKENS = 20
TURNS = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    "<start_of_turn>model\n"
)


def start(folder: Path) -> Running:
    """SmolLM2 by vLLM, which can call tools, Gemma 3 by vLLM, and SmolLM2 by SGLang."""
    make_gemma()
    template = folder / "turns.jinja"
    template.write_text(TURNS)
    chat, gemma = engine_of(VLLM), engine_of(VLLM, model=str(GEMMA_MODEL))
    chat["args"] = [*chat["args"], "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    gemma["args"] = [*gemma["args"], "--chat-template", str(template)]
    models = {CHAT: chat, GEMMA: gemma, OTHER: engine_of(SGLANG)}
    return Running(folder, models, free_port(), [KEY, {"key": CHAT_KEY, "models": [CHAT]}], 768 * MIB)


def make_gemma() -> None:
    """Where it is missing; only an engine's environment has what that needs."""
    environment = VLLM.variables(RELEASES[VLLM], os.environ)
    environment["PYTHONPATH"] += f":{ROOT / 'src'}"
    words = [str(VLLM.python(ROOT)), "-m", "kvcached.testing.models", "gemma3-270m", str(GEMMA_MODEL)]
    subprocess.run(words, env=environment, check=True, timeout=1_800)


def question(name: str, content: str, client: str = "openai", *, stream: bool = False, key: str = KEY, **more: Any) -> dict[str, Any]:
    request = {"model": name, "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
    of_client = {"openai": {"temperature": 0, "logprobs": True, "top_logprobs": 2}, "anthropic": {"extra_body": {"temperature": 0}}}
    return {"client": client, "stream": stream, "key": key, "request": {**request, **of_client[client], **more}}


def url_of(gateway: Running) -> str:
    return f"http://127.0.0.1:{gateway.port}"


def command(*words: str) -> list[str]:
    return [str(VLLM.python(ROOT)), str(Path(__file__).with_name("clients.py")), *words]


def ask(gateway: Running, *questions: dict[str, Any], how: str = "ask") -> list[dict[str, Any]]:
    """Each once, one after the other, or `together`."""
    done = subprocess.run(
        command(how, url_of(gateway)), input=json.dumps(questions), capture_output=True, text=True, timeout=1_900, check=False
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@dataclass(frozen=True)
class Reference:
    """What a model says to a prompt when it is asked nothing else."""

    content: str
    text: str
    tokens: list[str]
    ended: str


def references(gateway: Running, name: str, least: int = 2) -> list[Reference]:
    """Answers without a token for which another was nearly as likely: what floating point does in a batch cannot change these."""
    contents = [f"Tell me something about {subject}." for subject in SUBJECTS]
    answers = ask(gateway, *(question(name, content, stream=True) for content in contents))
    assert [answer["error"] for answer in answers] == [None] * len(answers)
    clear = [
        Reference(content, answer["text"], answer["tokens"], answer["ended"])
        for content, answer in zip(contents, answers, strict=True)
        if min(answer["margins"]) > CLEAR and len(answer["tokens"]) > TOKENS // 2
    ]
    assert len(clear) >= least, [(answer["text"], min(answer["margins"])) for answer in answers]
    return clear


@dataclass
class Happening:
    """From when to when something was done that may cut streams that have begun; `name`: of whom, None: of all."""

    what: str
    name: str | None
    begin_s: float = field(default_factory=time.time)
    end_s: float = 0.0

    def explains(self, answer: dict[str, Any]) -> bool:
        in_time = self.begin_s <= answer["end_s"] and answer["begin_s"] <= self.end_s
        return in_time and self.name in (None, answer["question"]["request"]["model"])


class Crowd:
    """Nine clients that never stop: for each model one that streams, one that does not, and one that streams from Anthropic's path."""

    def __init__(self, gateway: Running, known: dict[str, list[Reference]]) -> None:
        self._known = {(name, one.content): one for name in known for one in known[name]}
        self._share = gateway.folder / "crowd"
        self._share.mkdir()
        self.happenings: list[Happening] = []
        questions = [
            [question(name, one.content, client, stream=stream) for client in clients for one in known[name]]
            for name in known
            for clients, stream in ((("openai",), True), (("openai", "anthropic"), False), (("anthropic",), True))
        ]
        with (self._share / "said").open("wb") as said:
            self.process = subprocess.Popen(
                command("crowd", url_of(gateway), str(self._share)), stdin=subprocess.PIPE, stdout=said, stderr=said
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(questions).encode())
        self.process.stdin.close()

    @property
    def is_there(self) -> bool:
        return self.process.poll() is None

    def answers(self) -> list[dict[str, Any]]:
        path = self._share / "answers"
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []

    def goes_on(self) -> None:
        """Returns when each model has answered a question that was asked after this, with either client."""
        since_s, wanted = time.time(), {(name, client) for name in NAMES for client in PHRASES}

        def answered() -> bool:
            good = [answer for answer in self.answers() if answer["begin_s"] > since_s and answer["error"] is None]
            return {(answer["question"]["request"]["model"], answer["question"]["client"]) for answer in good} == wanted

        wait_for(lambda: not self.is_there or answered())
        assert self.is_there, (self._share / "said").read_text()[-4_000:]

    @contextmanager
    def while_cut(self, what: str, name: str | None = None) -> Iterator[None]:
        """Streams that have begun may be cut meanwhile; it ends when all goes on."""
        happening = Happening(what, name)
        yield
        self.goes_on()
        happening.end_s = time.time()
        self.happenings.append(happening)

    def end(self) -> None:
        (self._share / "end").touch()
        assert self.process.wait(1_900) == 0, (self._share / "said").read_text()[-4_000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    # ------------------------------------------------------------------ what must be true

    def check(self) -> dict[str, int]:
        """Each answer is whole and the same as alone, or it had begun and was cut by what was done then. Returns how many were what."""
        counts: dict[str, int] = {}
        for answer in self.answers():
            what = self._check(answer)
            counts[what] = counts.get(what, 0) + 1
        return counts

    def _check(self, answer: dict[str, Any]) -> str:
        asked = answer["question"]
        known = self._known[asked["request"]["model"], asked["request"]["messages"][0]["content"]]
        if answer["error"] is None:
            assert answer["text"] == known.text, (answer, known)
            assert answer["ended"] == PHRASES[asked["client"]][known.ended], answer
            assert answer["tokens"] == (known.tokens if asked["client"] == "openai" else []), (answer, known)
            return "whole"
        assert answer["began"], f"lost, though it had not begun: {answer}"
        assert known.text.startswith(answer["text"]), (answer, known)
        assert answer["tokens"] == known.tokens[: len(answer["tokens"])], (answer, known)
        causes = [happening.what for happening in self.happenings if happening.explains(answer)]
        assert causes, f"nothing was done that would explain it: {answer}"
        return f"cut {' or '.join(causes)}: {told(answer)}"


def told(answer: dict[str, Any]) -> str:
    """How the client learnt that its stream was cut. An error event must have the shape of the API."""
    error, body = answer["error"], answer["error"]["body"]
    if body is None:
        return f"{answer['question']['client']} {error['type']}"
    if answer["question"]["client"] == "anthropic":
        assert body.keys() == {"type", "error"}, body
        assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
        return f"anthropic {error['type']} {body['error']['type']}"
    assert body.keys() == {"message", "type", "param", "code"}, body
    return f"openai {error['type']} {body['code']}"


class Follow:
    """One long stream, looked at line by line."""

    def __init__(self, gateway: Running, name: str, tokens: int) -> None:
        self.body = {**question(name, "Count to a thousand.", ignore_eos=True)["request"], "max_tokens": tokens}
        self.lines: list[bytes] = []
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._follow, args=(gateway.port,), daemon=True)
        self._thread.start()
        assert self._began.wait(900), "the long stream did not begin"

    def _follow(self, port: int) -> None:
        try:
            for line in lines_of(port, "/v1/chat/completions", {**self.body, "stream": True}, KEY):
                self.lines.append(line)
                if len(self.lines) > 10:
                    self._began.set()
        except (OSError, http.client.HTTPException) as error:
            self.lines.append(f": {error}\n".encode())

    def join(self) -> None:
        self._thread.join(900)
        assert not self._thread.is_alive()

    @property
    def is_whole(self) -> bool:
        return any(b"[DONE]" in line for line in self.lines)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.lines if line.startswith(b"data: {") and line.endswith(b"}\n")]

    @property
    def tokens(self) -> list[str]:
        choices = [choice for event in self.events for choice in event.get("choices", ()) if choice.get("logprobs")]
        return [token["token"] for choice in choices for token in choice["logprobs"]["content"]]

    def check(self, gateway: Running) -> None:
        """Its tokens are those that are said to the same question now, as far as no other was nearly as likely."""
        status, body = gateway.call("POST", "/v1/chat/completions", {**self.body, "max_tokens": len(self.tokens)})
        assert status == 200, body
        again = json.loads(body)["choices"][0]["logprobs"]["content"]
        margins = [
            likely[0] - likely[1] for one in again if (likely := sorted((top["logprob"] for top in one["top_logprobs"]), reverse=True))
        ]
        clear = next((place for place, margin in enumerate(margins) if margin <= CLEAR), len(again))
        assert clear > 3, (margins, "too few to say anything")
        assert self.tokens[:clear] == [one["token"] for one in again[:clear]]
