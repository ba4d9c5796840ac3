# SPDX-License-Identifier: Apache-2.0
"""The same tokens as the unhooked engine, whatever the memory does. Pages that are not mapped fault, so a stray read ends the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from harness.cases import load_prompts
from harness.engines import versions
from harness.matrix import ELASTIC, STOCK, TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.cases import Case
    from harness.engines import Batch

    Batches = Callable[[str, tuple[Case, ...], bool], Batch]

NAMES = [case.name for case in TOKENS]

pytestmark = pytest.mark.parametrize("version", versions())


@pytest.fixture
def stock(version: str, batches: Batches) -> Batch:
    return batches(version, STOCK, False)


@pytest.fixture
def elastic(version: str, batches: Batches) -> Batch:
    return batches(version, ELASTIC, True)


def test_the_unhooked_engine_is_the_unhooked_engine(stock: Batch) -> None:
    assert len(load_prompts()) >= 64
    assert stock["cached"]["scheduler"] == "SchedulerInterface"
    assert "elastic: on" not in stock.log
    assert stock["cached"]["tokens"] == stock["uncached"]["tokens"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_unhooked_engine(name: str, stock: Batch, elastic: Batch) -> None:
    assert elastic[name]["tokens"] == stock["cached"]["tokens"]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("tight")])
def test_a_small_limit_preempts_and_is_kept(name: str, elastic: Batch) -> None:
    result = elastic[name]
    assert result["preemptions"] > 0
    assert result["peak_pages"] <= result["settled"]["limit_pages"]


@pytest.mark.parametrize("name", [name for name in NAMES if "async" in name or name == "zero backing"])
def test_async_scheduling_is_on_where_it_is_asked_for(name: str, elastic: Batch) -> None:
    assert elastic[name]["scheduler"] == "ElasticScheduler"
    assert elastic["cached"]["scheduler"] == "ElasticScheduler"


@pytest.mark.parametrize("name", NAMES)
def test_memory_falls_back_after_the_requests(name: str, elastic: Batch) -> None:
    result = elastic[name]
    settled = result["settled"]
    assert settled["owned_blocks"] == 1  # the null block
    assert settled["parked_pages"] == settled["retired_pages"] == 0
    zero_page = settled["step_bytes"] if name == "zero backing" else 0
    assert settled["lease_bytes"] == settled["held_pages"] * settled["step_bytes"] + zero_page
    assert settled["held_pages"] < result["peak_pages"] or settled["held_pages"] == settled["limit_pages"]
    assert result["shared_after"] - result["shared_before"] <= settled["held_pages"] * settled["step_bytes"]


@pytest.mark.parametrize("name", [name for name in NAMES if "uncached" in name])
def test_without_a_cache_only_the_null_page_stays(name: str, elastic: Batch) -> None:
    assert elastic[name]["settled"]["held_pages"] == 1


def test_the_cache_is_used_and_its_cap_is_kept(elastic: Batch) -> None:
    assert elastic["cached"]["hits"] > 5_000
    assert elastic["cached"]["settled"]["cached_blocks"] > 2048 // 32
    assert elastic["capped cache"]["settled"]["cached_blocks"] <= 2048 // 32
    assert elastic["uncached"]["hits"] == 0


def test_one_line_at_the_start_says_what_is_in_place(elastic: Batch) -> None:
    lines = [line for line in elastic.log.splitlines() if "elastic: on" in line]
    assert len(lines) == len(ELASTIC)
    assert "worker ElasticCPUWorker, scheduler ElasticScheduler, layout interleaved" in lines[0]
    assert "scheduler ElasticAsyncScheduler" in lines[2]
    assert "layout per layer" in lines[NAMES.index("per layer")]


def test_nothing_failed_on_the_way(elastic: Batch) -> None:
    results: list[dict[str, Any]] = [elastic[name] for name in NAMES]
    assert all(len(result["tokens"]) == len(load_prompts()) for result in results)
    assert " ERROR kvcached" not in elastic.log
