# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from examples.demo.plan import KvShape, Relay, Sizes, burst_prompts
from examples.demo.prompts import FACTS, STORIES

SMOLLM2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "head_dim": None}


def test_bytes_of_a_token_from_the_model_config() -> None:
    assert KvShape.from_config(SMOLLM2, element_bytes=4).token_bytes == 30 * 2 * 3 * 64 * 4


def test_without_grouped_heads_every_head_has_its_own_keys() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert KvShape.from_config(config, element_bytes=2).token_bytes == 2 * 2 * 4 * 16 * 2


def test_the_card_holds_one_engine_but_not_two() -> None:
    sizes = Sizes(requests=16, request_tokens=257, block_tokens=128, token_bytes=46080)
    assert sizes.static_bytes == 16 * 3 * 128 * 46080
    assert sizes.static_bytes < sizes.budget_bytes < 2 * sizes.static_bytes
    assert sizes.budget_bytes % (2 << 20) == 0


def test_the_card_is_a_whole_number_of_mappable_pages() -> None:
    sizes = Sizes(requests=8, request_tokens=160, block_tokens=32, token_bytes=46080)
    assert sizes.static_bytes * 13 // 10 == 73 * (1 << 20) + 131072
    assert sizes.budget_bytes == 72 * (1 << 20)


def test_bursts_follow_when_half_of_the_last_is_answered() -> None:
    relay = Relay(bursts=3, size=4)
    assert [relay.due(), relay.due()] == [0, None]
    relay.answered(0)
    assert relay.due() is None
    relay.answered(0)
    assert [relay.due(), relay.due()] == [1, None]
    relay.answered(0)
    relay.answered(0)
    assert relay.due() is None, "late answers of an earlier burst start nothing"
    relay.answered(1)
    relay.answered(1)
    assert [relay.due(), relay.due()] == [2, None]
    assert relay.started == 3


def test_a_stopped_relay_starts_nothing() -> None:
    relay = Relay(bursts=3, size=1)
    relay.due()
    relay.stop()
    relay.answered(0)
    assert relay.due() is None


@pytest.mark.parametrize("prompts", [FACTS, STORIES])
def test_bursts_go_round_the_prompts(prompts: tuple[str, ...]) -> None:
    first, second = burst_prompts(prompts, 0, 16), burst_prompts(prompts, 1, 16)
    assert first == list(prompts[:16])
    assert second == [*prompts[16:], *prompts[:8]]
    assert len(set(prompts)) == len(prompts)
