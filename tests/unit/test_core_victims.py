# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks go first, and what is left after a busy time."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from kvcached.core import victims as victims_module
from kvcached.core.geometry import BlockGeometry
from kvcached.core.invariants import check
from kvcached.core.ledger import Ledger

BLOCK_TOKENS = 16


def mapped(blocks_per_page: int, pages: int, *, max_run_pages: int = 1, capped: bool = False) -> Ledger:
    ledger = Ledger(BlockGeometry(1, 1, blocks_per_page, pages, 1, pages * blocks_per_page), limit_pages=pages, capped=capped)
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


@pytest.mark.parametrize("capped", [True, False])
def test_a_hot_prefix_outlives_cold_ones_and_dense_pages_do_not_stay_for_ever(capped: bool) -> None:
    ledger = mapped(8, 40, capped=capped)
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


@pytest.mark.parametrize("capped", [True, False])
def test_where_others_want_pages_a_hot_prefix_on_pages_with_holes_outlives_cold_ones_that_fill_theirs(capped: bool) -> None:
    ledger = mapped(4, 4, capped=capped)
    cached(ledger, {0: 1, 1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2, 12: 0, 13: 0, 14: 0, 15: 0})
    ledger.evict(ledger.victims_for_blocks(4))
    hot = ids_of(ledger.take(2))
    ledger.give([(block, 1) for block in ids_of(ledger.take(6)) if block not in hot], 0)
    ledger.give_cached(hot, 0, 9)
    assert ledger.victims_for_pages(2) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert sorted(ledger.cached_overflow(8)) == sorted(hot)


def test_the_cap_empties_pages_before_it_thins_those_that_requests_are_on() -> None:
    ledger = mapped(4, 3, capped=True)
    ledger.take(12)
    ledger.give_cached([0, 1, 2], 0, 1)
    ledger.give_cached([4], 0, 1)
    ledger.give([(3, 1), (8, 4)], 0)  # a request still owns 5, 6 and 7
    assert ledger.cached_overflow(3) == [0]
    assert ledger.cached_overflow(1) == [0, 1, 2]
    assert ledger.cached_overflow(0) == [0, 1, 2, 4]
    assert ledger.cached_overflow(3) == [0], "looking changes nothing"
    ledger.give([(5, 3)], 0)
    assert ledger.cached_overflow(3) == [4]


def test_blocks_whose_loss_costs_more_outlive_the_others_and_take_their_page_with_them() -> None:
    ledger = mapped(4, 4)
    ledger.take(16)
    ledger.give_cached([0], 0, 1, cost=8)
    ledger.give_cached([4, 5, 6], 0, 2)
    ledger.give_cached([8, 9, 10, 11], 0, 3)
    ledger.give([(1, 3), (7, 1), (12, 4)], 0)
    assert ledger.cached_overflow(5) == [4, 5, 6]
    assert ledger.cached_overflow(0) == [4, 5, 6, 8, 9, 10, 11, 0]


@pytest.mark.parametrize("capped", [True, False])
def test_a_dense_page_goes_once_enough_has_come_and_gone_since(capped: bool) -> None:
    ledger = mapped(8, 20, capped=capped)
    ledger.give_cached(ids_of(ledger.take(8)), 0, 0)
    outlived = 0
    for use in range(1, 9):
        ledger.give_cached(ids_of(ledger.take(5)), 0, use)  # on a page of its own, or what is free of an older one
        ledger.evict(ledger.cached_overflow(20))
        if not ledger.is_cached(0):
            break
        outlived = use
    assert 3 <= outlived < 8, "thin pages of its time go first, and it goes too"
    check(ledger)


def test_the_indexes_stay_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(victims_module, "COMPACT_AT_LEAST", 16)
    ledger = mapped(4, 4)
    cached(ledger, {0: 0, 1: 0, 5: 0})
    for use in range(1, 200):
        ledger.touch([0])
        ledger.give_cached([0], 0, use)
        assert len(ledger._cache._page_heap) <= 23
    assert ledger.victims_for_blocks(3) == [5, 1, 0]
    assert ledger.cached_overflow(0) == [5, 1, 0]


def test_a_busy_time_with_a_capped_cache_leaves_few_pages() -> None:
    """2,500 requests, 96 at a time, decoding one block after the other; 16,000 cached tokens fill 16 pages of 64 blocks at best."""
    choose = random.Random(8)
    ledger = Ledger(BlockGeometry(1, 1, 64, 400, 1, 400 * 64), limit_pages=400, capped=True)
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


class FullPool:
    """Requests over a ledger whose pages are all mapped, each block under a key; who wants a block evicts."""

    def __init__(self, blocks_per_page: int, pages: int, seed: int) -> None:
        self.ledger = mapped(blocks_per_page, pages)
        self.choose = random.Random(seed)
        self.step = 0
        self.asked = self.found = 0
        self.running: list[tuple[list[str], list[int], int]] = []  # keys, blocks, the step at which it ends
        self.block_of: dict[str, int] = {}
        self.key_of: dict[int, str] = {}
        self.uses: dict[int, int] = {}

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            del self.block_of[self.key_of.pop(block)]
        self.ledger.evict(blocks)

    def take(self, blocks: int) -> list[int]:
        self.forget(self.ledger.victims_for_blocks(self.ledger.missing(blocks)))
        return ids_of(self.ledger.take(blocks))

    def begin(self, keys: list[str], steps: int) -> None:
        """The longest known prefix is found, the rest taken."""
        found = [self.block_of[key] for key in itertools.takewhile(self.block_of.__contains__, keys)]
        self.ledger.touch([block for block in found if self.ledger.is_cached(block)])
        blocks = found + self.take(len(keys) - len(found))
        for block in blocks:
            self.uses[block] = self.uses.get(block, 0) + 1
        self.asked, self.found = self.asked + len(keys), self.found + len(found)
        self.running.append((keys, blocks, self.step + steps))

    def grow(self) -> None:
        """Each request takes a block more, as they decode."""
        for keys, blocks, end in self.running:
            blocks += self.take(1)
            self.uses[blocks[-1]] = 1
            keys.append(f"{keys[0]} decoded {len(keys)} {end}")

    def advance(self) -> None:
        self.step += 1
        ended = [request for request in self.running if request[2] <= self.step]
        self.running = [request for request in self.running if request[2] > self.step]
        for keys, blocks, _ in ended:
            for key, block in zip(reversed(keys), reversed(blocks), strict=True):
                self.uses[block] -= 1
                if self.uses[block]:
                    continue
                if self.block_of.setdefault(key, block) == block:
                    self.key_of[block] = key
                    self.ledger.give_cached([block], self.step, self.step)
                else:
                    self.ledger.give([(block, 1)], self.step)
        self.ledger.advance(self.step)

    def shrink(self, pages: int) -> None:
        """Others want all but so many pages."""
        self.forget(self.ledger.victims_for_pages(self.ledger.held_pages - pages - self.ledger.parked_pages))
        self.ledger.settle_shrink(self.ledger.plan_shrink(self.ledger.held_pages - pages), released=True)


def test_hot_prefixes_that_are_cached_again_in_a_full_pool_are_there_when_others_have_taken_most_of_its_pages() -> None:
    pool = FullPool(blocks_per_page=6, pages=36, seed=1)
    hot = [[f"hot {prompt} {place}" for place in range(18)] for prompt in range(2)]
    for number in range(60):
        pool.begin([f"cold {number} {place}" for place in range(pool.choose.randrange(20, 30))], pool.choose.randrange(20, 40))
        while len(pool.running) > 4:
            pool.advance()
            if pool.step % 5 == 0:
                pool.grow()
    while pool.running:
        pool.advance()
    for keys in hot:
        pool.begin(keys, 4)
    for _ in range(4):
        pool.advance()
    pool.shrink(14)
    check(pool.ledger)
    assert pool.ledger.held_pages == 14
    assert [key for keys in hot for key in keys if key not in pool.block_of] == []


def found_of_all(pool: FullPool, requests: int) -> float:
    """Documents that are asked for again and again, some far more often than others, each with a few blocks of its own behind."""
    lengths = [pool.choose.randint(6, 40) for _ in range(400)]
    shares = [1 / (number + 1) for number in range(400)]
    for number in range(requests):
        document = pool.choose.choices(range(400), shares)[0]
        keys = [f"document {document} {place}" for place in range(lengths[document])]
        pool.begin([*keys, *(f"own {number} {place}" for place in range(pool.choose.randint(1, 8)))], pool.choose.randint(16, 160))
        while len(pool.running) > 10:
            pool.advance()
    return pool.found / pool.asked


class LeastRecentlyUsed(FullPool):
    """The order of engines that know no pages."""

    def take(self, blocks: int) -> list[int]:
        self.forget([entry[3] for entry in sorted(self.ledger._cache.blocks.values())[: self.ledger.missing(blocks)]])
        return ids_of(self.ledger.take(blocks))


@pytest.mark.parametrize(("blocks_per_page", "pages"), [(8, 96), (32, 30)])
def test_page_by_page_as_much_is_found_again_as_by_last_use(blocks_per_page: int, pages: int) -> None:
    found = [
        statistics.mean(found_of_all(kind(blocks_per_page, pages, seed), 1_500) for seed in range(3))
        for kind in (FullPool, LeastRecentlyUsed)
    ]
    assert found[0] >= found[1] - 0.005
    assert found[1] > 0.15


class Prefixes:
    """Requests as vLLM serves them: those that begin with the same hot prompt share its blocks, and what was found again costs more."""

    BLOCKS_PER_PAGE = 32
    PAGES = 64
    HOT_BLOCKS = 12

    def __init__(self, cap: int) -> None:
        blocks = self.PAGES * self.BLOCKS_PER_PAGE
        self.ledger = Ledger(BlockGeometry(1, 1, self.BLOCKS_PER_PAGE, self.PAGES, 1, blocks), limit_pages=self.PAGES, capped=True)
        self.cap = cap
        self.users: dict[int, int] = {}
        self.finds: dict[int, int] = {}
        self.hot: dict[int, list[int]] = {}  # prompt -> its blocks
        self.step = 0

    def take(self, blocks: int) -> list[int]:
        missing = blocks - self.ledger.available()
        if missing > 0:
            self.ledger.settle_grow(self.ledger.plan_grow(-(-missing // self.BLOCKS_PER_PAGE)), mapped=True)
        taken = ids_of(self.ledger.take(blocks))
        self.users |= dict.fromkeys(taken, 1)
        return taken

    def begin(self, hot: int | None, blocks: int) -> list[int]:
        """A prompt of so many blocks, or of so many behind a hot one."""
        if hot is None:
            return self.take(blocks)
        found = self.hot.get(hot) or []
        self.ledger.touch([block for block in found if not self.users.get(block)])
        for block in found:
            self.users[block] = self.users.get(block, 0) + 1
            self.finds[block] = self.finds.get(block, 0) + 1
        self.hot[hot] = [*found, *self.take(self.HOT_BLOCKS - len(found))]
        return self.hot[hot] + self.take(blocks)

    def end(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
        for block in reversed([block for block in blocks if not self.users[block]]):
            self.ledger.give_cached([block], self.step, self.step, cost=min(8, 1 + self.finds.get(block, 0)))
        gone = self.ledger.cached_overflow(self.cap)
        self.ledger.evict(gone)
        for block in gone:
            self.finds.pop(block, None)
        for prompt, kept in self.hot.items():  # what lies behind a block that is gone is not found any more
            lost = next((number for number, block in enumerate(kept) if block in gone), len(kept))
            self.hot[prompt] = kept[:lost]

    def advance(self) -> None:
        self.step += 1
        self.ledger.advance(self.step - 1)


@pytest.mark.parametrize("seed", range(4))
def test_after_a_busy_time_hot_prompts_are_kept_on_few_pages(seed: int) -> None:
    """Half of 400 requests begin with one of eight; 500 cached blocks fill 16 pages at best, and order of use leaves them on about 40."""
    choose = random.Random(seed)
    served, waiting, running = Prefixes(cap=500), 400, list[tuple[list[int], int]]()
    while waiting or running:
        served.advance()
        while waiting and len(running) < 96:
            waiting -= 1
            hot = choose.randrange(8) if choose.random() < 0.5 else None
            blocks = served.begin(hot, choose.randint(1, 16 if hot is None else 4))
            running.append((blocks, served.step + choose.randint(16, 256)))
        for blocks, last in running:
            if (last - served.step) % 32 == 0:
                blocks += served.take(1)
        for blocks, _ in [request for request in running if request[1] <= served.step]:
            served.end(blocks)
        running = [request for request in running if request[1] > served.step]
    served.advance()
    served.advance()
    served.ledger.settle_shrink(served.ledger.plan_shrink(served.PAGES), released=True)
    check(served.ledger)
    assert served.ledger.cached_blocks == 500
    assert {prompt: len(kept) for prompt, kept in served.hot.items()} == dict.fromkeys(range(8), served.HOT_BLOCKS)
    assert served.ledger.held_pages <= 17
