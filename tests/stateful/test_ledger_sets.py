# SPDX-License-Identifier: Apache-2.0
"""Sets of blocks on pages are a faster way of saying the same: two ledgers, one told in ranges and one in sets, never differ."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvcached.core.geometry import BlockGeometry
from kvcached.core.invariants import check
from kvcached.core.ledger import Ledger
from kvcached.engines.sglang.page_sets import PageSets, row_of
from kvcached.errors import InvariantBroken, Misuse

if TYPE_CHECKING:
    from collections.abc import Sequence

GEOMETRIES = {
    "one block a page": BlockGeometry(16, 16, 16, 24, 1, 24),
    "four": BlockGeometry(4, 4, 16, 12, 1, 48),
    "seven, the last page is not full": BlockGeometry(1, 1, 7, 9, 1, 60),
    "seventy, no power of two": BlockGeometry(1, 1, 70, 5, 1, 350),
    "sixteen, padded": BlockGeometry(3, 4, 64, 8, 1, 128),
}
SEEN = ("states", "frees", "owned", "cached", "counts", "markers", "available", "held", "parked", "retired", "completed",
        "largest_marker", "open_page", "mapped_blocks", "lost_owned_blocks", "withheld")  # fmt: skip
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "give", "give", "advance", "grow", "shrink", "limit"]), st.integers(0, 10_000)), max_size=40
)


def ranges_of(ids: Sequence[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for block in sorted(ids):
        if ranges and sum(ranges[-1]) == block:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((block, 1))
    return ranges


class Twins:
    """The same calls on both."""

    def __init__(self, geometry: BlockGeometry) -> None:
        self.slow, self.fast = (Ledger(geometry, limit_pages=geometry.pages) for _ in range(2))
        self.sets = PageSets(geometry)
        self.owned: list[int] = []
        self.marker = self.revision = 0

    def grow(self, number: int) -> None:
        for ledger in (self.slow, self.fast):
            ledger.settle_grow(ledger.plan_grow(number % 6), mapped=True)

    def shrink(self, number: int) -> None:
        for ledger in (self.slow, self.fast):
            ledger.settle_shrink(ledger.plan_shrink(number % 4), released=True)

    def limit(self, number: int) -> None:
        self.revision += 1
        for ledger in (self.slow, self.fast):
            ledger.set_limit(number % (ledger.geometry.pages + 1), self.revision)

    def advance(self, number: int) -> None:
        for ledger in (self.slow, self.fast):
            ledger.advance(self.marker - number % 3)

    def take(self, number: int) -> None:
        blocks = number % (self.slow.available() + 2)
        ranges, taken = self.slow.take(blocks), self.fast.take_sets(blocks)
        assert (ranges is None) == (taken is None)
        if ranges is None or taken is None:
            return
        ids = self.sets.ids_of(*taken).tolist()
        assert sorted(ids) == sorted(block for first, count in ranges for block in range(first, first + count))
        assert len(ids) == blocks
        self.owned += ids

    def give(self, number: int) -> None:
        random.Random(number).shuffle(self.owned)
        cut = number % (len(self.owned) + 1)
        given, self.owned = self.owned[:cut], self.owned[cut:]
        self.marker += number % 2
        marker = self.marker if number % 3 else -1
        self.slow.give(ranges_of(given), marker)
        self.fast.give_sets(self.sets.sets_of(np.array(given, dtype=np.int64)), marker)

    def compare(self) -> None:
        slow, fast = self.slow._table, self.fast._table
        for name in SEEN:
            assert getattr(slow, name) == getattr(fast, name), name
        check(self.fast)
        assert sorted(self.sets.ids_of([], self.fast.owned_sets()).tolist()) == sorted(self.owned)


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_sets_and_ranges_lead_to_the_same_ledger(geometry: BlockGeometry, steps: list[tuple[str, int]]) -> None:
    twins = Twins(geometry)
    twins.grow(5)
    for name, number in steps:
        getattr(twins, name)(number)
        twins.compare()


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_ids_survive_the_way_to_sets_and_back(geometry: BlockGeometry, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, geometry.num_blocks - 1), unique=True))
    sets = PageSets(geometry)
    array = np.array(ids, dtype=np.int64)
    pages = sets.sets_of(array)
    assert sets.ids_of([], pages).tolist() == sorted(ids)
    assert [page for page, _ in pages] == sorted({geometry.page_of(block) for block in ids})
    parts = np.array([block * 16 + part for block in ids for part in (0, 15, 7)], dtype=np.int64)
    assert sets.sets_of(parts, times=16) == pages
    assert sets.sets_of(array) == pages  # nothing was left behind


def test_ids_that_are_wrong_are_refused_and_leave_nothing_behind() -> None:
    sets = PageSets(GEOMETRIES["seven, the last page is not full"])
    for wrong in ([3, 3], [-1, 4], [4, 60]):
        with pytest.raises(InvariantBroken, match="ids"):
            sets.sets_of(np.array(wrong))
    assert sets.sets_of(np.array([8])) == [(1, 2)]


@pytest.mark.parametrize(("ids", "row"), [([4], (4, 1)), ([4, 5, 6], (4, 3)), ([4, 6, 5, 7], None), ([5, 4], None), ([1, 3], None)])
def test_neighbours_are_found(ids: list[int], row: tuple[int, int] | None) -> None:
    assert row_of(np.array(ids)) == row


@pytest.mark.parametrize("wrong", [(0, 0b10), (2, 1), (0, 0), (-1, 1), (-12, 0b1000), (12, 1), (0, 1 << 40)])
def test_a_set_that_is_not_owned_is_refused_and_nothing_changes(wrong: tuple[int, int]) -> None:
    ledger = Ledger(GEOMETRIES["four"], limit_pages=12)
    ledger.settle_grow(ledger.plan_grow(2), mapped=True)
    ledger.take(8)
    ledger.give([(1, 1)], 0)
    before = ledger.owned_sets()
    with pytest.raises(Misuse):
        ledger.give_sets([(1, 0b11), wrong], 0)
    with pytest.raises(Misuse):
        ledger.give_sets([(1, 0b11), (1, 0b10)], 0)
    assert ledger.owned_sets() == before == [(0, 0b1101), (1, 0b1111)]
    assert ledger.counts().free_blocks == 1
    check(ledger)


def test_neighbours_are_one_range_and_others_a_set() -> None:
    ledger = Ledger(GEOMETRIES["four"], limit_pages=12)
    ledger.settle_grow(ledger.plan_grow(6), mapped=True)
    assert ledger.take_sets(2) == ([(0, 2)], [])
    assert ledger.take_sets(18) == ([(4, 16), (2, 2)], [])
    ledger.give([(0, 1), (2, 1), (3, 1)], 0)
    assert ledger.take_sets(3) == ([], [(0, 0b1101)])
    assert ledger.take_sets(99) is None
    with pytest.raises(Misuse, match="-1 blocks"):
        ledger.take_sets(-1)


def test_the_page_taken_from_last_has_no_precedence_over_others_that_were_left_before() -> None:
    twins = Twins(GEOMETRIES["four"])
    twins.grow(3)
    for ledger in (twins.slow, twins.fast):
        ledger.take(12)
        ledger.give([(8, 3)], 0)
        ledger.take(1)  # page 2 is open, with two free blocks
        ledger.give([(0, 3), (4, 2)], 0)
    assert twins.slow.take(6) == [(0, 3), (4, 2), (9, 1)]
    assert twins.fast.take_sets(6) == ([(4, 2), (9, 1)], [(0, 0b0111)])
    assert twins.slow.owned_sets() == twins.fast.owned_sets()
