# SPDX-License-Identifier: Apache-2.0
"""The official clients of OpenAI and Anthropic, which lie in vLLM's environment, as a program.

`python clients.py ask URL < questions`: one after the other, never repeated; answers to stdout, as JSON. `together`: all at once.
`python clients.py crowd URL SHARE < SHARE/questions`: one thread for each list of questions, which asks them in turn without a pause until
the file SHARE/end is there; an answer is a line of SHARE/answers. Repeats are the clients' own: of what was refused or reset.

A question has `client` (openai or anthropic), `stream`, `key`, and `request`, what the client is
called with. Of an answer see `Answer`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai

TIMEOUT_S = 1_800.0
REPEATS = 1_000
"""The clients' own default is 2, which does not outlast a gateway that is started again."""
CUT = (openai.OpenAIError, anthropic.AnthropicError, httpx.HTTPError, httpx2.HTTPError)


@dataclass
class Answer:
    """`tokens`: of OpenAI's chat with `logprobs`, the engine's own, with how much likelier each was than the next. `pieces`: of a stream,
    how many had text. `ended`: the reason that was given; None where the answer was cut or refused. Times are of `time.time`."""

    question: dict[str, Any]
    begin_s: float
    end_s: float = 0.0
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    pieces: int = 0
    began: bool = False
    ended: str | None = None
    error: dict[str, Any] | None = None

    def add(self, choice: Any, said: Any) -> None:
        """A choice of OpenAI's, and its message or what is new of that."""
        self.text += said.content or ""
        self.pieces += bool(said.content)
        self.calls += [[call.function.name or "", call.function.arguments or ""] for call in said.tool_calls or ()]
        self.ended = choice.finish_reason or self.ended
        for token in choice.logprobs.content or () if choice.logprobs else ():
            self.tokens.append(token.token)
            likely = sorted((one.logprob for one in token.top_logprobs), reverse=True)
            self.margins.append(likely[0] - likely[1] if len(likely) > 1 else 0.0)

    def heed(self, event: Any) -> None:
        """An event of Anthropic's."""
        self.began = True
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            self.text += event.delta.text
            self.pieces += 1
        if event.type == "message_delta":
            self.ended = event.delta.stop_reason or self.ended


class Clients:
    def __init__(self, url: str, repeats: int) -> None:
        self._url = url
        self._repeats = repeats

    def ask(self, question: dict[str, Any]) -> Answer:
        answer = Answer(question, time.time())
        try:
            with_client = self._with_anthropic if question["client"] == "anthropic" else self._with_openai
            with_client(answer)
        except CUT as error:
            answer.error, answer.ended = facts_of(error), None
        answer.end_s = time.time()
        return answer

    def _with_openai(self, answer: Answer) -> None:
        question = answer.question
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key=question["key"], max_retries=self._repeats, timeout=TIMEOUT_S) as client:
            if not question["stream"]:
                (choice,) = client.chat.completions.create(**question["request"]).choices
                answer.add(choice, choice.message)
                return
            with client.chat.completions.create(**question["request"], stream=True) as stream:
                answer.began = True
                for piece in stream:
                    for choice in piece.choices:
                        answer.add(choice, choice.delta)

    def _with_anthropic(self, answer: Answer) -> None:
        question = answer.question
        with anthropic.Anthropic(base_url=self._url, api_key=question["key"], max_retries=self._repeats, timeout=TIMEOUT_S) as client:
            if not question["stream"]:
                message = client.messages.create(**question["request"])
                answer.text = "".join(block.text for block in message.content if block.type == "text")
                answer.calls = [[block.name, json.dumps(block.input)] for block in message.content if block.type == "tool_use"]
                answer.ended = message.stop_reason
                return
            with client.messages.create(**question["request"], stream=True) as stream:
                answer.began = True
                for event in stream:
                    answer.heed(event)


def facts_of(error: Exception) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return {
        "type": type(error).__name__,
        "text": str(error),
        "status": getattr(error, "status_code", None),
        "body": getattr(error, "body", None),
        "retry_after": None if response is None else response.headers.get("retry-after"),
    }


def crowd(url: str, share: Path) -> None:
    clients, lock = Clients(url, REPEATS), threading.Lock()
    with (share / "answers").open("w") as answers:

        def go_on(questions: list[dict[str, Any]]) -> None:
            turn = 0
            while not (share / "end").exists():
                answer = clients.ask(questions[turn % len(questions)])
                turn += 1
                with lock:
                    answers.write(json.dumps(asdict(answer)) + "\n")
                    answers.flush()

        threads = [threading.Thread(target=go_on, args=(questions,)) for questions in json.load(sys.stdin)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main(what: str, url: str, *share: str) -> None:
    if what == "crowd":
        crowd(url, Path(share[0]))
        return
    questions = json.load(sys.stdin)
    with ThreadPoolExecutor(len(questions) if what == "together" else 1) as threads:
        json.dump([asdict(answer) for answer in threads.map(Clients(url, 0).ask, questions)], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
