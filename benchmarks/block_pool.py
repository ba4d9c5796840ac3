# SPDX-License-Identifier: Apache-2.0
"""vLLM's own block pool against the elastic one: get_new_blocks and free_blocks, in one process, in turn.

    PYTHONPATH=<a vLLM> python benchmarks/block_pool.py [--card host:0]

Both work warm (the elastic one on mapped pages), without prefix caching, on ids scattered by use. Medians of --rounds rounds.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from pathlib import Path

import kvcached
from kvcached.engines.vllm.block_pool import ElasticBlockPool
from kvcached.engines.vllm.steps import Steps
from kvcached.units import MIB

BLOCKS = 4096


def stock_pool():
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_gpu_blocks=BLOCKS, enable_caching=False, hash_block_size=16)


def churn(pool, blocks: int, rounds: int, inner: int = 500) -> float:
    """Median microseconds of taking and giving `blocks` blocks."""
    held = [pool.get_new_blocks(8) for _ in range(200)]
    random.Random(0).shuffle(held)
    for group in held[:100]:
        pool.free_blocks(reversed(group))
    times = []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(inner):
            pool.free_blocks(reversed(pool.get_new_blocks(blocks)))
        times.append((time.perf_counter_ns() - start) / inner / 1000)
    gc.enable()
    for group in held[100:]:
        pool.free_blocks(reversed(group))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="host:0")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as run_dir:
        host = {"host_capacity_bytes": 64 * MIB, "host_dir": Path(run_dir) / "host", "host_granularity_bytes": 65536}
        changes = host if arguments.card.startswith("host") else {}
        with kvcached.open_card(arguments.card, run_dir=run_dir, idle_trim_s=3600, max_reserved_pages=4096, **changes) as card:
            time.sleep(2.2)  # a new card grants only unused memory at first
            pool = card.open_pool("bench", block_bytes=8192, blocks=BLOCKS)._owner.pool
            pool.give(pool.take(BLOCKS - 16))
            elastic = ElasticBlockPool.adopt(stock_pool(), pool, Steps())
            pool.advance(0)  # nothing in flight
            print(f"{'blocks':>6} {'stock us':>10} {'elastic us':>10} {'ratio':>7}")
            for blocks in (1, 4, 16, 64, 256):
                stock_us = churn(stock_pool(), blocks, arguments.rounds)
                elastic_us = churn(elastic, blocks, arguments.rounds)
                print(f"{blocks:>6} {stock_us:>10.2f} {elastic_us:>10.2f} {elastic_us / stock_us:>7.2f}")


if __name__ == "__main__":
    main()
