# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM servers on a card with room for 1.3 of them: bursts in turn, one killed half-way and started again.

The full tier's load lasts two minutes; the quick one's is as many bursts as show the same once.
"""

from __future__ import annotations

import threading
import time
from http.client import HTTPException
from typing import TYPE_CHECKING

import pytest
from serving import FULL_BYTES, MIB, CardOfEngines, Load, missing, prompts

from kvcached.testing.kinds import VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import Server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3_600),
    pytest.mark.xdist_group("two_engines"),
    pytest.mark.skipif(bool(missing(VLLM)), reason=missing(VLLM)),
]

BUDGET_BYTES = int(1.3 * FULL_BYTES) // MIB * MIB


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CardOfEngines]:
    card = CardOfEngines(tmp_path_factory.mktemp("card"), BUDGET_BYTES)
    yield card
    card.close()


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
    card: CardOfEngines, is_full: bool, record_property: Callable[[str, object], None]
) -> None:
    first, second = card.start("first"), card.start("second")
    first.wait_until_ready()
    second.wait_until_ready()
    load = Load()
    half_s = 60 if is_full else 20
    load.take_turns([first, second], half_s)
    peaks = [card.peak_bytes(engine.name) for engine in (first, second)]
    assert sum(peaks) > BUDGET_BYTES, f"the engines never competed: {peaks}"

    held_by_second = card.leases()["second"]
    record_property("seconds until the dead engine's lease was gone", kill_in_mid_burst(card, second))
    load.take_turns([first], half_s)
    assert card.leases()["first"] > BUDGET_BYTES - held_by_second, "the survivor did not take the memory over"

    # Another engine starts on a card that the first one's cached prefixes fill.
    third = card.start("third").wait_until_ready()
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
    load.check()
    card.kvctl("trim", "first")

    assert card.overcommitted == []
    for engine in (first, third):
        engine.process.terminate()
    end = time.monotonic() + 30
    while card.leases() and time.monotonic() < end:
        time.sleep(0.2)
    card.close()  # vLLM may wait for ever for its connections after SIGTERM
    assert card.leases() == {}
