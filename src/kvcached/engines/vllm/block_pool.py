# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool over an elastic one: vLLM keeps hashes, reference counts and its queue; which ids are handed out is ours.

The finished instance gets this class, so that everyone who holds it keeps it. A block that is in vLLM's queue of free blocks is free
or cached for the pool, every other one is owned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvcached.engines.vllm.steps import Steps
    from kvcached.runtime.pool import Pool


MOST_COST: Final = 8
"""A cached block that was found again so often, less one, or oftener, is worth as much as so many that never were."""


def ranges_of(ids: Collection[int]) -> list[tuple[int, int]]:
    """Distinct ids, at least one, as ascending (first, count)."""
    ordered = sorted(ids)
    first = last = ordered[0]
    if ordered[-1] - first == len(ordered) - 1:  # most often: one block, or neighbours
        return [(first, len(ordered))]
    ranges = []
    for block in ordered[1:]:
        if block != last + 1:
            ranges.append((first, last - first + 1))
            first = block
        last = block
    ranges.append((first, last - first + 1))
    return ranges


class ElasticBlockPool(BlockPool):
    """Made by `adopt`, never by a constructor."""

    kvcached_pool: Pool
    kvcached_steps: Steps
    kvcached_counts_logically: bool
    kvcached_finds: dict[int, int]
    """How often the contents of a block were found by a later request, while it was owned too: 0 is left out."""

    @classmethod
    def adopt(cls, block_pool: Any, pool: Pool, steps: Steps) -> ElasticBlockPool:
        """Turn a finished, unused block pool into an elastic one. Its null block is owned for ever."""
        block_pool.__class__ = cls
        elastic: ElasticBlockPool = block_pool
        elastic.kvcached_pool = pool
        elastic.kvcached_steps = steps
        elastic.kvcached_counts_logically = False
        elastic.kvcached_finds = {}
        null = elastic.null_block.block_id
        pool.take_ids([null])
        pool.pin_page_of(null)
        pool.on_evict = elastic._forget
        return elastic

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        blocks, remove = self.blocks, self.free_block_queue.remove
        chosen: list[Any] = []
        for first, count in self.kvcached_pool.take(num_blocks):
            chosen += blocks[first : first + count]
        for block in chosen:
            remove(block)
            block.ref_cnt += 1
        if self.metrics_collector:
            for block in chosen:
                self.metrics_collector.on_block_allocated(block)
        return chosen

    def free_blocks(self, ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
        ordered = list(ordered_blocks)
        super().free_blocks(ordered, *args, **kwargs)
        caching = self.enable_caching
        free: set[int] = set()
        cached: dict[int, None] = {}  # in order, each once: a list may name a block twice
        for block in ordered:
            if block.ref_cnt == 0 and not block.is_null:
                if caching and block.block_hash is not None:
                    cached[block.block_id] = None
                else:
                    free.add(block.block_id)
        marker = self.kvcached_steps.scheduled
        if free:
            self.kvcached_pool.give(ranges_of(free), marker)
        if cached:
            last_use = self.kvcached_steps.next_use()
            for cost, ids in self._by_cost(list(cached)):
                self.kvcached_pool.give_cached(ids, marker, last_use, cost)

    def _by_cost(self, ids: list[int]) -> list[tuple[int, list[int]]]:
        """What the loss of a block costs and the blocks of that cost, in their order; the cheapest first."""
        finds = self.kvcached_finds
        if finds.keys().isdisjoint(ids):
            return [(1, ids)]
        groups: dict[int, list[int]] = {}
        for block in ids:
            groups.setdefault(min(MOST_COST, 1 + finds.get(block, 0)), []).append(block)
        return sorted(groups.items())

    def touch(self, blocks: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        cached = [block.block_id for block in blocks if block.ref_cnt == 0 and not block.is_null]
        if cached:
            self.kvcached_pool.touch(cached)
        finds = self.kvcached_finds
        for block in blocks:
            finds[block.block_id] = finds.get(block.block_id, 0) + 1
        super().touch(blocks, *args, **kwargs)

    def _maybe_evict_cached_block(self, block: Any) -> bool:
        evicted: bool = super()._maybe_evict_cached_block(block)
        self.kvcached_finds.pop(block.block_id, None)
        if evicted and block.ref_cnt == 0 and not block.is_null:
            self.kvcached_pool.evict([block.block_id])
        return evicted

    def _forget(self, ids: Sequence[int]) -> None:
        """The pool has chosen victims: their hashes go, so that nobody finds them any more."""
        forget, blocks, finds = super()._maybe_evict_cached_block, self.blocks, self.kvcached_finds
        for block in ids:
            forget(blocks[block])
            finds.pop(block, None)

    def reset_prefix_cache(self) -> bool:
        self.kvcached_counts_logically = True
        try:
            done: bool = super().reset_prefix_cache()
        finally:
            self.kvcached_counts_logically = False
        if done:
            self.kvcached_finds.clear()
            ledger = self.kvcached_pool.ledger
            self.kvcached_pool.evict(ledger.victims_for_blocks(ledger.cached_blocks))
        return done

    def get_num_free_blocks(self) -> int:
        """Blocks that `get_new_blocks` can certainly supply: free on mapped pages, or cached."""
        if self.kvcached_counts_logically:
            return int(super().get_num_free_blocks())
        return self.kvcached_pool.reachable()

    def get_usage(self) -> float:
        """Blocks in use, as a share of what the pool may hold."""
        in_use = int(self.num_gpu_blocks) - 1 - int(super().get_num_free_blocks())
        return min(1.0, in_use / max(1, self.kvcached_pool.max_blocks() - 1))
