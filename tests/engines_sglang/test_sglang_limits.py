# SPDX-License-Identifier: Apache-2.0
"""Limits act on a running engine; what can never be served ends with an error; memory goes when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sglang_harness.matrix import EIGHT_BITS, LATE, LIMITS, NEWEST, REFUSALS, SQUEEZE_PAGES, SQUEEZED, VERSIONS
from sglang_harness.storage import HEADS, LAYERS, PAGE, SIZE

if TYPE_CHECKING:
    from sglang_harness.cases import Batch

TELLING = (NEWEST, "0.5.11")  # an aborted prefill's client is told why; the releases between have no place for it
SQUEEZES = [(version, case.name) for version in VERSIONS for case in LIMITS[version] if case in SQUEEZED]


def first_round(tokens: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: answer for name, answer in tokens.items() if name.startswith("a")}


def stock(ran: dict[str, Batch], version: str) -> dict[str, list[int]]:
    return first_round(ran[version]["llama-16-static"]["tokens"])


@pytest.mark.parametrize(("version", "name"), SQUEEZES)
def test_a_limit_that_falls_under_load_changes_no_token(ran: dict[str, Batch], version: str, name: str) -> None:
    seen = ran[version][name]
    stock_tokens = ran[version]["llama-16-static"]["tokens"]
    assert {request: answer[:24] for request, answer in seen["tokens"].items()} == stock_tokens
    assert {len(answer) for answer in seen["tokens"].values()} == {64}
    assert seen["counted"] == seen["retracted"] > 0
    assert all("length" in reason for reason in seen["reasons"].values())
    assert (set(seen["held_pages"]), seen["problems"]) == ({1}, [])


@pytest.mark.parametrize(("version", "name"), SQUEEZES)
def test_the_pool_gets_below_a_lower_limit_and_grows_when_it_rises(ran: dict[str, Batch], version: str, name: str) -> None:
    seen = ran[version][name]["seen"]
    low = [step for step in seen if step["limit"] == SQUEEZE_PAGES]
    assert low[0]["held"] > SQUEEZE_PAGES
    assert min(step["held"] for step in low) <= SQUEEZE_PAGES
    assert low[-1]["owned"] <= SQUEEZE_PAGES * ran[version][name]["page_blocks"] < low[0]["owned"]
    assert low[-1]["held"] == low[-1]["used"] or low[-1]["held"] <= SQUEEZE_PAGES  # above it there is no page that nobody uses
    assert max(step["held"] for step in seen if step["step"] > low[-1]["step"]) > SQUEEZE_PAGES


def test_two_courses_of_retraction_agree_to_the_last_token(ran: dict[str, Batch]) -> None:
    assert ran[NEWEST]["squeeze-1"]["tokens"] == ran[NEWEST]["squeeze-16"]["tokens"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_prompt_above_the_limit_is_turned_away_with_both_numbers(ran: dict[str, Batch], version: str) -> None:
    seen = ran[version]["long"]
    reason = seen["reasons"].pop("long")
    assert "needs 700 tokens" in reason
    assert "can hold 480 at most" in reason
    assert "400" in reason
    assert "needs 481 tokens" in seen["reasons"].pop("beyond")
    assert len(seen["tokens"]["longest"]) == 8
    assert all("length" in other for other in seen["reasons"].values())
    assert first_round(seen["tokens"]) == stock(ran, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_request_that_waits_ends_when_the_limit_falls_below_it(ran: dict[str, Batch], version: str) -> None:
    seen = ran[version]["lowered"]
    assert "needs 900 tokens" in seen["reasons"]["waiting"]
    assert "length" in seen["reasons"]["running"]
    assert len(seen["tokens"]["running"]) == 40


@pytest.mark.parametrize("version", VERSIONS)
def test_a_prefill_under_way_ends_when_the_limit_falls_below_it(ran: dict[str, Batch], version: str) -> None:
    seen = ran[version]["parked"]
    assert seen["fell"] > 0
    assert "needs 900 tokens" in ran[version].log("parked")
    assert "needs 900 tokens" in seen["reasons"]["long"] or version not in TELLING
    assert seen["tokens"]["long"] == []
    assert (len(seen["tokens"]["next"]), set(seen["held_pages"]), seen["problems"]) == (8, {1}, [])


@pytest.mark.parametrize("version", VERSIONS)
def test_a_request_that_found_the_card_full_is_served_when_it_is_not(ran: dict[str, Batch], version: str) -> None:
    seen = ran[version]["crowded"]
    assert seen["waited"] > 10
    assert len(seen["tokens"]["late"]) == 8


@pytest.mark.parametrize("version", VERSIONS)
def test_the_prefix_cache_has_a_bound(ran: dict[str, Batch], version: str) -> None:
    assert 0 < ran[version]["capped"]["evictable"] <= 400
    assert ran[version]["capped"]["tokens"] == stock(ran, version)


def test_without_a_bound_the_prefix_cache_is_larger(ran: dict[str, Batch]) -> None:
    assert ran[NEWEST]["uncapped"]["evictable"] > 800


def test_an_idle_engine_gives_its_cache_up_when_asked_and_serves_again(ran: dict[str, Batch]) -> None:
    seen: dict[str, Any] = ran[NEWEST]["asked"]
    answer = seen["answer"]
    assert answer["status"] == seen["counted"]
    owned, cached = answer["status"]
    assert (owned, cached > 30) == (1, True)  # the padding page
    assert answer["explained"][:2] == ["owned by running requests", "cached prefixes"]
    assert answer["held"] == 1
    assert answer["evicted"] + answer["trimmed"] > 0
    assert seen["tokens"] == ran[NEWEST]["llama-16-static"]["tokens"]


def test_release_memory_occupation_leaves_the_padding_page_and_resume_needs_nothing(ran: dict[str, Batch]) -> None:
    seen = ran[NEWEST]["occupation"]
    assert seen["held"] == [1]
    assert seen["tokens"] == ran[NEWEST]["llama-16-static"]["tokens"]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_what_cannot_be_elastic_is_refused_by_name(ran: dict[str, Batch], case: Any) -> None:
    error = ran[NEWEST][case.name]["error"]
    asked = case.name.removeprefix("refused-").replace(".", "=")
    assert error.startswith(f"EngineNotSupported: {asked} cannot be elastic")


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float8_e4m3fn", 1), ("float8_e5m2", 1), ("float16", 2)])
def test_a_pool_has_the_geometry_of_the_type_that_it_stores(ran: dict[str, Batch], dtype: str, item_bytes: int) -> None:
    seen = ran[NEWEST][EIGHT_BITS.name][dtype]
    slot = LAYERS * 2 * HEADS * SIZE * item_bytes
    assert (seen["block_bytes"], seen["slot_bytes"], seen["strides"]) == (PAGE * slot, slot, [slot])
    assert seen["stored"] == ("torch.uint8" if item_bytes == 1 else f"torch.{dtype}")
    assert seen["same"]


def test_the_books_agree_with_a_simple_model(ran: dict[str, Batch]) -> None:
    assert ran[NEWEST]["books"]["steps"] > 1000


@pytest.mark.parametrize("case", LATE, ids=lambda case: case.name)
def test_ids_that_come_back_late_are_neither_lost_nor_used_too_early(ran: dict[str, Batch], case: Any) -> None:
    seen = ran[NEWEST][case.name]
    assert seen["tokens"] == ran[NEWEST]["llama-16-static"]["tokens"]
    assert seen["arriving"] > 0
    assert seen["waits"] < seen["turns"] // 2
    assert (set(seen["held_pages"]), seen["problems"]) == ({1}, [])
