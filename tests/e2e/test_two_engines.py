# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers on a card with room for 1.3 of them: bursts in turn for two minutes, one killed half-way and started again."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from http.client import HTTPException
from typing import TYPE_CHECKING

import pytest
from serving import MIB, PYTHON, CardOfEngines, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; make engines sets it up"),
]

TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # SmolLM2: layers, K and V, heads, head size, float32
FULL_BYTES = 8 * 512 * TOKEN_BYTES  # what one engine would reserve for its 8 sequences of 512 tokens
BUDGET_BYTES = int(1.3 * FULL_BYTES) // MIB * MIB
TOPICS = [
    "the lighthouse keeper",
    "a river that forgot its name",
    "the last train of the evening",
    "an orchard under snow",
    "two clockmakers",
    "the library beneath the harbour",
    "a letter that arrived late",
    "the gardener and the storm",
    "a map with one road",
    "the quiet parade",
    "a bridge of glass",
    "the winter market",
]


SEASONS = ["in spring", "in high summer", "in autumn", "in the long winter"]


def prompts(turn: int) -> list[str]:
    """Eight long prompts; half of them come again in the next turn, so that prefixes are worth keeping."""
    subjects = [f"{TOPICS[(turn * 4 + index) % len(TOPICS)]} {SEASONS[(turn * 4 + index) // len(TOPICS) % 4]}" for index in range(8)]
    return [f"Here are notes about {subject}. " * 30 + f"Tell the story of {subject} in a few calm sentences:" for subject in subjects]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CardOfEngines]:
    card = CardOfEngines(tmp_path_factory.mktemp("card"), BUDGET_BYTES)
    yield card
    card.close()


class Load:
    """Bursts to engines; the same prompt must always be answered in the same words."""

    def __init__(self) -> None:
        self.turn = 0
        self.asked = 0
        self.served: Counter[str] = Counter()
        self._said: dict[str, str] = {}

    def burst(self, engine: Server, turn: int | None = None) -> None:
        questions = prompts(self.turn if turn is None else turn)
        self.asked += len(questions)
        for question, text in zip(questions, engine.burst(questions), strict=True):
            assert self._said.setdefault(question, text) == text, "the same prompt was answered differently"
            self.served[engine.name] += 1

    def take_turns(self, engines: list[Server], seconds: float) -> None:
        """One engine after the other, every third burst to all of them at once."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            busy = engines if self.turn % 3 == 2 else [engines[self.turn % len(engines)]]
            threads = [threading.Thread(target=self.burst, args=(engine,)) for engine in busy]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.turn += 1
        assert self.served.total() == self.asked, "a request failed"


def kill_in_mid_burst(card: CardOfEngines, engine: Server) -> float:
    """Seconds until the card's record shows nothing of it any more."""

    def ask_in_vain() -> None:
        with pytest.raises((OSError, HTTPException)):
            engine.burst(prompts(1), 64)

    doomed = threading.Thread(target=ask_in_vain)
    doomed.start()
    time.sleep(2)
    start = time.monotonic()
    engine.kill()
    while engine.name in card.leases():
        assert time.monotonic() < start + 20
        time.sleep(0.005)
    seconds = time.monotonic() - start
    doomed.join()
    return seconds


def test_two_engines_share_a_card_through_bursts_a_kill_and_limits(
    card: CardOfEngines, record_property: Callable[[str, object], None]
) -> None:
    first, second = card.start("first"), card.start("second")
    first.wait_ready()
    second.wait_ready()
    load = Load()
    load.take_turns([first, second], 60)
    peaks = [max(leases.get(engine.name, 0) for _, leases in card.samples) for engine in (first, second)]
    assert sum(peaks) > BUDGET_BYTES, f"the engines never competed: {peaks}"

    held_by_second = card.leases()["second"]
    record_property("seconds until the dead engine's lease was gone", kill_in_mid_burst(card, second))
    load.take_turns([first], 60)
    assert card.leases()["first"] > BUDGET_BYTES - held_by_second, "the survivor did not take the memory over"

    # Another engine starts on a card that the first one's cached prefixes fill.
    third = card.start("third").wait_ready()
    load.burst(third, 0)

    # An idle engine with a full prefix cache obeys its limit, down and up again; its answers stay right.
    start = time.monotonic()
    answer = card.kvctl("limit", "first", "48MiB")
    record_property("seconds for kvctl limit, Python's start included", time.monotonic() - start)
    assert answer["outcome"] == "applied", answer
    assert card.leases()["first"] <= 48 * MIB
    card.kvctl("limit-percent", "first", "100")
    for turn in range(3):
        load.burst(first, turn)
    card.kvctl("trim", "first")

    assert card.overcommitted == []
    for engine in (first, third):
        engine.signal(signal.SIGTERM)
    end = time.monotonic() + 30
    while card.leases() and time.monotonic() < end:
        time.sleep(0.2)
    card.close()  # vLLM may wait for ever for its connections after SIGTERM
    assert card.leases() == {}
