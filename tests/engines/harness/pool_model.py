# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool, made elastic, under random use, against what vLLM's own rules say. No model, no engine.

python -m harness.pool_model SEED STEPS; prints how often each operation was done, or ends with an error.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvcached
from kvcached.core.blocks import BlockState
from kvcached.engines.vllm.block_pool import MOST_COST, ElasticBlockPool
from kvcached.engines.vllm.steps import Steps
from kvcached.errors import PoolExhausted
from kvcached.testing.consistency import must_be_consistent
from kvcached.units import KIB, MIB

BLOCKS = 600
LOOK_EVERY = 25


class Model:
    """Requests that hold blocks, blocks with hashes, and an operator who changes the limit."""

    def __init__(self, pool: Any, seed: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        stock = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=16)
        self.random = random.Random(seed)
        self.steps = Steps()
        self.owner = pool._owner
        self.pool = pool._owner.pool
        self.pool.grow(1)
        self.blocks = ElasticBlockPool.adopt(stock, self.pool, self.steps)
        self.requests: list[list[Any]] = []
        self.hashes: list[bytes] = []
        self.done: collections.Counter[str] = collections.Counter()

    def run(self, steps: int) -> None:
        operations = (
            [self.take] * 6 + [self.finish] * 4 + [self.hit] * 3 + [self.finish_twice, self.evict, self.limit, self.shrink, self.reset]
        )
        for number in range(steps):
            self.steps.begin()
            operation = self.random.choice(operations)
            with self.pool.lock if operation not in (self.limit, self.shrink) else contextlib.nullcontext():
                operation()
            self.done[operation.__name__] += 1
            self.pool.advance(self.steps.scheduled - self.random.randrange(3))
            if number % LOOK_EVERY == 0:
                self.look()

    def take(self) -> None:
        wanted = self.random.randrange(1, 24)
        before = self.blocks.get_num_free_blocks()
        try:
            got = self.blocks.get_new_blocks(wanted)
        except PoolExhausted:
            assert wanted > before, "the gate had said that so many blocks can be had"
            self.done["missed"] += 1
            return
        assert len({block.block_id for block in got}) == wanted
        assert all(block.ref_cnt == 1 and not block.is_null and block.block_hash is None for block in got)
        for block in got[: self.random.randrange(wanted + 1)]:
            self.give_hash(block)
        self.requests.append(got)

    def give_hash(self, block: Any) -> None:
        """Now and then two blocks with the same contents have the same hash."""
        fresh = not self.hashes or self.random.random() < 0.8
        key = self.random.randbytes(8) + bytes(4) if fresh else self.random.choice(self.hashes)
        self.hashes.append(key)
        block.set_block_hash(key, num_tokens=16)
        self.blocks.cached_block_hash_to_block.insert(key, block)

    def finish(self) -> None:
        if self.requests:
            self.blocks.free_blocks(reversed(self.requests.pop(self.random.randrange(len(self.requests)))))

    def finish_twice(self) -> None:
        """Two requests over the same prefix end in one call."""
        self.hit()
        if len(self.requests) > 1:
            self.blocks.free_blocks([*self.requests.pop(), *self.requests.pop()])

    def hit(self) -> None:
        """A request finds blocks by their hashes."""
        keys = self.random.sample(self.hashes, min(len(self.hashes), 6))
        found = [block for key in keys if (block := self.blocks.cached_block_hash_to_block.get_one_block(key)) is not None]
        found = list({block.block_id: block for block in found}.values())
        for block in found:
            assert self.pool.ledger.state_of(block.block_id) in (BlockState.OWNED, BlockState.CACHED), "a hit whose memory is gone"
        self.done["hits"] += len(found)
        if found:
            self.blocks.touch(found)
            self.requests.append(found)

    def evict(self) -> None:
        self.blocks.evict_blocks({self.random.randrange(1, BLOCKS) for _ in range(5)})

    def limit(self) -> None:
        pages = self.random.choice([2, 5, 9, 20, 1_000])
        self.owner.operations.limit(pages * self.pool.geometry.release_step_bytes)

    def shrink(self) -> None:
        self.pool.free_pages(self.random.randrange(4))
        self.pool.shrink(self.random.randrange(6))

    def reset(self) -> None:
        if self.random.random() < 0.1:
            while self.requests:
                self.finish()
        idle = not self.requests
        assert self.blocks.reset_prefix_cache() is idle
        if idle:
            self.hashes.clear()
            self.done["emptied"] += 1

    def look(self) -> None:
        """vLLM's view of every block and the pool's agree."""
        with self.pool.lock:
            must_be_consistent(self.pool)
            held = {block.block_id for request in self.requests for block in request}
            for block in self.blocks.blocks:
                state, number = self.pool.ledger.state_of(block.block_id), block.block_id
                queued = block.prev_free_block is not None
                assert (number in held or block.is_null) == (state is BlockState.OWNED) == (not queued), (number, state, queued)
                assert (queued and block.block_hash is not None) == (state is BlockState.CACHED), (number, state, block.block_hash)
            assert all(self.blocks.blocks[number].block_hash is not None for number in self.blocks.kvcached_finds), "a find of no contents"
            for number, record in self.pool.ledger._cache.blocks.items():
                assert record[1] == min(MOST_COST, 1 + self.blocks.kvcached_finds.get(number, 0)), (number, record)
                self.done["found"] += record[1] > 1
            free = sum(self.pool.ledger.state_of(number) is BlockState.FREE for number in range(BLOCKS))
            counts = self.pool.ledger.counts()  # the pool's own settle what the keeper has mapped meanwhile: after `free` was counted
            above_pages = counts.held_pages - counts.mapping_pages - counts.unmapping_pages - counts.limit_pages
            above = max(0, above_pages) * self.pool.geometry.max_blocks_per_page
            assert self.blocks.get_num_free_blocks() == max(0, free + counts.cached_blocks - above)
            self.done["above"] += above > 0


def main(seed: str, steps: str) -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        host = {"host_capacity_bytes": 16 * MIB, "host_dir": Path(run_dir) / "host", "host_granularity_bytes": 64 * KIB}
        with kvcached.open_card("host:0", run_dir=Path(run_dir), **host) as card:
            model = Model(card.open_pool("model", block_bytes=16 * KIB, blocks=BLOCKS), int(seed))
            model.run(int(steps))
    sys.stdout.write(json.dumps(model.done) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
