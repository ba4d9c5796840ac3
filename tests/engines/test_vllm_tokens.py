# SPDX-License-Identifier: Apache-2.0
"""The same tokens as the unhooked engine, whatever the memory does. Pages that are not mapped fault, so a stray read ends the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness.cases import load_prompts
from harness.engines import versions
from harness.matrix import NEWEST, elastic_cases, pairs, stock_cases, token_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.cases import Case
    from harness.engines import Batch

    Batches = Callable[[str, tuple[Case, ...], bool], Batch]

each_release = pytest.mark.parametrize("version", versions())
newest_release = pytest.mark.parametrize("version", NEWEST)


@pytest.fixture
def stock(version: str, batches: Batches) -> Batch:
    return batches(version, stock_cases(version), False)


@pytest.fixture
def elastic(version: str, batches: Batches) -> Batch:
    return batches(version, elastic_cases(version), True)


@each_release
def test_the_unhooked_engine_is_the_unhooked_engine(stock: Batch) -> None:
    assert len(load_prompts()) >= 64
    assert stock["cached"]["scheduler"] == "SchedulerInterface"
    assert "elastic: on" not in stock.log


@newest_release
def test_the_unhooked_engine_says_the_same_without_its_cache(stock: Batch) -> None:
    assert stock["cached"]["tokens"] == stock["uncached"]["tokens"]


@pytest.mark.parametrize(("version", "name"), pairs())
def test_tokens_are_those_of_the_unhooked_engine(name: str, stock: Batch, elastic: Batch) -> None:
    assert elastic[name]["tokens"] == stock["cached"]["tokens"]
    assert len(elastic[name]["tokens"]) == len(load_prompts())


@newest_release
def test_a_real_model_says_the_same(stock: Batch, elastic: Batch) -> None:
    assert len(elastic["real model"]["tokens"]) == 64
    assert elastic["real model"]["tokens"] == stock["real model"]["tokens"]


@pytest.mark.parametrize(("version", "name"), pairs("tight"))
def test_a_small_limit_preempts_and_is_kept(name: str, elastic: Batch) -> None:
    result = elastic[name]
    assert result["counted"] == result["preemptions"] > 0
    assert result["peak_pages"] <= result["settled"]["limit_pages"]


@pytest.mark.parametrize(("version", "name"), pairs())
def test_memory_falls_back_after_the_requests(name: str, elastic: Batch) -> None:
    result = elastic[name]
    settled = result["settled"]
    assert settled["owned_blocks"] == 1  # the null block
    assert settled["parked_pages"] == settled["retired_pages"] == 0
    zero_page = settled["step_bytes"] if name == "zero backing" else 0
    assert settled["lease_bytes"] == settled["held_pages"] * settled["step_bytes"] + zero_page
    assert settled["held_pages"] < result["peak_pages"] or settled["held_pages"] == settled["limit_pages"]
    assert result["shared_after"] - result["shared_before"] <= settled["held_pages"] * settled["step_bytes"]


@pytest.mark.parametrize(("version", "name"), pairs("uncached"))
def test_without_a_cache_only_the_null_page_stays(name: str, elastic: Batch) -> None:
    assert elastic[name]["settled"]["held_pages"] == 1


@newest_release
def test_a_canary_finds_nothing_wrong_under_pressure(elastic: Batch) -> None:
    assert elastic["tight canary"]["stamps_read"] > 10_000
    assert elastic["tight"]["stamps_read"] == 0


@newest_release
def test_a_stray_write_is_found_at_the_next_step_and_named(elastic: Batch) -> None:
    result = elastic["stray write"]
    assert [len(tokens) for tokens in result["before"]] == [4, 4]
    assert result["reads_alike"]
    assert "canary: pool " in result["said"]
    assert (
        "block 0 of generation 1, page 0: 3 of 256 bytes were overwritten, from byte 0 behind the data on stands ab ab ab" in result["said"]
    )


@each_release
def test_the_cache_is_used(elastic: Batch) -> None:
    assert elastic["cached"]["hits"] > 5_000
    assert elastic["cached"]["settled"]["cached_blocks"] > 2048 // 32
    assert elastic["tight uncached async"]["hits"] == 0


@newest_release
def test_the_cap_of_the_cache_is_kept(elastic: Batch) -> None:
    assert 0 < elastic["capped cache"]["settled"]["cached_blocks"] <= 2048 // 32


@each_release
def test_one_line_at_the_start_says_what_is_in_place(version: str, elastic: Batch) -> None:
    lines = [line for line in elastic.log.splitlines() if "elastic: on" in line]
    cases = token_cases(version)
    assert len(lines) == len(elastic_cases(version))
    for case, line in zip(cases, lines, strict=False):
        scheduler = "ElasticAsyncScheduler" if case.async_scheduling else "ElasticScheduler"
        layout = "per layer" if case.name == "per layer" else "interleaved"
        page = "" if case.name in ("per layer", "tight canary") else ", page 2 MiB"
        assert f"worker ElasticCPUWorker, scheduler {scheduler}, layout {layout}{page}" in line
        assert ("canary: the last 256 bytes" in line) == ("canary" in case.name)


@each_release
def test_nothing_failed_on_the_way(elastic: Batch) -> None:
    expected = "ended with an error: the request needs"  # of the requests that can never be served
    assert not [line for line in elastic.log.splitlines() if " ERROR kvcached" in line and expected not in line]
