# SPDX-License-Identifier: Apache-2.0
"""Geometry against a byte-by-byte account of a plane, and the rule that chooses pages."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcached.core.geometry import PAGE_LIMIT_BYTES, BlockGeometry, choose_geometry
from kvcached.errors import GeometryError
from kvcached.units import GIB, KIB, MIB, ceil_div


@st.composite
def small_geometries(draw: st.DrawFn) -> BlockGeometry:
    block = draw(st.integers(1, 40))
    stride = block + draw(st.integers(0, 12))
    page = block + draw(st.integers(0, 90))
    num_blocks = draw(st.integers(1, 120))
    pages = ceil_div(num_blocks * stride, page) + draw(st.integers(0, 2))
    return BlockGeometry(block, stride, page, pages, draw(st.integers(1, 4)), num_blocks)


def pages_touched(geometry: BlockGeometry, block: int) -> set[int]:
    start = block * geometry.block_stride_bytes
    return {byte // geometry.page_bytes for byte in range(start, start + geometry.block_bytes)}


@given(small_geometries())
def test_page_of_names_the_only_page_a_block_touches_or_none(geometry: BlockGeometry) -> None:
    for block in range(geometry.num_blocks):
        touched = pages_touched(geometry, block)
        assert max(touched) < geometry.pages
        assert geometry.page_of(block) == (touched.pop() if len(touched) == 1 else -1)


@given(small_geometries())
def test_blocks_of_is_the_inverse_of_page_of(geometry: BlockGeometry) -> None:
    held = [geometry.blocks_of(page) for page in range(geometry.pages)]
    for page, blocks in enumerate(held):
        assert list(blocks) == [block for block in range(geometry.num_blocks) if geometry.page_of(block) == page]
    assert geometry.usable_blocks == sum(len(blocks) for blocks in held)
    assert geometry.straddling_blocks == sum(geometry.page_of(block) < 0 for block in range(geometry.num_blocks))
    assert geometry.max_blocks_per_page == max(len(blocks) for blocks in held)


@given(small_geometries())
def test_waste_is_what_a_whole_period_loses(geometry: BlockGeometry) -> None:
    period = BlockGeometry(
        geometry.block_bytes, geometry.block_stride_bytes, geometry.page_bytes, geometry.block_stride_bytes, 1, geometry.page_bytes
    )
    payload = sum(len(period.blocks_of(page)) for page in range(period.pages)) * period.block_bytes
    assert geometry.waste == pytest.approx(1 - payload / period.plane_bytes)
    assert 0 <= geometry.waste < 1


def test_sizes_of_range_and_release_step() -> None:
    geometry = BlockGeometry(block_bytes=3, block_stride_bytes=4, page_bytes=16, pages=5, planes=6, num_blocks=20)
    assert geometry.plane_bytes == 80
    assert geometry.range_bytes == 480
    assert geometry.release_step_bytes == 96
    with pytest.raises(FrozenInstanceError):
        geometry.pages = 6  # type: ignore[misc]


@pytest.mark.parametrize("name", ["block_bytes", "block_stride_bytes", "page_bytes", "pages", "planes", "num_blocks"])
def test_every_size_must_be_positive(name: str) -> None:
    sizes = {"block_bytes": 4, "block_stride_bytes": 4, "page_bytes": 16, "pages": 4, "planes": 1, "num_blocks": 16}
    with pytest.raises(GeometryError, match=rf"^{name} is 0; 1 is the least that works"):
        BlockGeometry(**{**sizes, name: 0})


@pytest.mark.parametrize(
    ("sizes", "repair"),
    [
        ({"block_stride_bytes": 5}, "block_stride_bytes"),
        ({"page_bytes": 5, "pages": 40}, "page_bytes"),
        ({"pages": 4, "num_blocks": 10}, "pages"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_one_that_does(sizes: dict[str, int], repair: str) -> None:
    given_sizes = {"block_bytes": 6, "block_stride_bytes": 7, "page_bytes": 16, "pages": 5, "planes": 1, "num_blocks": 11, **sizes}
    with pytest.raises(GeometryError, match=r"works?$") as refusal:
        BlockGeometry(**given_sizes)
    suggested = int(re.findall(r"\d+", str(refusal.value).rpartition(";")[2])[0])
    BlockGeometry(**{**given_sizes, repair: suggested})


@pytest.mark.parametrize(
    ("block_bytes", "page_bytes", "per_page"),
    [
        (2 * MIB, 16 * MIB, 8),  # Llama-3.1-8B, 16 tokens
        (28 * 64 * KIB, 14 * MIB, 8),
        (16 * MIB, 16 * MIB, 1),
        (20 * MIB, 20 * MIB, 1),
        (100 * MIB, 100 * MIB, 1),
        (64 * KIB, 16 * MIB, 256),
    ],
)
@pytest.mark.parametrize("can_pad", [False, True])
def test_blocks_that_tile_a_page_near_16_mib_lose_nothing(block_bytes: int, page_bytes: int, per_page: int, can_pad: bool) -> None:
    geometry = choose_geometry(block_bytes, 128 * GIB // block_bytes, 2 * MIB, can_pad_stride=can_pad)
    assert (geometry.page_bytes, geometry.max_blocks_per_page, geometry.waste) == (page_bytes, per_page, 0)
    assert geometry.block_stride_bytes == block_bytes


def test_a_block_larger_than_the_page_limit_takes_whole_pages() -> None:
    block = PAGE_LIMIT_BYTES + 5 * MIB
    geometry = choose_geometry(block, 9, 2 * MIB, can_pad_stride=True)
    assert geometry.page_bytes == geometry.block_stride_bytes == block + MIB
    assert [geometry.page_of(i) for i in range(9)] == list(range(9))
    with pytest.raises(GeometryError, match=f"blocks of {block + MIB} bytes on pages of {block + MIB} bytes work"):
        choose_geometry(block, 9, 2 * MIB, can_pad_stride=False)


def test_padding_saves_a_block_that_tiles_no_page() -> None:
    block = 15 * MIB + 3 * 256
    with pytest.raises(GeometryError, match="waste more than 2% of every page"):
        choose_geometry(block, 1000, 2 * MIB, can_pad_stride=False, max_waste=0.02)
    geometry = choose_geometry(block, 1000, 2 * MIB, can_pad_stride=True, max_waste=0.07)
    assert (geometry.page_bytes, geometry.block_stride_bytes) == (16 * MIB, 16 * MIB)
    assert geometry.straddling_blocks == 0


def test_pages_of_many_planes_are_as_small_as_a_release_step_of_16_mib_allows() -> None:
    assert choose_geometry(32 * KIB, 100_000, 2 * MIB, planes=64, can_pad_stride=False).page_bytes == 2 * MIB
    assert choose_geometry(32 * KIB, 100_000, 2 * MIB, planes=4, can_pad_stride=False).page_bytes == 4 * MIB


def test_a_small_range_gets_small_pages() -> None:
    geometry = choose_geometry(16 * KIB, 512, 64 * KIB, can_pad_stride=False)
    assert (geometry.page_bytes, geometry.pages) == (128 * KIB, 64)
    assert choose_geometry(16 * KIB, 1, 64 * KIB, can_pad_stride=False).pages == 1


def test_wanted_page_and_floor_are_obeyed() -> None:
    assert choose_geometry(64 * KIB, 4096, 64 * KIB, can_pad_stride=False, target_page_bytes=MIB).page_bytes == MIB
    assert choose_geometry(64 * KIB, 4096, 64 * KIB, can_pad_stride=False, page_bytes_floor=33 * MIB).page_bytes == 33 * MIB
    wide = choose_geometry(50 * MIB, 4096, 2 * MIB, can_pad_stride=False, page_bytes_floor=128 * MIB)
    assert (wide.page_bytes, wide.waste) == (150 * MIB, 0)


@pytest.mark.parametrize("name", ["block_bytes", "num_blocks", "granularity_bytes", "planes"])
def test_choice_refuses_sizes_that_are_not_positive(name: str) -> None:
    sizes = {"block_bytes": KIB, "num_blocks": 8, "granularity_bytes": 64 * KIB, "planes": 1, name: 0}
    with pytest.raises(GeometryError, match=rf"^{name} is 0"):
        choose_geometry(**sizes, can_pad_stride=True)


def test_choice_refuses_a_granularity_that_padding_cannot_divide() -> None:
    with pytest.raises(GeometryError, match="granularity_bytes is 1000, not a multiple of 256; 1024 works"):
        choose_geometry(KIB, 8, 1000, can_pad_stride=False)


@given(
    block_bytes=st.one_of(st.integers(1, 96 * KIB), st.integers(1, 96 * MIB)),
    num_blocks=st.integers(1, 100_000),
    granularity_bytes=st.sampled_from([4 * KIB * 16, 2 * MIB, 4 * MIB]),
    planes=st.sampled_from([1, 2, 64, 160]),
    can_pad=st.booleans(),
    floor=st.sampled_from([None, MIB, 3 * MIB, 80 * MIB]),
)
@example(33 * MIB + 1, 64, 2 * MIB, 1, False, None)
@example(1, 1, 64 * KIB, 1, False, None)
def test_every_choice_is_within_bounds_or_refused_with_a_pair_that_works(
    block_bytes: int, num_blocks: int, granularity_bytes: int, planes: int, can_pad: bool, floor: int | None
) -> None:
    def choose(size: int) -> BlockGeometry:
        return choose_geometry(size, num_blocks, granularity_bytes, planes=planes, can_pad_stride=can_pad, page_bytes_floor=floor)

    try:
        geometry = choose(block_bytes)
    except GeometryError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        pair = re.search(r"blocks of (\d+) bytes on pages of (\d+) bytes work$", refusal)
        assert pair, refusal
        assert choose(int(pair[1])).waste <= 0.10
        assert BlockGeometry(int(pair[1]), int(pair[1]), int(pair[2]), num_blocks, 1, num_blocks).waste == 0
        return
    assert geometry.waste <= 0.10
    assert geometry.page_bytes % granularity_bytes == 0
    assert geometry.page_bytes >= max(floor or 0, block_bytes)
    assert (geometry.num_blocks, geometry.planes, geometry.block_bytes) == (num_blocks, planes, block_bytes)
    if geometry.block_stride_bytes != block_bytes:
        assert can_pad
        assert geometry.block_stride_bytes % 256 == 0
        assert geometry.page_bytes % geometry.block_stride_bytes == 0
        assert geometry.straddling_blocks == 0
