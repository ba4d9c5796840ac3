# SPDX-License-Identifier: Apache-2.0
"""A pool whose cache is the engine's tree: what is kept there, and how much of it goes when pages are wanted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.limits import Limits
from kvcached.core.tally import Eviction
from kvcached.engines.sglang.tree_pool import TreePool
from kvcached.ranks.api import Outcome, Verdict, finished
from kvcached.runtime.pool import Pool, PoolOptions
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 2 * MIB
PER_PAGE = 8
GEOMETRY = BlockGeometry(PAGE // PER_PAGE, PAGE // PER_PAGE, PAGE, 16, 1, 128)


class Port:
    def __init__(self) -> None:
        self.reports: list[Any] = []

    def map(self, runs: Any, *, urgent: bool) -> Any:
        return finished(Outcome(Verdict.DONE))

    def when_lost(self, tell: Any) -> None:
        self.tell = tell

    def report(self, report: Any) -> None:
        self.reports.append(report)


class Tree:
    """Gives up its leaves, coldest first, until it has given what it was asked for."""

    def __init__(self, pool: TreePool, leaves: Sequence[Sequence[int]]) -> None:
        self.leaves = [list(leaf) for leaf in leaves]
        self._pool = pool
        pool.reclaim, pool.kept_blocks = self.evict, lambda: sum(map(len, self.leaves))

    def evict(self, blocks: int, why: Eviction) -> int:
        given = 0
        while self.leaves and given < blocks:
            leaf = self.leaves.pop(0)
            self._pool.give([(block, 1) for block in leaf])
            given += len(leaf)
        return given


@pytest.fixture
def pool() -> TreePool:
    """16 pages; the padding block is taken, the other blocks of 5 pages are the engine's."""
    pool = TreePool.adopt(Pool(GEOMETRY, Port(), Limits(16 * PAGE), PoolOptions()), threading.RLock())  # type: ignore[arg-type]
    pool.grow(5 * PER_PAGE)
    pool.take_ids([0])
    pool.pin_page_of(0)
    pool.take_ids(range(1, 5 * PER_PAGE))
    return pool


def on_page(page: int, *places: int) -> list[int]:
    return [page * PER_PAGE + place for place in places]


def test_what_the_tree_keeps_counts_as_cached(pool: TreePool) -> None:
    Tree(pool, [on_page(1, 0, 1, 2)])
    counts = pool.counts()
    assert (counts.owned_blocks, counts.cached_blocks) == (5 * PER_PAGE - 3, 3)
    pool.report()
    (report,) = pool._port.reports  # type: ignore[attr-defined]
    assert report.cached_bytes == 3 * PAGE // PER_PAGE
    assert report.owned_bytes == (5 * PER_PAGE - 3) * PAGE // PER_PAGE


def test_the_padding_block_is_never_cached(pool: TreePool) -> None:
    pool.kept_blocks = lambda: 10_000
    counts = pool.counts()
    assert (counts.owned_blocks, counts.cached_blocks) == (1, 5 * PER_PAGE - 1)


def test_no_more_goes_than_the_emptiest_pages_hold_where_that_is_enough(pool: TreePool) -> None:
    pool.give([(3 * PER_PAGE + 2, 6)])  # page 3 has two blocks left
    tree = Tree(pool, [on_page(3, 0), on_page(3, 1), on_page(1, 0, 1, 2, 3), on_page(1, 4, 5, 6, 7)])
    pool.free_pages(1)
    assert [len(leaf) for leaf in tree.leaves] == [4, 4]
    assert pool.counts().parked_pages == 1


def test_it_goes_on_until_the_pages_are_there(pool: TreePool) -> None:
    pool.give([(3 * PER_PAGE + 1, 7)])
    tree = Tree(pool, [*([block] for block in on_page(1, *range(8))), on_page(3, 0), on_page(2, *range(8))])
    pool.free_pages(2)
    assert tree.leaves == [on_page(2, *range(8))]
    assert pool.counts().parked_pages == 2


def test_a_tree_that_has_nothing_more_ends_it(pool: TreePool) -> None:
    tree = Tree(pool, [on_page(1, 0, 1)])
    pool.free_pages(3)
    assert tree.leaves == []
    assert pool.counts().parked_pages == 0


def test_where_the_answer_comes_later_the_wish_is_for_whole_pages(pool: TreePool) -> None:
    wishes: list[tuple[int, Eviction]] = []
    pool.answers_later = True
    pool.kept_blocks = lambda: 40
    pool.reclaim = lambda blocks, why: wishes.append((blocks, why)) or 0  # type: ignore[func-returns-value]
    pool.free_pages(2, Eviction.LIMIT)
    assert wishes == [(2 * PER_PAGE, Eviction.LIMIT)]
