# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers on a card with room for 1.3 of them: bursts in turn for two minutes, one killed half-way and started again."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from serving import MIB, PYTHON, CardOfEngines

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


def prompts(turn: int) -> list[str]:
    """Eight long prompts; half of them come again in later turns, so that prefixes are worth keeping."""
    topics = [TOPICS[(turn * 4 + index) % len(TOPICS)] for index in range(8)]
    return [f"Here are notes about {topic}. " * 18 + f"Tell the story of {topic} in a few calm sentences:" for topic in topics]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory):
    card = CardOfEngines(tmp_path_factory.mktemp("card"), BUDGET_BYTES)
    yield card
    card.close()


def test_two_engines_share_a_card_through_bursts_a_kill_and_limits(card: CardOfEngines, record_property) -> None:
    first, second = card.start("first"), card.start("second")
    first.wait_ready()
    second.wait_ready()

    # Bursts in turn, every third one at the same time.
    said: dict[str, str] = {}
    served = {"first": 0, "second": 0}

    def burst(engine, turn: int) -> None:
        asked = prompts(turn)
        for prompt, text in zip(asked, engine.burst(asked), strict=True):
            assert said.setdefault(prompt, text) == text, "the same prompt was answered differently"
            served[engine.name] += 1

    end = time.monotonic() + 60
    turn = 0
    while time.monotonic() < end:
        busy = (first, second) if turn % 3 == 2 else ((first, second)[turn % 2],)
        threads = [threading.Thread(target=burst, args=(engine, turn)) for engine in busy]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        turn += 1
    assert served["first"] >= 16
    assert served["second"] >= 16
    assert served["first"] + served["second"] == sum(16 if index % 3 == 2 else 8 for index in range(turn)), "a request failed"
    peaks = {name: max(leases.get(name, 0) for _, leases in card.samples) for name in served}
    assert sum(peaks.values()) > BUDGET_BYTES, f"the engines never competed: {peaks}"

    # Half-way: kill the second one in mid-burst. What it held is free for the first at once.

    def ask_in_vain() -> None:
        with pytest.raises(OSError):  # noqa: PT011  # whatever a connection says when its server dies
            second.burst(prompts(1), 200)

    doomed = threading.Thread(target=ask_in_vain)
    doomed.start()
    time.sleep(2)
    held_by_second = card.leases()["second"]
    killed = time.monotonic()
    second.kill()
    while "second" in card.leases():
        assert time.monotonic() < killed + 20
        time.sleep(0.005)
    record_property("seconds until the dead engine's lease was gone", round(time.monotonic() - killed, 3))
    doomed.join()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        burst(first, turn)
        turn += 1
    assert card.leases()["first"] > BUDGET_BYTES - held_by_second, "the survivor did not take the memory over"

    # A second engine starts on a card that the first one's cached prefixes fill.
    filled = card.leases()["first"]
    assert filled > BUDGET_BYTES // 2
    third = card.start("third").wait_ready()
    burst_texts = third.burst(prompts(0))
    assert burst_texts == [said[prompt] for prompt in prompts(0)]

    # An idle engine with a full prefix cache obeys its limit, down and up again; its answers stay right.
    asked = time.monotonic()
    answer = card.kvctl("limit", "first", "48MiB")
    within = card.leases()["first"]
    record_property("seconds for kvctl limit, Python's start included", round(time.monotonic() - asked, 3))
    assert answer["outcome"] in ("applied", "deferred"), answer
    assert within <= 48 * MIB
    card.kvctl("limit-percent", "first", "100")
    for turn in range(3):
        burst(first, turn)
    card.kvctl("trim", "first")

    assert card.overcommitted == []
    first.signal(signal.SIGTERM)
    third.signal(signal.SIGTERM)
    gone = time.monotonic() + 30
    while card.leases() and time.monotonic() < gone:
        time.sleep(0.2)
    card.close()  # vLLM may wait for ever for its connections after SIGTERM
    assert card.leases() == {}
