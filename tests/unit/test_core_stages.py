# SPDX-License-Identifier: Apache-2.0
"""One map of blocks to pages over ranks whose blocks differ in bytes, against a block-by-block account of every rank."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.core.geometry import PAGE_LIMIT_BYTES, BlockGeometry, choose_geometry
from kvcached.core.stages import Stage, choose_stages, require_same_pages, same_pages
from kvcached.errors import GeometryError
from kvcached.units import KIB, MIB, ceil_div

GRANULARITIES = [4 * KIB, 64 * KIB, 2 * MIB]


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    return Stage(
        block_bytes=draw(st.integers(1, 96)) * draw(st.sampled_from([16 * KIB, 64 * KIB, 256 * KIB, 100 * KIB + 8])),
        granularity_bytes=draw(st.sampled_from(GRANULARITIES)),
        planes=draw(st.sampled_from([1, 1, 2, 30])),
        can_pad_stride=draw(st.booleans()),
    )


several = st.lists(stages(), min_size=1, max_size=4)


def maps(geometries: tuple[BlockGeometry, ...], blocks: int) -> set[tuple[int, ...]]:
    return {tuple(geometry.page_of(block) for block in range(min(blocks, geometry.num_blocks))) for geometry in geometries}


@settings(deadline=None)
@given(several, st.integers(1, 3000))
def test_every_rank_has_the_same_blocks_on_every_page_on_pages_its_card_can_map(ranks: list[Stage], num_blocks: int) -> None:
    try:
        geometries = choose_stages(ranks, num_blocks)
    except GeometryError:
        return
    assert len(maps(geometries, num_blocks)) == 1
    assert same_pages(geometries)
    require_same_pages(geometries)
    for stage, geometry in zip(ranks, geometries, strict=True):
        assert (geometry.block_bytes, geometry.planes, geometry.num_blocks) == (stage.block_bytes, stage.planes, num_blocks)
        assert geometry.page_bytes % stage.granularity_bytes == 0
        assert geometry.block_stride_bytes >= stage.block_bytes
        assert stage.can_pad_stride or geometry.block_stride_bytes == stage.block_bytes
        assert geometry.waste <= 0.10
        assert geometry.page_bytes <= max(PAGE_LIMIT_BYTES, ceil_div(stage.block_bytes, stage.granularity_bytes) * stage.granularity_bytes)


@settings(deadline=None)
@given(stages(), st.integers(1, 8), st.integers(1, 3000), st.sampled_from([None, MIB, 3 * MIB]))
def test_equal_stages_get_the_answer_of_one(stage: Stage, ranks: int, num_blocks: int, floor: int | None) -> None:
    options = {"planes": stage.planes, "can_pad_stride": stage.can_pad_stride, "page_bytes_floor": floor}
    try:
        one = choose_geometry(stage.block_bytes, num_blocks, stage.granularity_bytes, **options)
    except GeometryError as error:
        with pytest.raises(GeometryError, match=f"^{re.escape(str(error))}$"):
            choose_stages([stage] * ranks, num_blocks, page_bytes_floor=floor)
    else:
        assert choose_stages([stage] * ranks, num_blocks, page_bytes_floor=floor) == (one,) * ranks


@settings(deadline=None)
@given(several, st.integers(1, 3000), st.randoms())
def test_every_rank_computes_the_same_answer_whatever_its_number(ranks: list[Stage], num_blocks: int, random: object) -> None:
    order = list(range(len(ranks)))
    random.shuffle(order)  # type: ignore[attr-defined]
    try:
        geometries = choose_stages(ranks, num_blocks)
    except GeometryError:
        return
    shuffled = choose_stages([ranks[rank] for rank in order], num_blocks)
    waste = sum(geometry.waste * geometry.block_bytes * geometry.planes for geometry in geometries)
    other = sum(geometry.waste * geometry.block_bytes * geometry.planes for geometry in shuffled)
    assert other == pytest.approx(waste)


@settings(deadline=None)
@given(several, st.sampled_from([0.0, 0.01, 0.10]))
def test_what_a_refusal_says_works(ranks: list[Stage], max_waste: float) -> None:
    try:
        choose_stages(ranks, 1000, max_waste=max_waste)
    except GeometryError as error:
        if "stages" not in str(error):
            return  # a stage that does not even work alone: the refusal is choose_geometry's
        works = re.findall(r"(\d+) bytes on pages of (\d+) bytes", str(error))
        distinct = list(dict.fromkeys(ranks))
        assert len(works) == len(distinct)
        suggested = [
            Stage(int(block), stage.granularity_bytes, stage.planes, stage.can_pad_stride)
            for (block, _), stage in zip(works, distinct, strict=True)
        ]
        geometries = choose_stages(suggested, 1000, max_waste=max_waste)
        assert all(suggestion.block_bytes >= stage.block_bytes for suggestion, stage in zip(suggested, distinct, strict=True))
        assert same_pages(geometries)


@pytest.mark.parametrize(
    ("layers", "page_mib"),
    [
        ((16, 16), (16, 16)),  # equal stages of an 8B model at TP=2: blocks of 1 MiB
        ((17, 15), (34, 30)),
        ((9, 8, 8, 7), (18, 16, 16, 14)),
        ((1, 3), (6, 18)),
    ],
)
def test_stages_of_unequal_layers_lose_nothing(layers: tuple[int, ...], page_mib: tuple[int, ...]) -> None:
    geometries = choose_stages([Stage(count * 64 * KIB, 2 * MIB) for count in layers], 20_000)
    assert sum(geometry.waste for geometry in geometries) == 0
    assert len({geometry.max_blocks_per_page for geometry in geometries}) == 1
    assert tuple(geometry.page_bytes // MIB for geometry in geometries) == page_mib


def test_stages_in_the_layered_layout_differ_only_in_planes() -> None:
    geometries = choose_stages([Stage(64 * KIB, 2 * MIB, planes, can_pad_stride=False) for planes in (17, 15)], 20_000)
    assert {(geometry.page_bytes, geometry.block_stride_bytes) for geometry in geometries} == {(2 * MIB, 64 * KIB)}
    assert [geometry.planes for geometry in geometries] == [17, 15]


def test_dense_blocks_straddle_alike() -> None:
    """Blocks of 3/4 page without gaps: two of three straddle nowhere, on every rank."""
    geometries = choose_stages([Stage(size, 2 * MIB, 1, can_pad_stride=False) for size in (3 * MIB // 2, 3 * MIB)], 5_000)
    assert same_pages(geometries)
    assert len(maps(geometries, 5_000)) == 1
    assert geometries[0].straddling_blocks == geometries[1].straddling_blocks


def test_the_least_page_that_is_asked_for_is_kept_on_every_rank() -> None:
    geometries = choose_stages([Stage(size * 64 * KIB, 2 * MIB) for size in (17, 15)], 20_000, page_bytes_floor=40 * MIB)
    assert min(geometry.page_bytes for geometry in geometries) >= 40 * MIB
    assert same_pages(geometries)


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 63},
        {"pages": 9},
        {"block_stride_bytes": 1280, "page_bytes": 8 * 1280 + 256},
        {"block_stride_bytes": 2048},
    ],
)
def test_a_rank_with_another_map_is_named(change: dict[str, int]) -> None:
    sizes = {"block_bytes": 1024, "block_stride_bytes": 1024, "page_bytes": 8192, "pages": 20, "planes": 1, "num_blocks": 64}
    same, other = BlockGeometry(**sizes), BlockGeometry(**(sizes | change))
    assert not same_pages([same, same, other])
    with pytest.raises(GeometryError, match=r"^rank 2 has"):
        require_same_pages([same, same, other])


@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 90), st.integers(1, 40), st.integers(0, 12), st.integers(0, 90))
def test_same_pages_is_never_said_of_maps_that_differ(block: int, gap: int, room: int, block2: int, gap2: int, room2: int) -> None:
    def make(block: int, gap: int, room: int) -> BlockGeometry:
        stride, page = block + gap, block + room
        return BlockGeometry(block, stride, page, 200 * stride // page + 1 if 200 * stride % page else 200 * stride // page, 1, 200)

    both = (make(block, gap, room), make(block2, gap2, room2))
    if same_pages(both):
        assert len(maps(both, 200)) == 1
    scaled = make(3 * block, 3 * gap, 3 * room)
    assert same_pages((both[0], scaled))
