# SPDX-License-Identifier: Apache-2.0
"""Slots of an SGLang pool on pages: every slot at its own place, none across two pages, little waste."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.engines.sglang.placement import ALIGNMENT_BYTES, MAX_WASTE, Placement, place
from kvcached.errors import GeometryError
from kvcached.units import MIB

GRANULARITY = 2 * MIB


def lay(rows: list[int], page_slots: int, *, blocks: int = 4096, interleaved: bool = True) -> Placement:
    return place(rows, page_slots=page_slots, blocks=blocks, granularity_bytes=GRANULARITY, interleaved=interleaved)


@pytest.mark.parametrize("page_slots", [1, 16, 64])
def test_an_8b_shape_gives_memory_back_in_steps_of_16_mib(page_slots: int) -> None:
    placement = lay([2048] * 64, page_slots, blocks=100_000 // page_slots)  # 32 layers, K and V, 8 heads of 128, 2 bytes
    assert placement.slot_bytes == 64 * 2048
    assert placement.geometry.release_step_bytes == 16 * MIB
    assert placement.geometry.waste == 0


def test_dense_planes_give_memory_back_in_a_page_of_each() -> None:
    placement = lay([2048] * 64, 16, blocks=6250, interleaved=False)
    assert placement.slot_bytes == 2048
    assert placement.geometry.release_step_bytes == 64 * GRANULARITY
    assert placement.offsets_bytes == tuple(row * placement.geometry.plane_bytes for row in range(64))


rows = st.lists(st.integers(1, 64).map(lambda units: units * 64), min_size=2, max_size=80)


@given(rows, st.sampled_from([1, 2, 16, 32, 64]), st.integers(2, 5000))
def test_no_slot_straddles_and_rows_do_not_overlap(rows: list[int], page_slots: int, blocks: int) -> None:
    try:
        placement = lay(rows, page_slots, blocks=blocks)
    except GeometryError:
        return
    geometry = placement.geometry
    assert geometry.straddling_blocks == 0
    assert geometry.block_stride_bytes == placement.slot_bytes * page_slots
    assert geometry.page_bytes % geometry.block_stride_bytes == 0
    assert placement.slot_bytes % ALIGNMENT_BYTES == 0
    assert geometry.waste <= MAX_WASTE
    ends = [offset + size for offset, size in zip(placement.offsets_bytes, rows, strict=True)]
    assert all(end == start for end, start in zip(ends, placement.offsets_bytes[1:], strict=False))
    assert ends[-1] <= placement.slot_bytes


@given(st.integers(1, 64).map(lambda units: units * 64), st.integers(2, 64), st.sampled_from([1, 16]), st.integers(2, 500))
def test_dense_planes_have_no_gaps(row: int, count: int, page_slots: int, blocks: int) -> None:
    try:
        placement = lay([row] * count, page_slots, blocks=blocks, interleaved=False)
    except GeometryError:
        return
    assert placement.slot_bytes == row
    assert placement.geometry.straddling_blocks == 0
    assert placement.geometry.planes == count


def test_rows_of_two_sizes_need_the_interleaved_layout() -> None:
    with pytest.raises(GeometryError, match="CONTIGUOUS_LAYOUT"):
        lay([2048, 1024], 16, interleaved=False)


def test_what_fits_no_page_is_refused_with_its_sizes() -> None:
    with pytest.raises(GeometryError, match="slots of 1152 bytes in pages of 16"):
        place([1152] * 2, page_slots=16, blocks=100, granularity_bytes=64 * MIB, interleaved=False)


def test_a_page_size_that_is_asked_for_is_a_lower_bound() -> None:
    placement = place([2048] * 64, page_slots=16, blocks=6250, granularity_bytes=GRANULARITY, interleaved=True, page_bytes_floor=40 * MIB)
    assert placement.geometry.page_bytes >= 40 * MIB
