# SPDX-License-Identifier: Apache-2.0
"""A pool whose prefix cache is kept by the engine's own tree: the tree owns its blocks, and gives them up when the pool asks for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.core.tally import Eviction
from kvcached.runtime.pool import Pool

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kvcached.core.report import PoolCounts


class TreePool(Pool):
    """Made by `adopt`. `reclaim` evicts about so many blocks from the tree, with the lock held, and returns how many it gave.
    `kept_blocks` says how many the tree keeps for nobody but later requests."""

    reclaim: Callable[[int], int]
    kept_blocks: Callable[[], int]

    @classmethod
    def adopt(cls, pool: Pool, lock: threading.RLock) -> TreePool:
        """Turn a pool that is not in use yet into one that asks a tree. `lock` replaces its own.

        Evicting from a tree frees slots of every pool that the tree has, so all of them work under one lock: two that wait for each
        other's would never end.
        """
        pool.__class__ = cls
        tree_pool: TreePool = pool  # type: ignore[assignment]  # its class was changed in the line above
        tree_pool.reclaim = lambda blocks: 0
        tree_pool.kept_blocks = lambda: 0
        tree_pool.lock = tree_pool._work._lock = lock
        return tree_pool

    def working_blocks(self, counts: PoolCounts) -> int:
        with self.lock:
            return super().working_blocks(counts) - self.kept_blocks()

    def free_pages(self, pages: int, why: Eviction = Eviction.ASKED) -> None:
        """Evict from the tree until about `pages` more pages are empty, or it has nothing more to give."""
        with self.lock:
            wanted = self._empty_pages() + pages
            while (missing := wanted - self._empty_pages()) > 0:
                reclaimed = self.reclaim(missing * self.geometry.max_blocks_per_page)
                self.tally.evicted_blocks[why] += reclaimed
                if not reclaimed:
                    return

    def _empty_pages(self) -> int:
        return self.ledger.parked_pages + self.ledger.retired_pages
