# SPDX-License-Identifier: Apache-2.0
"""The ledger by scenario: what a pool, an engine and an operator do, and what must not come of it."""

from __future__ import annotations

import random

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.invariants import check
from kvcached.core.ledger import BlockState, GrowPlan, Ledger, PageState, ShrinkPlan
from kvcached.core.limits import LimitOutcome
from kvcached.errors import InvariantBroken, Misuse


def geometry(blocks_per_page: int = 4, pages: int = 8, num_blocks: int | None = None) -> BlockGeometry:
    return BlockGeometry(1, 1, blocks_per_page, pages, 1, pages * blocks_per_page if num_blocks is None else num_blocks)


def mapped(blocks_per_page: int = 4, pages: int = 8, *, grown: int | None = None, max_run_pages: int = 1) -> Ledger:
    ledger = Ledger(geometry(blocks_per_page, pages), limit_pages=pages)
    ledger.settle_grow(ledger.plan_grow(pages if grown is None else grown, max_run_pages=max_run_pages), mapped=True)
    return ledger


def take(ledger: Ledger, blocks: int) -> list[int]:
    ranges = ledger.take(blocks)
    assert ranges is not None
    return [block for first, count in ranges for block in range(first, first + count)]


def give(ledger: Ledger, ids: list[int], marker: int = 0) -> None:
    ledger.give([(block, 1) for block in ids], marker)


def picture(ledger: Ledger) -> object:
    """Everything that can be seen of a ledger."""
    states = [ledger.state_of(block) for block in range(ledger.geometry.num_blocks)]
    return ledger.counts(), list(ledger.pages()), states


def states(ledger: Ledger) -> dict[int, str]:
    return {report.page: report.state.name for report in ledger.pages()}


# ---------------------------------------------------------------------- take and give


def test_nothing_is_available_before_a_page_is_mapped() -> None:
    ledger = Ledger(geometry(), limit_pages=8)
    assert ledger.available() == 0
    assert ledger.take(1) is None
    assert ledger.take(0) == []
    assert ledger.state_of(0) is BlockState.ABSENT
    check(ledger)


def test_a_take_is_all_or_nothing() -> None:
    ledger = mapped(grown=2)
    before = picture(ledger)
    assert ledger.take(9) is None
    assert picture(ledger) == before
    assert len(take(ledger, 8)) == 8


def test_a_negative_take_is_refused() -> None:
    with pytest.raises(Misuse, match="-1 blocks"):
        mapped().take(-1)


def test_whole_pages_come_as_one_range() -> None:
    assert mapped(blocks_per_page=4).take(12) == [(0, 12)]


def test_whole_pages_are_found_between_others() -> None:
    ledger = mapped(blocks_per_page=1, pages=6)
    ledger.take(6)
    ledger.give([(0, 1), (1, 1), (3, 1), (4, 1), (5, 1)], 0)
    ledger.advance(0)
    assert ledger.take(5) == [(0, 2), (3, 3)]
    check(ledger)


def test_the_tightest_page_that_holds_the_whole_is_taken() -> None:
    ledger = mapped(blocks_per_page=8, pages=4)
    ledger.take(32)
    ledger.give([(0, 5), (8, 3), (16, 4)], 0)
    assert ledger.take(3) == [(8, 3)]
    assert ledger.take(4) == [(16, 4)]
    assert ledger.take(4) == [(0, 4)]
    check(ledger)


def test_a_better_fit_is_preferred_to_the_page_taken_from_last() -> None:
    ledger = mapped(blocks_per_page=8, pages=2)
    ledger.take(16)
    ledger.give([(8, 7)], 0)
    assert ledger.take(1) == [(8, 1)]
    ledger.give([(2, 3)], 0)
    assert ledger.take(1) == [(2, 1)]
    check(ledger)


def test_used_pages_go_before_parked_and_parked_before_retired_ones() -> None:
    ledger = mapped(blocks_per_page=4, pages=3)
    ledger.take(12)
    ledger.give([(0, 4)], 5)  # retires
    ledger.give([(4, 4)], -1)  # is parked
    ledger.give([(8, 2)], 5)
    assert states(ledger) == {0: "RETIRED", 1: "PARKED", 2: "USED"}
    assert ledger.take(2) == [(8, 2)]
    assert ledger.take(4) == [(4, 4)]
    assert ledger.take(4) == [(0, 4)]


def test_without_an_empty_page_the_emptiest_pages_are_joined() -> None:
    ledger = mapped(blocks_per_page=8, pages=3)
    ledger.take(24)
    ledger.give([(0, 2), (8, 5), (16, 3)], 0)
    assert ledger.take(7) == [(8, 5), (0, 2)]
    check(ledger)


def test_holes_of_a_page_are_filled_from_the_lowest() -> None:
    ledger = mapped(blocks_per_page=8, pages=1)
    ledger.take(8)
    ledger.give([(1, 1), (3, 2), (6, 2)], 0)
    assert ledger.take(4) == [(1, 1), (3, 2), (6, 1)]


@pytest.mark.parametrize("blocks_per_page", [1, 2, 4, 64, 1024])
def test_every_block_can_be_taken_once_and_given_again(blocks_per_page: int) -> None:
    ledger = mapped(blocks_per_page, pages=5)
    seen: list[int] = []
    for size in (1, 3, 1, 2 * blocks_per_page):
        if size <= ledger.available():
            seen += take(ledger, size)
    seen += take(ledger, ledger.available())
    assert sorted(seen) == list(range(5 * blocks_per_page))
    random.Random(0).shuffle(seen)
    give(ledger, seen)
    ledger.advance(0)
    assert ledger.available() == 5 * blocks_per_page
    assert ledger.parked_pages == 5
    check(ledger)


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 4), (2, 1)],
        [(0, 4), (0, 4)],
        [(0, 4), (40, 1)],
        [(0, 4), (-1, 1)],
        [(4, 0)],
        [(4, -2)],
        [(0, 33)],
        [(0, 1), (31, 1)],
        [(0, 12), (4, 8)],
        [(0, 2), (0, 16)],
    ],
)
def test_a_wrong_give_changes_nothing(ranges: list[tuple[int, int]]) -> None:
    ledger = mapped()
    assert take(ledger, 12) == list(range(12))
    before = picture(ledger)
    with pytest.raises(Misuse):
        ledger.give(ranges, 1)
    assert picture(ledger) == before
    check(ledger)


def test_a_double_give_names_the_block() -> None:
    ledger = mapped()
    take(ledger, 4)
    ledger.give([(2, 1)], 0)
    with pytest.raises(Misuse, match="block 2 is free, not owned"):
        ledger.give([(0, 4)], 0)


def test_an_absent_block_cannot_be_given() -> None:
    ledger = Ledger(BlockGeometry(5, 5, 16, 4, 1, 12), limit_pages=4)
    ledger.settle_grow(ledger.plan_grow(1), mapped=True)
    take(ledger, 3)
    for block in (3, 4, 11):  # straddles; on pages that were never mapped
        with pytest.raises(Misuse, match=f"block {block} is absent"):
            ledger.give([(0, 1), (block, 1)], 0)
    check(ledger)


def test_any_iterable_of_ranges_can_be_given() -> None:
    ledger = mapped()
    ranges = ledger.take(7)
    assert ranges is not None
    ledger.give(iter(ranges), 0)
    assert ledger.available() == 32


# ---------------------------------------------------------------------- exact ids, the null block


@pytest.mark.parametrize("blocks_per_page", [1, 4])
def test_the_null_block_is_always_zero_and_never_handed_out(blocks_per_page: int) -> None:
    for seed in range(1000):
        choose = random.Random(seed)
        ledger = Ledger(geometry(blocks_per_page, 8), limit_pages=8)
        ledger.settle_grow(ledger.plan_grow(choose.randint(1, 5)), mapped=True)
        assert ledger.take_ids([0])
        ledger.pin(0)
        handed: list[int] = []
        for _ in range(3):
            handed += take(ledger, choose.randint(0, ledger.available()))
            ledger.settle_grow(ledger.plan_grow(1), mapped=True)
        assert 0 not in handed
        give(ledger, handed, 0)
        ledger.advance(0)
        ledger.settle_shrink(ledger.plan_shrink(8), released=True)
        assert ledger.is_owned(0)
        assert ledger.held_pages == 1


def test_exact_ids_are_taken_together_or_not_at_all() -> None:
    ledger = mapped(grown=3)
    assert ledger.take_ids([1, 9])
    before = picture(ledger)
    assert not ledger.take_ids([2, 1])
    assert not ledger.take_ids([2, 20])  # not mapped
    assert picture(ledger) == before
    for wrong in ([2, 2], [-1], [32]):
        with pytest.raises(Misuse):
            ledger.take_ids(wrong)
    assert sorted(take(ledger, 10)) == [0, 2, 3, 4, 5, 6, 7, 8, 10, 11]


def test_a_straddling_block_cannot_be_named() -> None:
    ledger = Ledger(BlockGeometry(5, 5, 16, 4, 1, 12), limit_pages=4)
    ledger.settle_grow(ledger.plan_grow(4), mapped=True)
    assert ledger.state_of(3) is BlockState.ABSENT
    with pytest.raises(Misuse, match="straddles"):
        ledger.take_ids([3])
    assert 3 not in take(ledger, ledger.available())


def test_a_pinned_page_is_never_planned_away() -> None:
    ledger = mapped(pages=3)
    ledger.pin(1)
    assert ledger.plan_shrink(3).runs == ((2, 1), (0, 1))
    with pytest.raises(Misuse):
        ledger.pin(3)


# ---------------------------------------------------------------------- retirement


def test_an_empty_page_waits_for_its_marker() -> None:
    ledger = mapped(blocks_per_page=4, pages=2, grown=1)
    take(ledger, 4)
    ledger.give([(0, 2)], 7)
    ledger.give([(2, 2)], 5)
    assert states(ledger) == {0: "RETIRED"}
    assert not ledger.plan_shrink(1).runs
    assert ledger.advance(6) == 0
    assert ledger.advance(7) == 1
    assert ledger.advance(7) == ledger.advance(3) == 0
    assert ledger.plan_shrink(1).runs == ((0, 1),)


def test_a_retired_page_may_be_taken_back_and_retires_by_its_last_marker() -> None:
    ledger = mapped(blocks_per_page=4, pages=1)
    take(ledger, 4)
    ledger.give([(0, 4)], 1)
    take(ledger, 1)
    assert ledger.advance(1) == 0
    ledger.give([(0, 1)], 3)
    assert ledger.advance(2) == 0
    assert states(ledger) == {0: "RETIRED"}
    assert ledger.advance(3) == 1


def test_an_earlier_retirement_does_not_end_a_later_one() -> None:
    ledger = mapped(blocks_per_page=4, pages=1)
    take(ledger, 4)
    ledger.give([(0, 4)], 1)
    take(ledger, 1)
    ledger.give([(0, 1)], 3)
    assert ledger.advance(1) == 0
    assert states(ledger) == {0: "RETIRED"}
    assert ledger.advance(3) == 1


def test_several_pages_retire_at_once_and_each_by_its_own_marker() -> None:
    ledger = mapped(blocks_per_page=2, pages=4)
    take(ledger, 8)
    ledger.give([(0, 1)], 9)
    take(ledger, 1)
    ledger.give([(0, 8)], 4)  # page 0 keeps marker 9
    assert [report.marker for report in ledger.pages()] == [9, 4, 4, 4]
    assert ledger.advance(4) == 3
    assert ledger.advance(9) == 1
    take(ledger, 8)
    ledger.give([(0, 8)], 12)
    assert ledger.advance(11) == 0
    assert ledger.advance(12) == 4
    check(ledger)


# ---------------------------------------------------------------------- cached blocks


def test_a_cached_block_is_kept_until_it_is_evicted() -> None:
    ledger = mapped(blocks_per_page=4, pages=1)
    ids = take(ledger, 2)
    ledger.give_cached(ids, 3, last_use=10)
    assert ledger.is_cached(0)
    assert not ledger.is_owned(0)
    assert ledger.available() == 2
    ledger.touch([0])
    assert ledger.is_owned(0)
    ledger.give([(0, 1)], 4)
    ledger.evict([1])
    assert states(ledger) == {0: "RETIRED"}
    assert ledger.advance(4) == 1


@pytest.mark.parametrize("call", ["touch", "evict", "give_cached"])
@pytest.mark.parametrize("wrong", [2, 0, 99, -1])
def test_a_wrong_word_about_cached_blocks_changes_nothing(call: str, wrong: int) -> None:
    ledger = mapped()
    ids = take(ledger, 4)
    if call != "give_cached":
        ledger.give_cached(ids[:2], 1, last_use=1)
    before = picture(ledger)
    named = [1, 0, wrong] if call != "give_cached" or wrong != 2 else [0, 5]
    with pytest.raises(Misuse):
        ledger.give_cached(named, 1, 1) if call == "give_cached" else getattr(ledger, call)(named)
    assert picture(ledger) == before
    check(ledger)


# ---------------------------------------------------------------------- plans


def test_a_failed_map_leaves_everything_as_it_was() -> None:
    ledger = mapped(blocks_per_page=1, pages=8, grown=2)
    take(ledger, 1)
    before = picture(ledger)
    assert ledger.take(4) is None
    plan = ledger.plan_grow(3)
    assert ledger.counts().mapping_pages == 3
    check(ledger)
    ledger.settle_grow(plan, mapped=False)
    assert picture(ledger) == before
    assert not [ledger.take(4)][0]
    ledger.settle_grow(ledger.plan_grow(3), mapped=True)
    assert len(take(ledger, 4)) == 4
    check(ledger)


def test_a_map_that_ends_unknown_loses_those_pages_alone() -> None:
    ledger = Ledger(geometry(), limit_pages=8)
    ledger.settle_grow(ledger.plan_grow(4, max_run_pages=4), mapped=True, quarantined=(2,))
    assert states(ledger) == {0: "PARKED", 1: "PARKED", 2: "QUARANTINED", 3: "PARKED"}
    assert ledger.available() == 12
    assert ledger.stranded_pages() == 3
    assert not ledger.plan_shrink(4).runs
    ledger.settle_grow(ledger.plan_grow(4, max_run_pages=4), mapped=False, quarantined=(4, 7))
    assert {page: state for page, state in states(ledger).items() if page > 3} == {4: "QUARANTINED", 7: "QUARANTINED"}
    assert ledger.held_pages == 6
    assert ledger.plan_grow(9).runs == ((5, 1), (6, 1))
    check(ledger)


def test_an_unmap_that_was_undone_brings_the_blocks_back() -> None:
    ledger = mapped(pages=4, max_run_pages=4)
    plan = ledger.plan_shrink(4)
    assert plan.runs == ((0, 4),)
    assert plan.pages == 4
    assert ledger.available() == 0
    assert ledger.state_of(0) is BlockState.ABSENT
    ledger.settle_shrink(plan, released=False, quarantined=[1])
    assert ledger.available() == 12
    assert sorted(take(ledger, 12)) == [0, 1, 2, 3, *range(8, 16)]
    check(ledger)


def test_a_plan_is_settled_once_and_by_its_own_ledger() -> None:
    ledger, other = mapped(grown=2), mapped(grown=2)
    grow, shrink = ledger.plan_grow(1), ledger.plan_shrink(1)
    for stranger in (GrowPlan(grow.id, grow.runs), other.plan_grow(1)):
        with pytest.raises(InvariantBroken, match="not open"):
            ledger.settle_grow(stranger, mapped=True)
    with pytest.raises(InvariantBroken, match="not in plan"):
        ledger.settle_grow(grow, mapped=True, quarantined=(7,))
    ledger.settle_grow(grow, mapped=True)
    ledger.settle_shrink(shrink, released=True)
    with pytest.raises(InvariantBroken, match="not open"):
        ledger.settle_grow(grow, mapped=True)
    with pytest.raises(InvariantBroken, match="not open"):
        ledger.settle_shrink(shrink, released=True)
    check(ledger)


def test_an_empty_plan_has_nothing_to_settle() -> None:
    ledger = mapped(pages=2)
    grow, shrink = ledger.plan_grow(1), ledger.plan_shrink(0)
    assert (grow, shrink) == (GrowPlan(0, ()), ShrinkPlan(0, ()))
    ledger.settle_grow(grow, mapped=True)
    ledger.settle_shrink(shrink, released=True)
    assert ledger.plan_grow(0).pages == 0


def test_growing_may_be_all_or_nothing() -> None:
    ledger = Ledger(geometry(pages=4), limit_pages=3)
    assert not ledger.plan_grow(4, allow_partial=False).runs
    assert ledger.plan_grow(4).pages == 3
    odd = Ledger(BlockGeometry(15, 15, 16, 9, 1, 9), limit_pages=9)  # some pages hold no whole block
    before = odd.counts()
    assert not odd.plan_grow(8, allow_partial=False).runs
    assert odd.counts() == before
    check(odd)


def test_large_runs_are_aligned_and_only_of_pages_that_are_free() -> None:
    ledger = Ledger(geometry(pages=20), limit_pages=20)
    assert ledger.plan_grow(1, max_run_pages=8).runs == ((0, 1),)
    assert ledger.plan_grow(15, max_run_pages=6).runs == ((1, 1), (2, 2), (4, 4), (8, 4), (12, 4))
    assert ledger.plan_grow(3, max_run_pages=8).runs == ((16, 2), (18, 1))
    assert ledger.plan_grow(8, max_run_pages=0).runs == ((19, 1),)


def test_a_run_with_pages_that_hold_no_block_is_avoided() -> None:
    ledger = Ledger(BlockGeometry(15, 15, 16, 9, 1, 9), limit_pages=9)
    plan = ledger.plan_grow(9, max_run_pages=4)
    pages = [page for first, count in plan.runs for page in range(first, first + count)]
    assert pages == [page for page in range(9) if ledger.geometry.blocks_of(page)]
    ledger.settle_grow(plan, mapped=True)
    check(ledger)


def test_runs_become_single_pages_while_too_much_is_stranded() -> None:
    ledger = mapped(blocks_per_page=1, pages=16, grown=4, max_run_pages=4)
    take(ledger, 1)
    assert ledger.stranded_pages() == 3
    assert ledger.plan_grow(4, max_run_pages=4, max_stranded_pages=2).runs == ((4, 1), (5, 1), (6, 1), (7, 1))
    assert ledger.plan_grow(4, max_run_pages=4, max_stranded_pages=3).runs == ((8, 4),)
    check(ledger)


def test_only_whole_runs_are_unmapped_and_the_demand_is_met() -> None:
    ledger = mapped(blocks_per_page=1, pages=7, max_run_pages=4)
    assert [report.run_first for report in ledger.pages()] == [0, 0, 0, 0, 4, 4, 6]
    take(ledger, 1)
    assert ledger.plan_shrink(1, keep_parked=6).runs == ()
    plan = ledger.plan_shrink(1)
    assert plan.runs == ((6, 1),)
    ledger.settle_shrink(plan, released=False)
    ledger.give([(0, 1)], -1)
    plan = ledger.plan_shrink(2, highest_first=False)
    assert plan.runs == ((4, 2),)
    ledger.settle_shrink(plan, released=True)
    plan = ledger.plan_shrink(3)
    assert plan.runs == ((6, 1), (0, 4))  # the last run exceeds the demand: a run cannot be cut
    ledger.settle_shrink(plan, released=True)
    assert ledger.held_pages == 0
    check(ledger)


def test_the_smallest_run_that_fills_the_rest_is_chosen() -> None:
    ledger = mapped(blocks_per_page=1, pages=16, max_run_pages=8)
    assert [run for run in dict.fromkeys((report.run_first, report.run_pages) for report in ledger.pages())] == [(0, 8), (8, 8)]
    ledger = Ledger(geometry(1, 16), limit_pages=16)
    ledger.settle_grow(ledger.plan_grow(8, max_run_pages=8), mapped=True)
    ledger.settle_grow(ledger.plan_grow(4, max_run_pages=4), mapped=True)
    ledger.settle_grow(ledger.plan_grow(4, max_run_pages=2), mapped=True)
    assert ledger.plan_shrink(1, highest_first=False).runs == ((12, 2),)


# ---------------------------------------------------------------------- quarantine


def test_owned_blocks_of_a_quarantined_page_stay_owned_and_never_become_free() -> None:
    ledger = mapped(blocks_per_page=4, pages=3)
    ids = take(ledger, 6)
    ledger.give_cached([0], 1, last_use=1)
    assert ledger.quarantine([0, 2]) == [0]
    assert ledger.quarantine([0]) == []
    assert ledger.is_owned(1)
    assert ledger.state_of(0) is BlockState.ABSENT
    assert ledger.available() == 2
    ledger.give_cached([1, 5], 1, last_use=2)
    ledger.give([(2, 2)], 1)
    assert ledger.counts().owned_blocks == 1
    assert not ledger.is_cached(1)
    assert ledger.is_cached(5)
    assert sorted(ids) == list(range(6))
    assert take(ledger, ledger.available()) == [6, 7]
    check(ledger)


def test_pages_given_together_are_told_apart_when_one_is_quarantined() -> None:
    ledger = mapped(blocks_per_page=2, pages=3)
    take(ledger, 6)
    ledger.quarantine([1])
    ledger.give([(0, 6)], 0)
    assert ledger.available() == 4
    check(ledger)


def test_a_page_in_a_plan_or_outside_the_range_cannot_be_quarantined() -> None:
    ledger = mapped(pages=4, grown=2)
    ledger.plan_grow(1)
    ledger.plan_shrink(1)
    for page in (1, 2, 4, -1):
        with pytest.raises(Misuse):
            ledger.quarantine([page])
    ledger.quarantine([3])  # never mapped: held from now on
    assert ledger.held_pages == 4
    check(ledger)


def test_a_quarantined_page_of_a_large_run_keeps_the_run() -> None:
    ledger = mapped(pages=4, max_run_pages=4)
    ledger.quarantine([1])
    assert ledger.stranded_pages() == 3
    assert not ledger.plan_shrink(4).runs
    check(ledger)


# ---------------------------------------------------------------------- limits


def test_a_lower_limit_is_deferred_until_owned_blocks_are_given() -> None:
    ledger = mapped(pages=6)
    ids = take(ledger, 12)
    change = ledger.set_limit(2, revision=1)
    assert (change.outcome, change.limit_pages, change.overage_pages) == (LimitOutcome.DEFERRED, 2, 4)
    assert not ledger.plan_grow(1).runs
    ledger.settle_shrink(ledger.plan_shrink(ledger.overage_pages()), released=True)
    assert ledger.overage_pages() == 1
    give(ledger, ids, -1)
    ledger.settle_shrink(ledger.plan_shrink(ledger.overage_pages()), released=True)
    assert ledger.overage_pages() == 0
    assert ledger.held_pages == 2


def test_above_its_limit_a_ledger_gives_what_would_fit_within_it() -> None:
    ledger = mapped(pages=6)  # of 4 blocks
    ids = take(ledger, 20)
    ledger.set_limit(3, revision=1)
    assert (ledger.available(), ledger.reachable(), ledger.missing(1)) == (0, 0, 9)
    give(ledger, ids[:8], -1)
    assert (ledger.take(1), ledger.take_sets(1)) == (None, None)  # two pages are empty; what is owned would fill the three that may be held
    assert ledger.take(0) == []
    give(ledger, ids[8:10], -1)
    assert (ledger.available(), ledger.missing(3)) == (2, 1)
    take(ledger, 2)
    assert ledger.take(1) is None
    ledger.settle_shrink(ledger.plan_shrink(3), released=True)
    check(ledger)


def test_above_its_limit_holes_are_filled_before_an_empty_page_is_begun() -> None:
    ledger = mapped(pages=6)
    ids = take(ledger, 16)
    give(ledger, [ids[0], ids[5], ids[10]], -1)
    ledger.set_limit(5, revision=1)  # pages 4 and 5 are empty
    assert {block // 4 for block in take(ledger, 3)} == {0, 1, 2}
    assert {block // 4 for block in take(ledger, 4)} == {4}  # there are no holes any more
    assert ledger.take(1) is None
    check(ledger)


def test_sets_are_taken_from_empty_pages_too_above_the_limit() -> None:
    ledger = mapped(pages=10)
    ids = take(ledger, 40)
    ledger.set_limit(9, revision=1)
    give(ledger, [*ids[:36], ids[39]], 5)  # nine empty pages, and one with a hole
    taken = ledger.take_sets(20)
    assert taken is not None
    assert sum(count for _, count in taken[0]) + sum(blocks.bit_count() for _, blocks in taken[1]) == 20
    check(ledger)


def test_pages_on_their_way_out_are_no_longer_above_the_limit() -> None:
    ledger = mapped(pages=4)
    ledger.set_limit(2, revision=1)
    assert ledger.available() == 8
    plan = ledger.plan_shrink(2)
    assert ledger.available() == 8
    ledger.settle_shrink(plan, released=False)
    assert ledger.available() == 8
    ledger.quarantine([3])
    assert ledger.available() == 4  # of two good pages above a limit of two, beside the lost one
    check(ledger)


def test_a_busy_ledger_gets_below_a_lower_limit() -> None:
    ledger = mapped(pages=16)
    choose = random.Random(5)
    held = take(ledger, 64)
    ledger.set_limit(6, revision=1)
    for step in range(400):  # as many come as go, but for the turned away
        give(ledger, [held.pop(choose.randrange(len(held))) for _ in range(min(4, len(held)))], step)
        held += take(ledger, min(4, ledger.available()))
        ledger.advance(step)
        ledger.settle_shrink(ledger.plan_shrink(ledger.overage_pages()), released=True)
    assert ledger.held_pages == 6
    assert len(held) == 24
    check(ledger)


def test_growth_stops_at_the_limit_pages_in_plans_included() -> None:
    ledger = Ledger(geometry(pages=8), limit_pages=3)
    ledger.settle_grow(ledger.plan_grow(2), mapped=True)
    grow = ledger.plan_grow(5)
    assert grow.pages == 1
    shrink = ledger.plan_shrink(1)
    assert ledger.plan_grow(1).pages == 0
    ledger.settle_grow(grow, mapped=True)
    assert ledger.plan_grow(1).pages == 0
    ledger.settle_shrink(shrink, released=True)
    assert ledger.plan_grow(2).pages == 1


def test_a_higher_limit_counts_at_once_and_every_id_is_handed_out_once() -> None:
    ledger = mapped(pages=8)
    ledger.set_limit(3, revision=1)
    ledger.settle_shrink(ledger.plan_shrink(5), released=True)
    ids = take(ledger, 12)
    change = ledger.set_limit(90, revision=2)
    assert (change.outcome, change.limit_pages, change.overage_pages) == (LimitOutcome.CLAMPED, 8, 0)
    ledger.settle_grow(ledger.plan_grow(8), mapped=True)
    ids += take(ledger, ledger.available())
    assert sorted(ids) == list(range(32))
    assert ledger.take(1) is None
    check(ledger)


def test_an_older_limit_changes_nothing() -> None:
    ledger = mapped(pages=4)
    assert ledger.set_limit(3, revision=5).outcome is LimitOutcome.DEFERRED
    assert ledger.set_limit(1, revision=4).outcome is LimitOutcome.STALE
    assert ledger.limit_pages == 3
    assert ledger.set_limit(4, revision=5).outcome is LimitOutcome.APPLIED


def test_the_limit_never_goes_below_the_pinned_pages() -> None:
    ledger = mapped(pages=4)
    ledger.pin(0)
    assert ledger.set_limit(0, revision=1).limit_pages == 1


def test_the_first_limit_is_clamped_too() -> None:
    assert Ledger(geometry(pages=4), limit_pages=99).limit_pages == 4
    assert Ledger(geometry(pages=4), limit_pages=-1).limit_pages == 0


def test_steady_churn_within_the_reserve_needs_no_plan() -> None:
    ledger = mapped(blocks_per_page=1, pages=128)
    choose = random.Random(3)
    held = take(ledger, 100)
    for step in range(500):
        held += take(ledger, choose.randint(0, 8))
        give(ledger, [held.pop(choose.randrange(len(held))) for _ in range(max(0, len(held) - 100))], step)
        ledger.advance(step - 2)
        assert ledger.held_pages == 128
    check(ledger)


def test_pages_report_what_they_hold() -> None:
    ledger = mapped(blocks_per_page=4, pages=4, grown=2, max_run_pages=2)
    take(ledger, 3)
    ledger.give_cached([1], 6, last_use=1)
    ledger.pin(0)
    first, second = ledger.pages()
    assert (first.page, first.state, first.owned_blocks, first.cached_blocks, first.free_blocks) == (0, PageState.USED, 2, 1, 1)
    assert (first.marker, first.run_first, first.run_pages, first.pinned) == (6, 0, 2, True)
    assert (second.state, second.run_first, second.pinned) == (PageState.PARKED, 0, False)


def test_a_last_page_that_is_not_full_has_the_blocks_that_are_left() -> None:
    ledger = Ledger(geometry(blocks_per_page=4, pages=3, num_blocks=10), limit_pages=3)
    ledger.settle_grow(ledger.plan_grow(3), mapped=True)
    assert ledger.take(10) == [(0, 10)]
    ledger.give([(0, 10)], 3)
    assert ledger.advance(3) == 3
    check(ledger)


def test_outdated_entries_of_the_index_are_passed_over() -> None:
    ledger = mapped(blocks_per_page=8, pages=3)
    ledger.take(24)
    ledger.give([(0, 6)], 0)
    ledger.give([(8, 5)], 0)
    ledger.give([(16, 2)], 0)
    assert ledger.take_ids([0, 1, 2, 3, 4])  # page 0 has one block left, and an entry that says six
    assert ledger.take(7) == [(8, 5), (16, 2)]
    assert ledger.take(1) == [(5, 1)]
    check(ledger)


def test_retired_pages_are_taken_back_from_the_lowest_when_nothing_is_parked() -> None:
    ledger = mapped(blocks_per_page=2, pages=4)
    ledger.take(8)
    ledger.give([(6, 2)], 1)
    ledger.give([(2, 2)], 1)
    ledger.give([(4, 1), (0, 2)], 1)
    assert ledger.take(1) == [(4, 1)]
    assert ledger.take(2) == [(0, 2)]
    assert ledger.take(4) == [(2, 2), (6, 2)]
    check(ledger)


def test_rows_of_pages_come_and_go_within_large_runs() -> None:
    ledger = mapped(blocks_per_page=2, pages=8, max_run_pages=4)
    assert ledger.take(12) == [(0, 12)]
    assert ledger.stranded_pages() == 2
    ledger.give([(4, 4)], -1)
    assert ledger.stranded_pages() == 4
    ledger.give([(0, 2)], -1)
    ledger.give([(2, 2)], -1)
    assert ledger.stranded_pages() == 2
    ledger.give([(8, 4)], -1)
    assert ledger.stranded_pages() == 0
    check(ledger)


def test_a_page_that_retires_twice_by_one_marker_waits_once() -> None:
    ledger = mapped(blocks_per_page=2, pages=4)
    ledger.take(8)
    ledger.give([(6, 2)], 1)
    assert ledger.take(2) == [(6, 2)]
    ledger.give([(6, 2)], 1)
    ledger.give([(2, 2)], 1)
    assert ledger.retired_pages == 2
    assert ledger.take(4) == [(2, 2), (6, 2)]
    ledger.give([(6, 2), (2, 2)], 1)
    assert len(ledger._table.retirement) == 2
    assert ledger.advance(1) == 2
    check(ledger)


def test_a_row_of_retired_pages_may_be_taken_back() -> None:
    ledger = mapped(blocks_per_page=2, pages=4)
    ledger.take(8)
    ledger.give([(0, 8)], 1)
    assert ledger.take(8) == [(0, 8)]
    assert ledger.advance(1) == 0
    assert ledger.retired_pages == 0
    check(ledger)


def test_ranges_on_pages_of_different_sizes_are_given_too() -> None:
    ledger = Ledger(BlockGeometry(5, 5, 16, 4, 1, 12), limit_pages=4)
    ledger.settle_grow(ledger.plan_grow(4), mapped=True)
    assert ledger.take(2) == [(0, 2)]
    ledger.give([(0, 2)], -1)
    assert ledger.parked_pages == 4
    check(ledger)


def test_a_row_of_pages_with_nothing_in_flight_is_parked_at_once() -> None:
    ledger = mapped(blocks_per_page=2, pages=8, max_run_pages=4)
    ledger.take(16)
    ledger.give([(4, 4)], -1)
    assert ledger.stranded_pages() == 2
    assert ledger.parked_pages == 2
    assert ledger.take(4) == [(4, 4)]
    ledger.give([(4, 4)], -1)
    assert ledger.take(4) == [(4, 4)]
    check(ledger)


def test_the_search_for_an_empty_page_goes_back_to_a_lower_one() -> None:
    ledger = mapped(blocks_per_page=2, pages=8)
    ledger.take(16)
    ledger.give([(8, 4)], -1)
    assert ledger.take(4) == [(8, 4)]
    ledger.give([(4, 4)], -1)
    assert ledger.take(4) == [(4, 4)]
    ledger.give([(8, 4)], 1)
    assert ledger.take(4) == [(8, 4)]
    ledger.give([(4, 4)], 1)
    assert ledger.take(4) == [(4, 4)]
    check(ledger)
