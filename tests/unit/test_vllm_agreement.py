# SPDX-License-Identifier: Apache-2.0
"""The workers of an engine agree on pages, or all refuse for the same reason; a step keeps the memory that it runs over."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvcached.core.stages import Stage, same_pages
from kvcached.engines.vllm.agreement import Seat, agree, exchange, meeting_place
from kvcached.engines.vllm.occupancy import Occupancy
from kvcached.errors import EngineNotSupported, GeometryError, PeerLost
from kvcached.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path


def crew(*layers: int, instance: str = "tiny") -> list[Seat]:
    return [Seat(instance, rank, "here", 1000, 0, Stage(count * 64 * KIB, 2 * MIB)) for rank, count in enumerate(layers)]


def answers(seats: list[Seat], ranks: int) -> list[object]:
    """What every worker computes from the same exchange; seats arrive in whatever order."""
    found: list[object] = []
    for seat in seats:
        try:
            found.append(agree(seat, seats[::-1], ranks))
        except EngineNotSupported as error:
            found.append(str(error))
    return found


def test_stages_get_geometries_of_their_own_with_the_same_pages() -> None:
    geometries = answers(crew(17, 15), 2)
    assert [geometry.block_bytes for geometry in geometries] == [17 * 64 * KIB, 15 * 64 * KIB]
    assert same_pages(geometries)


def test_other_engine_cores_in_the_same_exchange_do_not_count() -> None:
    mine, other = crew(17, 15), [replace(seat, rank=seat.rank) for seat in crew(3, 3, instance="tiny-dp1")]
    assert agree(mine[1], mine + other, 2) == agree(mine[1], mine, 2)


def test_the_largest_page_that_anyone_asks_for_counts() -> None:
    one, two = crew(16, 16)
    geometry = agree(one, [one, replace(two, page_bytes_floor=32 * MIB)], 2)
    assert geometry.page_bytes >= 32 * MIB


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stage": None, "problem": "its layers differ"}, "rank 1 cannot be elastic: its layers differ"),
        ({"place": "there"}, "rank 1 is on another machine than rank 0, or sees another run directory"),
        ({"num_blocks": 999}, "vLLM gave rank 1 999 KV blocks and rank 0 1000"),
        ({"instance": "other"}, r"ranks \[0\], and 2 were started"),
        ({"rank": 0}, r"ranks \[0, 0\], and 2 were started"),
    ],
)
def test_what_stands_against_one_worker_is_said_by_all_of_them(change: dict[str, object], says: str) -> None:
    one, two = crew(16, 16)
    seats = [one, replace(two, **change)]
    with pytest.raises(EngineNotSupported, match=says):
        agree(one, seats, 2)
    told = answers([seat for seat in seats if seat.instance == one.instance], 2)
    assert len(set(told)) == 1


def test_stages_that_no_page_suits_are_refused() -> None:
    seats = [
        Seat("tiny", rank, "here", 1000, 0, Stage(block, 2 * MIB, 1, can_pad_stride=False)) for rank, block in enumerate((MIB + 256, MIB))
    ]
    with pytest.raises(GeometryError, match="work"):
        agree(seats[0], seats, 2)


def test_one_worker_exchanges_nothing() -> None:
    (seat,) = crew(16)
    assert exchange(seat, 1) == [seat]


def test_a_place_is_the_machine_and_the_directory(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert meeting_place(tmp_path / "a") == meeting_place(tmp_path / "link")
    assert meeting_place(tmp_path / "a") != meeting_place(tmp_path / "b")


def test_no_step_begins_once_the_memory_is_to_go() -> None:
    occupancy = Occupancy()
    with occupancy, occupancy:
        pass
    assert occupancy.close("the scheduler is gone", 0)
    with pytest.raises(PeerLost, match="the scheduler is gone"), occupancy:
        pytest.fail("a step ran")


def test_memory_waits_for_the_step_that_runs_over_it() -> None:
    occupancy, closed = Occupancy(), threading.Event()
    results: list[bool] = []
    with occupancy:
        closer = threading.Thread(target=lambda: (results.append(occupancy.close("gone", 60)), closed.set()))
        closer.start()
        assert not closed.wait(0.05)
    closer.join()
    assert results == [True]


def test_a_step_that_does_not_end_keeps_the_memory() -> None:
    occupancy = Occupancy()
    with occupancy:
        assert not occupancy.close("gone", 0.01)


def test_a_step_that_fails_is_over() -> None:
    occupancy = Occupancy()
    with pytest.raises(ValueError, match="boom"), occupancy:
        raise ValueError("boom")
    assert occupancy.close("gone", 0)
