# SPDX-License-Identifier: Apache-2.0
"""Two hundred people at once at a real SGLang server with memory for some fifteen of them; some go away early."""

from __future__ import annotations

import json
import re
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from examples.demo.prompts import FACTS, STORIES
from serving import MIB, ROOT, CardOfEngines, missing

from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path
from kvcached.testing.kinds import SGLANG, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3_600),
    pytest.mark.xdist_group("sglang_crowd"),
    pytest.mark.skipif(bool(missing(SGLANG)), reason=missing(SGLANG)),
]

CROWD = 200
WAIT_S = 600.0
SHAPE = Shape(32, 512, 16)
LIMIT_BYTES = 32 * MIB  # some 700 tokens
EAGER = ("--schedule-conservativeness", "0.05")  # lets those in whose prompts fit, so that some who want long answers are retracted
LONG_ANSWERS, LONG_TOKENS = 20, 48
QUEUED_REQUESTS = re.compile(r"#queue-req: (\d+)")
READERS = ("a child", "a sailor", "a judge", "a gardener", "a visitor from far away")


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    max_tokens: int
    stream: bool
    hang_up_after: int | None = None


def crowd() -> list[Question]:
    """A different prompt each; a third of the answers are streamed, and every tenth person leaves a long one after a few words."""
    prompts = [f"{prompt} Explain it to {reader}." for reader in READERS for prompt in (*FACTS, *STORIES)][:CROWD]
    return [
        Question(prompt, 200, stream=True, hang_up_after=2 + number % 3)
        if number % 10 == 7
        else Question(prompt, LONG_TOKENS if number < LONG_ANSWERS else 8 + number % 9, stream=number % 3 == 0)
        for number, prompt in enumerate(prompts)
    ]


def ask(server: Server, questions: list[Question]) -> list[dict[str, Any]]:
    """All at once, with the OpenAI client."""
    client = [str(SGLANG.python(ROOT)), str(Path(__file__).with_name("crowd.py")), f"http://127.0.0.1:{server.port}/v1", server.name]
    asked = json.dumps([asdict(question) for question in questions])
    done = subprocess.run(client, input=asked, capture_output=True, text=True, timeout=1_900, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def wait_for(condition: Callable[[], Any]) -> Any:
    """The condition's value once it holds, else its last value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


@pytest.fixture
def card(tmp_path: Path) -> Iterator[CardOfEngines]:
    card = CardOfEngines(tmp_path, 4 * LIMIT_BYTES)
    yield card
    card.close()


def test_a_crowd_is_answered_and_leaves_nothing_behind(card: CardOfEngines) -> None:
    server = card.start("crowd", SGLANG, SHAPE, EAGER, LIMIT=LIMIT_BYTES).wait_until_ready()
    control = ControlClient(endpoint_path(card.run_dir, "crowd"))
    questions = crowd()
    stay = [number for number, question in enumerate(questions) if question.hang_up_after is None]
    some = stay[::25]
    alone = [ask(server, [questions[number]])[0] for number in some]

    answers = ask(server, questions)
    assert [number for number in stay if not answers[number]["text"] or answers[number]["ended"] not in ("length", "stop")] == []
    assert [answers[number] for number in some] == alone
    assert max(map(int, QUEUED_REQUESTS.findall(server.log))) > CROWD // 2, "nobody had to wait"
    assert "KV cache pool is full. Retract requests." in server.log, "nobody was retracted"
    assert card.peak_bytes("crowd") <= LIMIT_BYTES
    assert card.overcommitted == []

    def given_back() -> bool:
        control.evict(card.budget_bytes)
        control.trim()
        return control.status().held_bytes == control.status().page_bytes

    assert wait_for(given_back), control.status()
    assert wait_for(lambda: card.leases()["crowd"] == control.status().page_bytes)
    assert server.process.poll() is None
    assert "leak" not in server.log.lower(), "SGLang's own checks found something"
    assert ask(server, [questions[some[0]]]) == alone[:1]
