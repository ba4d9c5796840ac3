# SPDX-License-Identifier: Apache-2.0
"""What an engine does with its memory: limits while it is idle, requests that can never fit, reset of the cache, sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness.engines import versions
from harness.matrix import NEWEST, elastic_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.cases import Case
    from harness.engines import Batch


each_release = pytest.mark.parametrize("version", versions())
newest_release = pytest.mark.parametrize("version", NEWEST)


@pytest.fixture
def engine(version: str, batches: Callable[[str, tuple[Case, ...], bool], Batch]) -> Batch:
    return batches(version, elastic_cases(version), True)


@each_release
def test_a_request_larger_than_the_pool_ends_with_a_clear_error_and_the_others_are_served(engine: Batch) -> None:
    result = engine["hopeless"]
    assert result["reasons"] == ["length", "error", "length"]
    assert "KV cache blocks and the pool can hold" in result["why"]
    assert "KVCACHED_LIMIT" in result["why"]
    first, other, after = result["short"]
    assert first == other == after
    assert len(first) == 8


@each_release
def test_a_prompt_larger_than_the_pool_is_turned_away_with_both_numbers(engine: Batch) -> None:
    blocks = 4 * 1024 * 1024 // (128 * 1024) - 1
    assert f"the prompt has 3000 tokens and the KV cache of this engine can hold {blocks * 32}" in engine["hopeless"]["refused"]


@each_release
def test_a_request_that_outgrows_the_pool_ends_with_an_error_where_it_does(engine: Batch) -> None:
    result = engine["hopeless"]
    blocks = 4 * 1024 * 1024 // (128 * 1024) - 1  # of 32 tokens; without the null block
    assert result["outgrown"] == "error"
    assert blocks * 32 - 100 < result["outgrown_tokens"] <= blocks * 32
    assert result["look"]["owned_blocks"] == 1


@newest_release
def test_an_idle_engine_with_a_full_cache_obeys_a_limit_down_and_up(engine: Batch) -> None:
    result = engine["idle limit"]
    step = result["full"]["step_bytes"]
    assert result["full"]["cached_blocks"] > 0
    assert result["full"]["held_pages"] * step > result["low_bytes"]
    assert result["lowered"]["held_pages"] * step <= result["low_bytes"]
    assert result["lowered"]["lease_bytes"] <= result["low_bytes"]
    assert result["lowered"]["cached_blocks"] > 0  # no more is dropped than must be
    assert result["raised"]["limit_pages"] * step > result["low_bytes"]


@newest_release
def test_outputs_are_right_under_the_lowered_limit_and_after_it(engine: Batch) -> None:
    result = engine["idle limit"]
    assert result["under_limit"] == result["first"][:8]
    assert result["again"] == result["first"]


@each_release
def test_reset_of_the_prefix_cache_gives_its_blocks_back(engine: Batch) -> None:
    result = engine["reset"]
    assert result["done"]
    assert result["filled"]["cached_blocks"] > 0
    assert result["emptied"]["cached_blocks"] == 0
    assert result["emptied"]["owned_blocks"] == 1
    assert result["again"] == result["first"]


@each_release
def test_sleep_gives_everything_back_but_the_null_page_and_wakes_up_right(engine: Batch) -> None:
    result = engine["reset"]
    assert result["asleep"]["held_pages"] == 1
    assert result["asleep"]["cached_blocks"] == 0
    assert result["asleep"]["lease_bytes"] == result["asleep"]["step_bytes"]
    assert result["awake"] == result["first"]


@newest_release
def test_a_range_far_beyond_the_machine_costs_nothing(engine: Batch) -> None:
    result = engine["virtual"]
    assert "range 48 GiB" in engine.log
    assert len(result["tokens"]) == 8
    assert result["peak_pages"] * result["settled"]["step_bytes"] < 1 << 30
