# SPDX-License-Identifier: Apache-2.0
"""Hybrid models: the states of linear attention beside the tokens of the other layers. That tokens are the stock engine's is among the
other models' tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_harness.matrix import FEW_STATES, HYBRID_1, NEWEST

if TYPE_CHECKING:
    from sglang_harness.cases import Batch

NEEDED = 3  # states of a request


def test_few_states_change_no_token(ran: dict[str, Batch]) -> None:
    seen = ran[NEWEST][FEW_STATES.name]
    assert seen["tokens"] == ran[NEWEST][HYBRID_1.static().name]["tokens"]
    assert (seen["held_pages"], seen["leased"], seen["problems"]) == ([1, 1], [1, 1], [])


def test_no_more_requests_run_than_have_states(ran: dict[str, Batch]) -> None:
    seen = ran[NEWEST][FEW_STATES.name]
    steps: list[list[int]] = seen["seen"]
    most_running = max(running for running, *_ in steps)
    assert 1 < most_running < FEW_STATES.also["prompts"] + 1
    assert max(used + spare for _, used, spare, _ in steps) <= seen["most"] < seen["size"]
    assert all(used + spare >= running * NEEDED for running, used, spare, _ in steps)


def test_spare_states_are_free_for_the_engine_and_none_is_left_when_it_idles(ran: dict[str, Batch]) -> None:
    seen = ran[NEWEST][FEW_STATES.name]
    assert all(free == seen["size"] - used for _, used, _, free in seen["seen"])
    _, used, spare, _ = seen["seen"][-1]
    assert used > 0
    assert spare == 0


def test_a_cell_has_all_states_of_a_slot_and_cells_tile_the_page(ran: dict[str, Batch]) -> None:
    seen = ran[NEWEST][FEW_STATES.name]
    (cell,) = set(seen["cells"])
    assert cell >= sum(seen["rows"])
    assert seen["page"] % cell == 0
