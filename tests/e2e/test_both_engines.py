# SPDX-License-Identifier: Apache-2.0
"""A real vLLM and a real SGLang server on a card with room for 1.3 of them: bursts in turn and at once, then an idle card."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from serving import FULL_BYTES, MIB, CardOfEngines, Load, missing

from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path
from kvcached.testing.kinds import SGLANG, VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(3_600),
    pytest.mark.xdist_group("both_engines"),
    pytest.mark.skipif(bool(missing(VLLM, SGLANG)), reason=missing(VLLM, SGLANG)),
]

BUDGET_BYTES = int(1.3 * FULL_BYTES) // MIB * MIB


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CardOfEngines]:
    card = CardOfEngines(tmp_path_factory.mktemp("card"), BUDGET_BYTES)
    yield card
    card.close()


def took_over(samples: list[tuple[float, dict[str, int]]], busy: str, idle: str) -> bool:
    """Whether `busy` came to hold bytes that `idle` had held before."""
    most_idle = 0
    for _, leases in samples:
        most_idle = max(most_idle, leases.get(idle, 0))
        if leases.get(busy, 0) > BUDGET_BYTES - most_idle:
            return True
    return False


def test_vllm_and_sglang_share_a_card(card: CardOfEngines, is_full: bool) -> None:
    vllm, sglang = card.start("vllm", VLLM), card.start("sglang", SGLANG)
    engines = [vllm.wait_until_ready(), sglang.wait_until_ready()]
    assert "elastic: on" in vllm.log
    assert "elastic: on" in sglang.log

    load = Load()
    load.take_turns(engines, 60 if is_full else 20)
    peaks = [card.peak_bytes(engine.name) for engine in engines]
    assert sum(peaks) > BUDGET_BYTES, f"the engines never competed: {peaks}"
    assert took_over(card.samples, "vllm", "sglang"), peaks
    assert took_over(card.samples, "sglang", "vllm"), peaks

    for engine in engines:  # what they keep are cached prefixes, and they give those up for each other and for an operator
        held_bytes = card.leases()[engine.name]
        assert held_bytes > 0
        ControlClient(endpoint_path(card.run_dir, engine.name)).evict(BUDGET_BYTES)
        card.kvctl("trim", engine.name)
        assert card.leases()[engine.name] < held_bytes
    for turn in (0, 1):
        for engine in engines:
            load.burst(engine, turn)
    load.check()
    assert card.overcommitted == []
    assert all(engine.process.poll() is None for engine in engines)
