# SPDX-License-Identifier: Apache-2.0
"""The engine-free API in one page: blocks with memory behind them only while they are taken. No GPU needed.

Run: python examples/engine_free.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import kvcached
from kvcached.errors import PoolExhausted
from kvcached.units import format_size

BLOCK_BYTES = 64 * 1024
BLOCKS = 4096


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvcached-") as scratch:
        # `host:0` is a device made of host memory; `cuda:0` works the same. The card gets a run directory of its own here, so
        # that the example meets no other pool; without one, all of a user's processes share the card. Pages that are kept ready ahead
        # of need, which engines like, would be among the sizes below.
        card = kvcached.open_card("host:0", run_dir=str(Path(scratch) / "run"), budget="128MiB", prealloc_enabled=False)
        with card, card.open_pool("example", block_bytes=BLOCK_BYTES, blocks=BLOCKS) as pool:
            run(pool)


def run(pool: kvcached.ElasticPool) -> None:
    step_bytes = pool.geometry.release_step_bytes
    say(pool, f"opened: addresses for {BLOCKS} blocks of {format_size(BLOCK_BYTES)}, given back in steps of {format_size(step_bytes)}")

    # A tensor over the whole range. Making it touches no memory; only blocks that are taken may be read and written.
    stride = pool.geometry.block_stride_bytes // 4
    tensor = np.from_dlpack(pool.view((BLOCKS, BLOCK_BYTES // 4), (stride, 1), "float32"))

    taken = pool.take(1000)  # [(first id, count), ...]: all of them or `PoolExhausted`
    for first, count in taken:
        tensor[first : first + count] = 1.5
    say(pool, f"took 1000 blocks in {len(taken)} range(s) and wrote to them")
    assert all((tensor[first : first + count] == 1.5).all() for first, count in taken)

    try:
        pool.take(BLOCKS)
    except PoolExhausted as pressure:
        say(pool, f"asked for {pressure.wanted} more: {pressure.available} could be had, so nothing was taken")

    answer = pool.set_limit("32MiB")
    say(pool, f"limit lowered: {answer.outcome}, {format_size(answer.overage_bytes)} above it stay until their blocks are given back")

    pool.give(taken)
    pool.trim()
    say(pool, "gave everything back and trimmed")


def say(pool: kvcached.ElasticPool, text: str) -> None:
    stats = pool.stats()
    print(
        f"{text}\n    owned {format_size(stats.owned_bytes)}, held {format_size(stats.held_bytes)}, limit {format_size(stats.limit_bytes)}"
    )


if __name__ == "__main__":
    main()
