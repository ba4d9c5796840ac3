# SPDX-License-Identifier: Apache-2.0
"""A pool whose prefix cache is kept by the engine's own tree: the tree owns its blocks, and gives them up when the pool asks for pages."""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from kvcached.core.tally import Eviction
from kvcached.runtime.pool import Pool

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kvcached.core.report import PoolCounts


class TreePool(Pool):
    """Made by `adopt`. `reclaim` evicts about so many blocks from the tree, with the lock held, and returns how many it gave; why is told.
    `kept_blocks` says how many the tree keeps for nobody but later requests. `answers_later`: `reclaim` only notes the wish."""

    reclaim: Callable[[int, Eviction], int]
    kept_blocks: Callable[[], int]
    answers_later = False

    @classmethod
    def adopt(cls, pool: Pool, lock: threading.RLock) -> TreePool:
        """Turn a pool that is not in use yet into one that asks a tree. `lock` replaces its own.

        Evicting from a tree frees slots of every pool that the tree has, so all of them work under one lock: two that wait for each
        other's would never end.
        """
        pool.__class__ = cls
        tree_pool: TreePool = pool  # type: ignore[assignment]  # its class was changed in the line above
        tree_pool.reclaim = lambda blocks, why: 0
        tree_pool.kept_blocks = lambda: 0
        tree_pool.lock = tree_pool._work._lock = lock
        return tree_pool

    def counts(self) -> PoolCounts:
        """What the tree keeps counts as cached: it is what others may ask for."""
        with self.lock:
            counts = super().counts()
            kept = max(0, min(self.kept_blocks(), counts.owned_blocks - self.standing_blocks))
            return replace(counts, owned_blocks=counts.owned_blocks - kept, cached_blocks=counts.cached_blocks + kept)

    def free_pages(self, pages: int, why: Eviction = Eviction.ASKED) -> None:
        """Evict from the tree until about `pages` more pages are empty, or it has nothing more to give.

        The tree chooses by its own order. So it is asked for as little as can do, what the emptiest pages hold, and then for twice as much
        each time: it stops when the pages are there.
        """
        with self.lock:
            wanted, asked = self._empty_pages() + pages, 0
            while (missing := wanted - self._empty_pages()) > 0:
                if not self.kept_blocks():
                    return
                asked = 2 * asked or self._least_blocks(missing)
                reclaimed = self.reclaim(min(asked, missing * self.geometry.max_blocks_per_page), why)
                self.tally.evicted_blocks[why] += reclaimed
                if not reclaimed:
                    return

    def _least_blocks(self, pages: int) -> int:
        """What has to go at the least for so many more pages to be empty."""
        if self.answers_later:
            return pages * self.geometry.max_blocks_per_page
        held = [owned.bit_count() for page, owned in self.ledger.owned_sets() if page]  # page 0 stays: it has the padding
        return max(1, sum(nsmallest(pages, held)))

    def _empty_pages(self) -> int:
        return self.ledger.parked_pages + self.ledger.retired_pages
