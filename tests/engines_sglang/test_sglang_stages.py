# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: each stage has its own layers and its own memory, schedules ahead of those behind it, and decides as they do."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
from sglang_harness.matrix import NEWEST, OLDER
from sglang_harness.pipelines import (
    AHEAD,
    ALONE,
    DRAWN,
    EVEN,
    KILLED,
    LIMITED,
    LOW_PAGES,
    NEW_TOKENS,
    PAGE_BLOCKS,
    SHARDED,
    STATIC,
    TREELESS,
    UNEVEN,
)

if TYPE_CHECKING:
    from sglang_harness.cases import Batch, Case

SQUEEZED = (UNEVEN, LIMITED)
EVERY = (*SQUEEZED, EVEN, AHEAD, SHARDED, TREELESS)


def runs_of(*cases: Case) -> list[Any]:
    """What is quick on the newest release is run on the older ones with --full."""
    newest = [pytest.param(NEWEST, case, id=f"{NEWEST}-{case.name}", marks=() if case in SQUEEZED else pytest.mark.full) for case in cases]
    older = [
        pytest.param(version, case, id=f"{version}-{case.name}", marks=pytest.mark.full)
        for version in OLDER
        for case in cases
        if case in SQUEEZED
    ]
    return newest + older


def ranks(ran: dict[str, Batch], version: str, case: Case) -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = ran[version][case.name]["ranks"]
    return every


@pytest.mark.parametrize(
    "case", [DRAWN[0], *(pytest.param(case, marks=pytest.mark.full) for case in DRAWN[1:])], ids=lambda case: case.name
)
def test_stages_with_drawn_work_and_limits_never_wait_in_a_ring_and_decide_alike(ran: dict[str, Batch], case: Case) -> None:
    seen = ran[NEWEST][case.name]
    assert seen["alike"]
    assert seen["quotas"] == [True] * case.also["stages"]
    assert min(seen["taken"], seen["refused"]) > 50
    assert seen["left"] == [0] * case.also["stages"]


def test_stock_stages_give_the_tokens_of_one(ran: dict[str, Batch]) -> None:
    assert [rank["tokens"] for rank in ranks(ran, NEWEST, STATIC)] == [ran[NEWEST][ALONE.name]["tokens"]] * 2


@pytest.mark.parametrize(("version", "case"), runs_of(*EVERY))
def test_tokens_are_those_of_the_stock_engine(ran: dict[str, Batch], version: str, case: Case) -> None:
    for rank in ranks(ran, version, case):
        assert rank["tokens"] == ran[version][ALONE.name]["tokens"]
        assert {len(answer) for answer in rank["tokens"].values()} == {NEW_TOKENS}
        assert rank["exit"] == 0


@pytest.mark.parametrize(("version", "case"), runs_of(*EVERY))
def test_stages_own_the_same_at_every_step_and_nothing_after_a_flush(ran: dict[str, Batch], version: str, case: Case) -> None:
    every = ranks(ran, version, case)
    owned = [[out for *_, out in rank["steps"]] for rank in every]
    assert all(other == owned[0] for other in owned)
    assert max(owned[0]) > 20
    for rank in every:
        held = [pages for _, _, pages, _ in rank["steps"]]
        assert max(held) >= max(owned[0]) // PAGE_BLOCKS > 1
        assert (rank["flushed"], rank["held_pages"], rank["leased"], rank["problems"]) == (True, [1], [1], [])


@pytest.mark.parametrize(("version", "case"), runs_of(*SQUEEZED))
def test_each_stage_has_the_geometry_of_its_own_layers(ran: dict[str, Batch], version: str, case: Case) -> None:
    first, last = ranks(ran, version, case)
    assert last["block_bytes"] == [2 * size for size in first["block_bytes"]]
    assert (first["suffix"], last["suffix"]) == ("", "-pp1")


@pytest.mark.full
def test_stages_of_several_ranks_are_told_apart(ran: dict[str, Batch]) -> None:
    assert [rank["suffix"] for rank in ranks(ran, NEWEST, SHARDED)] == ["", "-tp1", "-pp1", "-pp1-tp1"]


@pytest.mark.parametrize(("version", "case"), runs_of(UNEVEN))
def test_a_stage_with_less_memory_makes_all_smaller(ran: dict[str, Batch], version: str, case: Case) -> None:
    first, last = ranks(ran, version, case)
    limits = [{limit for _, limit, *_ in rank["steps"]} for rank in (first, last)]
    assert max(limits[1]) < min(limits[0])
    assert max(out for *_, out in first["steps"]) < max(limits[1]) * PAGE_BLOCKS
    assert first["retracted"] == last["retracted"] == first["counted"] == last["counted"] > 0


@pytest.mark.parametrize(("version", "case"), runs_of(LIMITED))
def test_a_limit_that_falls_on_one_stage_makes_all_smaller_until_it_rises(ran: dict[str, Batch], version: str, case: Case) -> None:
    first, last = ranks(ran, version, case)
    low = {step for step, limit, *_ in last["steps"] if limit == LOW_PAGES}
    out = {step: pages for step, *_, pages in first["steps"]}
    assert out[min(low)] > LOW_PAGES * PAGE_BLOCKS > out[max(low)]
    assert max(pages for step, pages in out.items() if step > max(low)) > LOW_PAGES * PAGE_BLOCKS
    assert first["retracted"] == last["retracted"] == first["counted"] == last["counted"] > 0
    held = {step: pages for step, _, pages, _ in last["steps"]}
    assert held[max(low)] < held[min(low)]  # requests may go on with a page that others have left


@pytest.mark.parametrize(("version", "case"), runs_of(*EVERY))
def test_one_exchange_a_step_is_enough(ran: dict[str, Batch], version: str, case: Case) -> None:
    for rank in ranks(ran, version, case):
        assert rank["exchanges"] <= len(rank["steps"]) + 4


@pytest.mark.full
def test_a_stage_that_is_killed_is_named_in_the_error_of_the_other(ran: dict[str, Batch]) -> None:
    first, last = ranks(ran, NEWEST, KILLED)
    assert last == {"exit": -signal.SIGKILL}
    assert first["error"].startswith(f"rank 1 of {KILLED.name} (process ")
