# SPDX-License-Identifier: Apache-2.0
"""Every kind of KV cache gives the unhooked engine's tokens and its memory back: windows, shared layers, latents, states, speculation.

The quick part takes one cell of the matrix for each model, of the newest release. Pages that are not mapped fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from harness.engines import versions
from harness.models import BY_NAME, PROMPTS, Cell, broken_cases, cells

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.cases import Case
    from harness.engines import Batch

    Batches = Callable[[str, tuple[Case, ...], bool], Batch]


def marked(cell: Cell) -> object:
    return pytest.param(cell, marks=() if cell.is_quick else pytest.mark.full, id=f"{cell.version} {cell.case.name}")


ALL = [cell for version in versions() for cell in cells(version)]
each_cell = pytest.mark.parametrize("cell", [marked(cell) for cell in ALL])
SAYS = [(version, case, said) for version in versions() for case, said in broken_cases(version)]
each_refusal = pytest.mark.parametrize(("version", "case", "said"), [pytest.param(*said, id=f"{said[0]} {said[1].name}") for said in SAYS])


@pytest.fixture
def beside(cell: Cell, is_full: bool) -> list[Cell]:
    """The cells that run in one process: all of a model, or in the quick part one of each."""
    here = [other for other in ALL if other.version == cell.version]
    return [other for other in here if (other.model == cell.model if is_full else other.is_quick)]


@pytest.fixture
def stock(cell: Cell, beside: list[Cell], batches: Batches) -> Batch:
    cases = {other.stock.name: other.stock for other in beside}
    return batches(cell.version, tuple(cases.values()), False)


@pytest.fixture
def elastic(cell: Cell, beside: list[Cell], batches: Batches) -> Batch:
    return batches(cell.version, tuple(other.case for other in beside), True)


@each_cell
def test_tokens_are_those_of_the_unhooked_engine(cell: Cell, stock: Batch, elastic: Batch) -> None:
    said = elastic[cell.case.name]["tokens"]
    assert len(said) == PROMPTS
    if cell.is_exact:
        assert said == stock[cell.stock.name]["tokens"]


def inexact(*, has_blocks: bool) -> pytest.MarkDecorator:
    chosen = [cell for cell in ALL if not cell.is_exact and bool(BY_NAME[cell.model].blocks) is has_blocks]
    return pytest.mark.parametrize("cell", [pytest.param(cell, id=f"{cell.version} {cell.case.name}") for cell in chosen])


@pytest.mark.full
@inexact(has_blocks=True)
def test_where_batches_change_tokens_they_are_those_of_an_unhooked_engine_with_as_many_blocks(
    cell: Cell, elastic: Batch, batches: Batches
) -> None:
    options = cell.stock.options | {"num_gpu_blocks_override": BY_NAME[cell.model].blocks}
    other = replace(cell.stock, name=f"{cell.stock.name} as many blocks", options=options)
    said = batches(cell.version, (other,), False)[other.name]
    assert elastic[cell.case.name]["tokens"] == said["tokens"]
    assert said["preemptions"] > 0


@pytest.mark.full
@inexact(has_blocks=False)
def test_where_batches_change_tokens_each_is_as_likely_as_the_unhooked_engines_are(
    cell: Cell, stock: Batch, elastic: Batch, batches: Batches
) -> None:
    """What the elastic engine said is put before the unhooked one, place by place, beside what two such ones of other batches said."""
    other = replace(cell.stock, name=f"{cell.stock.name} other batches", options=cell.stock.options | {"max_num_seqs": 3})
    others = batches(cell.version, (other,), False)[other.name]["tokens"]
    continuations = [elastic[cell.case.name]["tokens"], stock[cell.stock.name]["tokens"], others]
    scored = replace(cell.stock, name=f"{cell.case.name} scored", scenario="score", continuations=continuations)
    ours, first, second = batches(cell.version, (scored,), False)[scored.name]["worst"]
    assert ours <= 2 * max(first, second)


@each_cell
def test_memory_falls_back_after_the_requests(cell: Cell, elastic: Batch) -> None:
    settled = elastic[cell.case.name]["settled"]
    assert settled["owned_blocks"] == 1  # the null block
    assert settled["parked_pages"] == settled["retired_pages"] == 0
    assert settled["lease_bytes"] == settled["held_pages"] * settled["step_bytes"]
    if cell.cache == "uncached":
        assert settled["held_pages"] == 1


@each_cell
def test_pressure_preempts_and_the_limit_is_kept(cell: Cell, elastic: Batch) -> None:
    result = elastic[cell.case.name]
    assert (result["preemptions"] > 0) == (cell.room == "tight")
    assert result["peak_pages"] <= result["settled"]["limit_pages"]


@each_cell
def test_the_layout_is_the_one_that_the_model_can_take(cell: Cell, elastic: Batch) -> None:
    interleaves = cell.layout == "auto" and BY_NAME[cell.model].interleaves(cell.version)
    assert f"layout {'interleaved' if interleaves else 'per layer'}" in elastic[cell.case.name]["line"]


@pytest.mark.full
@each_refusal
def test_what_cannot_run_is_what_the_unhooked_engine_cannot_run(version: str, case: Case, said: str, batches: Batches) -> None:
    cases = tuple(other for release, other, _ in SAYS if release == version)
    with pytest.raises(AssertionError, match="vLLM") as refusal:
        batches(version, cases, False)[case.name]
    assert said in str(refusal.value)


@each_cell
def test_where_tokens_cannot_tell_a_canary_has_watched_the_blocks(cell: Cell, elastic: Batch) -> None:
    read = elastic[cell.case.name]["stamps_read"]
    assert read > 10_000 if cell.is_watched else read == 0
