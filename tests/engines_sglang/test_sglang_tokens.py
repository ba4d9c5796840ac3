# SPDX-License-Identifier: Apache-2.0
"""An elastic engine gives the tokens of the stock one, from memory that is mapped only while it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_harness.matrix import COMPARED, NEWEST, OLDER, QUICK, VARIANTS

if TYPE_CHECKING:
    from sglang_harness.cases import Batch

PAIRS = [
    pytest.param(version, case.name, marks=() if case in QUICK[version] else pytest.mark.full)
    for version, cases in COMPARED.items()
    for case in cases
]


def require_spread(tokens: dict[str, list[int]]) -> None:
    """Tokens that are all alike would prove nothing."""
    assert len({tuple(answer) for answer in tokens.values()}) >= len(tokens) // 2
    assert all(len(set(answer)) > len(answer) // 3 for answer in tokens.values())


@pytest.mark.parametrize(("version", "name"), PAIRS)
def test_tokens_are_those_of_the_stock_engine(ran: dict[str, Batch], version: str, name: str) -> None:
    stock, elastic = ran[version][f"{name}-static"], ran[version][name]
    require_spread(stock["tokens"])
    assert elastic["tokens"] == stock["tokens"]
    assert elastic["hits"] == stock["hits"] > 0
    assert not stock["peaks"]
    assert min(elastic["peaks"]) > 2
    assert "elastic: on" in ran[version].log(name)


@pytest.mark.parametrize(("version", "name"), PAIRS)
def test_a_flush_leaves_the_padding_page(ran: dict[str, Batch], version: str, name: str) -> None:
    elastic = ran[version][name]
    assert elastic["flushed"]
    assert set(elastic["held_pages"]) == {1}
    assert set(elastic["leased"]) == {1}
    assert elastic["problems"] == []


@pytest.mark.parametrize(("version", "name"), PAIRS)
def test_slots_of_all_layers_lie_side_by_side(ran: dict[str, Batch], version: str, name: str) -> None:
    slot_bytes, row_bytes = ran[version][name]["strides"]
    stock_bytes, _ = ran[version][f"{name}-static"]["strides"]
    assert stock_bytes == row_bytes
    assert slot_bytes >= 2 * row_bytes or name.startswith("windows")  # one layer of each kind


@pytest.mark.parametrize("version", OLDER)
def test_pages_of_one_slot_on_older_releases(ran: dict[str, Batch], version: str) -> None:
    seen = ran[version]["llama-1"]
    assert seen["tokens"] == ran[version]["llama-16-static"]["tokens"]
    assert (set(seen["held_pages"]), seen["problems"]) == ({1}, [])
    assert seen["peaks"][0] > 500


@pytest.mark.parametrize("name", list(VARIANTS))
def test_however_it_is_configured(ran: dict[str, Batch], name: str) -> None:
    _, like = VARIANTS[name]
    seen = ran[NEWEST][name]
    assert seen["tokens"] == ran[NEWEST][f"{like.name}-static"]["tokens"]
    assert (set(seen["held_pages"]), seen["problems"]) == ({1}, [])


def test_without_a_tree_nothing_is_found_in_it(ran: dict[str, Batch]) -> None:
    assert ran[NEWEST]["no-radix"]["hits"] == 0


def test_the_dense_layout_is_dense(ran: dict[str, Batch]) -> None:
    slot_bytes, row_bytes = ran[NEWEST]["per-layer"]["strides"]
    assert slot_bytes == row_bytes
    assert "layout per layer" in ran[NEWEST].log("per-layer")
