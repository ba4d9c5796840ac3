# SPDX-License-Identifier: Apache-2.0
"""Data parallel attention: replicas decide each for itself, while each step is computed by all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sglang_harness.matrix import NEWEST, QWEN_16
from sglang_harness.replicas import FEW, LIMITED, LOW_PAGES, OLDER_VERSIONS, SHARDED, STATIC, UNEVEN

if TYPE_CHECKING:
    from sglang_harness.cases import Batch, Case

PAGE_BLOCKS = 4


def runs_of(*cases: Case) -> list[Any]:
    """The quick one on the newest release; the others, and the older ones, with --full."""
    newest = [pytest.param(NEWEST, case, id=f"{NEWEST}-{case.name}", marks=() if case is UNEVEN else pytest.mark.full) for case in cases]
    older = [(version, case) for version in OLDER_VERSIONS for case in cases if case in (UNEVEN, LIMITED)]
    return newest + [pytest.param(version, case, id=f"{version}-{case.name}", marks=pytest.mark.full) for version, case in older]


def ranks(ran: dict[str, Batch], version: str, case: Case) -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = ran[version][case.name]["ranks"]
    return every


def alone(ran: dict[str, Batch]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = ran[NEWEST][QWEN_16.static().name]["tokens"]
    return tokens


@pytest.mark.full
def test_stock_replicas_give_the_tokens_of_one(ran: dict[str, Batch]) -> None:
    assert [rank["tokens"] for rank in ranks(ran, NEWEST, STATIC)] == [alone(ran)] * 2


@pytest.mark.parametrize(("version", "case"), runs_of(UNEVEN, LIMITED, SHARDED))
def test_tokens_are_those_of_the_stock_engine(ran: dict[str, Batch], version: str, case: Case) -> None:
    for number, rank in enumerate(ranks(ran, version, case)):
        few = case is UNEVEN and number == 0
        answers = {name: answer for name, answer in rank["tokens"].items() if not name.endswith("-again") or not few}
        assert len(answers) == (2 * FEW if few else len(alone(ran)))
        assert answers == {name: alone(ran)[name] for name in answers}
        assert rank["exit"] == 0


@pytest.mark.parametrize(("version", "case"), runs_of(UNEVEN, LIMITED, SHARDED))
def test_memory_rises_and_goes_on_each_replica(ran: dict[str, Batch], version: str, case: Case) -> None:
    for rank in ranks(ran, version, case):
        held = [pages for _, _, pages, _ in rank["steps"]]
        assert PAGE_BLOCKS < max(out for *_, out in rank["steps"]) <= max(held) * PAGE_BLOCKS
        assert (rank["flushed"], rank["held_pages"], rank["leased"], rank["problems"]) == (True, [1], [1], [])


@pytest.mark.parametrize(("version", "case"), runs_of(UNEVEN))
def test_a_replica_with_less_memory_makes_no_other_one_smaller(ran: dict[str, Batch], version: str, case: Case) -> None:
    first, second = ranks(ran, version, case)
    limits = [{limit for _, limit, *_ in rank["steps"]} for rank in (first, second)]
    assert max(limits[1]) < min(limits[0])
    most = [max(out for *_, out in rank["steps"]) for rank in (first, second)]
    assert most[0] < PAGE_BLOCKS * 3 < most[1] < max(limits[1]) * PAGE_BLOCKS
    assert (first["suffix"], second["suffix"]) == ("", "-dp1")


@pytest.mark.parametrize(("version", "case"), runs_of(LIMITED))
def test_a_limit_acts_on_its_replica_alone(ran: dict[str, Batch], version: str, case: Case) -> None:
    first, second = ranks(ran, version, case)
    low = [step for step, limit, *_ in second["steps"] if limit == LOW_PAGES]
    out = [{step: pages for step, *_, pages in rank["steps"]} for rank in (first, second)]
    assert out[1][max(low)] < LOW_PAGES * PAGE_BLOCKS < out[0][max(low)]


@pytest.mark.full
def test_ranks_of_a_replica_decide_alike(ran: dict[str, Batch]) -> None:
    every = ranks(ran, NEWEST, SHARDED)
    assert [rank["suffix"] for rank in every] == ["", "-tp1", "-dp1", "-dp1-tp1"]
    steps = [[out for *_, out in rank["steps"]] for rank in every]
    assert steps[0] == steps[1]
    assert steps[2] == steps[3]
