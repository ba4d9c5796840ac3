# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks go first, and what is left after a busy time."""

from __future__ import annotations

import random

import pytest

from kvcached.core import victims as victims_module
from kvcached.core.geometry import BlockGeometry
from kvcached.core.invariants import check
from kvcached.core.ledger import Ledger

BLOCK_TOKENS = 16


def mapped(blocks_per_page: int, pages: int, *, max_run_pages: int = 1) -> Ledger:
    ledger = Ledger(BlockGeometry(1, 1, blocks_per_page, pages, 1, pages * blocks_per_page), limit_pages=pages)
    ledger.settle_grow(ledger.plan_grow(pages, max_run_pages=max_run_pages), mapped=True)
    return ledger


def ids_of(ranges: list[tuple[int, int]] | None) -> list[int]:
    assert ranges is not None
    return [block for first, count in ranges for block in range(first, first + count)]


def cached(ledger: Ledger, uses: dict[int, int], cost: float = 1) -> None:
    """Own everything once, cache the blocks that are named, give the rest back."""
    everything = ids_of(ledger.take(ledger.available()))
    for block, use in uses.items():
        ledger.give_cached([block], 0, use, cost)
    ledger.give([(block, 1) for block in everything if block not in uses], 0)
    ledger.advance(0)


def test_the_coldest_blocks_go_first_then_the_cheapest_then_the_first_named() -> None:
    ledger = mapped(8, 1)
    ledger.take(8)
    ledger.give_cached([4, 3], 0, 20)
    ledger.give_cached([5], 0, 20, cost=0.5)
    ledger.give_cached([6], 0, 10)
    assert ledger.victims_for_blocks(3) == [6, 5, 4]
    assert ledger.victims_for_blocks(99) == [6, 5, 4, 3]
    assert ledger.victims_for_blocks(0) == []
    assert ledger.cached_blocks == 4


def test_a_block_that_was_used_again_is_no_longer_the_coldest() -> None:
    ledger = mapped(4, 1)
    cached(ledger, {0: 1, 1: 2, 2: 3})
    ledger.touch([0])
    ledger.give_cached([0], 1, 9)
    assert ledger.victims_for_blocks(3) == [1, 2, 0]
    ledger.touch([1])
    assert ledger.victims_for_blocks(1) == [2]


def test_pages_are_emptied_where_least_is_lost() -> None:
    ledger = mapped(4, 4)
    cached(ledger, {0: 1, 1: 1, 2: 1, 4: 9, 8: 5, 9: 5})
    assert ledger.victims_for_pages(1) == [4]
    assert ledger.victims_for_pages(2) == [4, 8, 9]
    assert sorted(ledger.victims_for_pages(9)) == [0, 1, 2, 4, 8, 9]
    assert ledger.victims_for_pages(0) == []


def test_the_cost_counts_not_the_number_of_blocks() -> None:
    ledger = mapped(4, 2)
    cached(ledger, {0: 1, 1: 1}, cost=1)
    ledger.take(1)
    ledger.touch([0])
    ledger.give_cached([0], 1, 1, cost=8)
    check(ledger)
    ledger = mapped(4, 2)
    ids = ids_of(ledger.take(8))
    ledger.give_cached([ids[0]], 0, 1, cost=8)
    ledger.give_cached([ids[4], ids[5]], 0, 1, cost=2)
    ledger.give([(1, 3), (6, 2)], 0)
    assert ledger.victims_for_pages(1) == [4, 5]


def test_among_equal_pages_the_coldest_is_emptied() -> None:
    ledger = mapped(4, 3)
    cached(ledger, {0: 7, 4: 3, 8: 5})
    assert ledger.victims_for_pages(1) == [4]
    assert ledger.cached_overflow(2) == [4]


def test_pages_with_owned_blocks_pinned_and_lost_pages_cannot_be_emptied() -> None:
    ledger = mapped(4, 5)
    cached(ledger, {0: 1, 4: 1, 8: 1, 12: 1})
    assert ledger.take_ids([5])
    ledger.pin(2)
    ledger.quarantine([3])
    assert ledger.victims_for_pages(9) == [0]


def test_runs_are_emptied_whole_or_not_at_all() -> None:
    ledger = mapped(2, 8, max_run_pages=4)
    cached(ledger, {0: 1, 2: 1, 8: 1, 10: 1, 12: 1, 14: 1})
    assert ledger.victims_for_pages(1) == [0, 2]
    assert ledger.take_ids([5])
    assert ledger.victims_for_pages(1) == [8, 10, 12, 14]
    ledger.quarantine([5])
    assert ledger.victims_for_pages(1) == []


@pytest.mark.parametrize(("cap", "left"), [(-1, 6), (6, 6), (9, 6), (4, 4), (0, 0)])
def test_the_cap_on_cached_blocks(cap: int, left: int) -> None:
    ledger = mapped(4, 4)
    cached(ledger, {0: 1, 1: 1, 2: 1, 4: 9, 8: 5, 9: 5})
    ledger.evict(ledger.cached_overflow(cap))
    assert ledger.cached_blocks == left
    check(ledger)


def test_the_cap_drops_thin_pages_before_dense_ones_and_cold_blocks_of_a_page_first() -> None:
    ledger = mapped(4, 4)
    cached(ledger, {0: 4, 1: 2, 2: 3, 4: 9, 8: 5, 9: 5})
    assert ledger.cached_overflow(5) == [4]
    assert ledger.cached_overflow(2) == [4, 8, 9, 1]


def test_a_hot_prefix_outlives_cold_ones_and_dense_pages_do_not_stay_for_ever() -> None:
    ledger = mapped(8, 40)
    hot = ids_of(ledger.take(8))
    ledger.give_cached(hot, 0, 0)
    cold = ids_of(ledger.take(8))
    ledger.give_cached(cold, 0, 0)
    for step in range(1, 60):
        ledger.touch(hot)
        request = ids_of(ledger.take(12))
        ledger.give_cached(hot, step, step)
        ledger.give_cached(request, step, step)
        ledger.evict(ledger.cached_overflow(96))
        ledger.advance(step)
        assert all(ledger.is_cached(block) for block in hot)
    check(ledger)
    assert sum(record[0] == 0 for record in ledger._cache.blocks.values()) == 0, "what was never used again is gone"


def test_where_others_want_pages_a_hot_prefix_on_pages_with_holes_outlives_cold_ones_that_fill_theirs() -> None:
    ledger = mapped(4, 4)
    cached(ledger, {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2, 12: 0, 13: 0, 14: 0, 15: 0})
    ledger.evict(ledger.victims_for_blocks(4))
    hot = ids_of(ledger.take(2))
    ledger.give([(block, 1) for block in ids_of(ledger.take(6)) if block not in hot], 0)
    ledger.give_cached(hot, 0, 9)
    assert ledger.victims_for_pages(2) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sorted(ledger.cached_overflow(8)) == sorted(hot)


def test_a_dense_page_goes_once_enough_has_come_and_gone_since() -> None:
    ledger = mapped(8, 20)
    ledger.give_cached(ids_of(ledger.take(8)), 0, 0)
    for use in range(1, 9):
        ledger.give_cached(ids_of(ledger.take(5)), 0, use)
        ledger.take(3)  # another request owns the rest of the page
        ledger.evict(ledger.cached_overflow(20))
        if use == 3:
            assert ledger.is_cached(0), "thin pages of its time go first"
    assert not ledger.is_cached(0)
    check(ledger)


def test_the_indexes_stay_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims_module, "COMPACT_AT_LEAST", 16)
    ledger = mapped(4, 4)
    cached(ledger, {0: 0, 1: 0, 5: 0})
    for use in range(1, 200):
        ledger.touch([0])
        ledger.give_cached([0], 0, use)
        assert len(ledger._cache._block_heap) <= 23
        assert len(ledger._cache._page_heap) <= 23
    assert ledger.victims_for_blocks(3) == [1, 5, 0]
    assert ledger.cached_overflow(0) == [5, 1, 0]


def test_a_busy_time_with_a_capped_cache_leaves_few_pages() -> None:
    """2,500 requests, 96 at a time, decoding one block after the other; 16,000 cached tokens fill 16 pages of 64 blocks at best."""
    choose = random.Random(8)
    ledger = Ledger(BlockGeometry(1, 1, 64, 400, 1, 400 * 64), limit_pages=400)
    cap, waiting, running, step = 1000, 2500, list[list[int]](), 0
    owned: list[list[int]] = []

    def take(blocks: int) -> list[int]:
        if blocks > ledger.available():
            ledger.settle_grow(ledger.plan_grow(-(-(blocks - ledger.available()) // 64)), mapped=True)
        return ids_of(ledger.take(blocks))

    while waiting or running:
        step += 1
        while waiting and len(running) < 96:
            waiting -= 1
            prompt = choose.randint(1, 64 * BLOCK_TOKENS)
            running.append([prompt, prompt + choose.randint(16, 256)])
            owned.append(take(-(-prompt // BLOCK_TOKENS)))
        for request, blocks in zip(running, owned, strict=True):
            request[0] += 1
            if request[0] > len(blocks) * BLOCK_TOKENS:
                blocks += take(1)
        for blocks in [blocks for request, blocks in zip(running, owned, strict=True) if request[0] >= request[1]]:
            ledger.give_cached(blocks[::-1], step, step)
            ledger.evict(ledger.cached_overflow(cap))
        owned = [blocks for request, blocks in zip(running, owned, strict=True) if request[0] < request[1]]
        running = [request for request in running if request[0] < request[1]]
        ledger.advance(step - 1)
        ledger.settle_shrink(ledger.plan_shrink(400, keep_parked=4), released=True)
    ledger.advance(step)
    ledger.settle_shrink(ledger.plan_shrink(400), released=True)
    check(ledger)
    assert ledger.cached_blocks == cap
    assert ledger.held_pages <= 18
