# SPDX-License-Identifier: Apache-2.0
"""Engines with several workers: tensor parallel, pipeline stages of unequal layers, both; a card with less memory; killed processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from harness.cases import load_prompts
from harness.matrix import NEWEST, RANKS_ELASTIC, RANKS_KILLED, RANKS_STOCK

from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.engines import Batch

pytestmark = pytest.mark.parametrize("version", NEWEST)
each_way = pytest.mark.parametrize("name", ["tensor", "pipeline"])


@pytest.fixture
def stock(version: str, batches: Callable[..., Batch]) -> Batch:
    return batches(version, RANKS_STOCK, False)


@pytest.fixture
def elastic(version: str, batches: Callable[..., Batch]) -> Batch:
    return batches(version, RANKS_ELASTIC, True)


@pytest.fixture
def killed(version: str, batches: Callable[..., Batch]) -> Batch:
    return batches(version, RANKS_KILLED, True)


@each_way
def test_tokens_are_those_of_the_unhooked_engine(name: str, stock: Batch, elastic: Batch) -> None:
    assert len(stock[name]["tokens"]) == 64
    assert elastic[name]["tokens"] == stock[name]["tokens"]
    assert elastic[name]["hits"] == stock[name]["hits"] > 5_000


@each_way
def test_preemption_under_a_tight_limit_changes_no_token(name: str, stock: Batch, elastic: Batch) -> None:
    case = next(case for case in RANKS_ELASTIC if case.name == name)
    assert elastic[name]["counted"] == elastic[name]["preemptions"] > 0
    assert elastic[name]["tight_tokens"] == stock[name]["tokens"]
    assert max(elastic[name]["tight_peak"]) <= case.limit_bytes


def test_memory_rises_and_falls_on_both_ranks_alike(elastic: Batch) -> None:
    result = elastic["tensor"]
    assert result["peak"][0] == result["peak"][1] > 8 * MIB
    assert 0 < result["after"][0] == result["after"][1] <= result["peak"][0]
    assert [rank["lease"] for rank in result["empty"].values()] == [result["step_bytes"]] * 2  # the null block's page


def test_a_stage_holds_memory_as_it_has_layers(elastic: Batch) -> None:
    """Three layers on the first stage, one on the second: the same pages, of three times and once the bytes."""
    result = elastic["pipeline"]
    for stage in ("peak", "after", "tight_peak"):
        assert result[stage][0] == 3 * result[stage][1] > 0, stage
    assert [rank["lease"] for rank in result["empty"].values()] == [result["step_bytes"], result["step_bytes"] // 3]


def test_the_card_with_less_memory_sets_what_every_rank_holds(stock: Batch, elastic: Batch) -> None:
    result = elastic["tensor"]
    assert result["uneven_tokens"] == stock["tensor"]["tokens"]
    assert result["uneven_peak"][0] == result["uneven_peak"][1] <= 8 * MIB  # what the neighbour leaves of 32 MiB
    assert result["uneven_peak"][0] < result["peak"][0]


def test_the_scheduler_has_no_device_and_each_worker_has_its_own(elastic: Batch, killed: Batch) -> None:
    for name in ("tensor", "pipeline"):
        assert elastic[name]["device_files"] == []
        assert min(elastic[name]["worker_files"]) > 0
    assert killed["both"]["core_files"] == []
    assert len(killed["both"]["worker_files"]) == 4
    assert min(killed["both"]["worker_files"]) > 0


def test_a_worker_that_is_killed_ends_the_engine_with_one_error_that_names_it(elastic: Batch) -> None:
    result = elastic["tensor"]
    assert "rank 1 (" in result["said"], result["said"]
    errors = [line for line in elastic.log.splitlines() if " ERROR kvcached" in line]
    assert len([line for line in errors if "rank 1 (" in line]) == len(errors) == 1, errors
    assert result["nothing_left"], result["left"]


def test_stages_of_several_ranks_say_the_same(stock: Batch, killed: Batch) -> None:
    """Two stages of two ranks each, on four workers; in float32 one layout's tokens are every layout's, as the unhooked ones are."""
    result = killed["both"]
    assert stock["tensor"]["tokens"] == stock["pipeline"]["tokens"]
    assert result["tokens"] == stock["pipeline"]["tokens"][: len(result["tokens"])]
    assert len(result["tokens"]) == 24 <= len(load_prompts())


def test_an_engine_core_that_is_killed_leaves_nothing_behind(killed: Batch) -> None:
    result = killed["both"]
    assert result["nothing_left"], result["left"]
