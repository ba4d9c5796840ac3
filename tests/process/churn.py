# SPDX-License-Identifier: Apache-2.0
"""Takes, gives, caches and touches blocks in any order. Every byte of a block's data is written when it is taken and compared later."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections import Counter

from kvcached.errors import PoolExhausted

MOST_BLOCKS = 24


class Churn:
    """`owned` and `cached`: what stands in each block."""

    def __init__(self, pool, block_bytes, seed):
        self.pool = pool
        self.block_bytes = block_bytes
        self.luck = random.Random(seed)
        self.owned = {}
        self.cached = {}
        self.counts = Counter()
        self.uses = 0
        pool._pool.on_evict = self.forget

    def forget(self, ids):
        for block in ids:
            del self.cached[block]
        self.counts["evicted"] += len(ids)

    def address_of(self, block):
        return self.pool.base_address + block * self.pool.geometry.block_stride_bytes

    def take(self):
        try:
            ranges = self.pool.take(self.luck.randint(1, MOST_BLOCKS))
        except PoolExhausted:
            self.counts["misses"] += 1
            return
        for first, count in ranges:
            for block in range(first, first + count):
                self.uses += 1
                data = (os.getpid() << 32 | self.uses).to_bytes(8, "little") * (self.block_bytes // 8)
                ctypes.memmove(self.address_of(block), data, self.block_bytes)
                self.owned[block] = data
                self.counts["taken"] += 1

    def some_of(self, blocks):
        return self.luck.sample(sorted(blocks), self.luck.randint(0, len(blocks)))

    def compare(self, blocks):
        for block, data in blocks.items():
            there = ctypes.string_at(self.address_of(block), self.block_bytes)
            self.counts["wrong_bytes"] += sum(is_there != should for is_there, should in zip(there, data)) if there != data else 0  # noqa: B905

    def leave(self, blocks, *, keep):
        gone = {block: self.owned.pop(block) for block in blocks}
        self.compare(gone)
        if keep:
            self.cached |= gone
            self.pool._pool.give_cached(list(gone), -1, self.uses)
        else:
            self.pool.give([(block, 1) for block in gone])

    def touch(self):
        with self.pool._pool.lock:  # what is cached may be evicted by whoever else holds it
            blocks = self.some_of(self.cached)[:MOST_BLOCKS]
            self.pool._pool.touch(blocks)
            back = {block: self.cached.pop(block) for block in blocks}
        self.compare(back)
        self.owned |= back
        self.counts["touched"] += len(back)

    def round(self, number):
        for _ in range(self.luck.randint(1, 6)):
            self.take()
        self.leave(self.some_of(self.owned), keep=self.luck.random() < 0.5)
        if self.luck.random() < 0.3:
            self.touch()
        if self.luck.random() < 0.1:
            self.pool.trim()
        self.pool.advance(number)


def churn(pool, block_bytes, rounds, seed, until=()):
    """How often each thing happened; `wrong_bytes` of all that were compared. Goes on after `rounds` until each of `until` has happened."""
    state = Churn(pool, block_bytes, seed)
    for number in itertools.count(1):
        state.round(number)
        if number >= rounds and all(state.counts[name] for name in until):
            break
    state.leave(list(state.owned), keep=False)
    with pool._pool.lock:
        pool._pool.evict(list(state.cached))
        state.cached.clear()
    counts = Counter({"wrong_bytes": 0}) + state.counts
    return {"wrong_bytes": 0, "checks": pool._pool._watcher.canary.checks, **counts}
