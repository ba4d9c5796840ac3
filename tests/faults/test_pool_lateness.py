# SPDX-License-Identifier: Apache-2.0
"""Work in flight reads blocks that were given back already: their pages stay mapped until it is done, by marker and by fence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvcached
from kvcached.testing.lateness import LateReads, ReadAfterUnmap
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_BYTES = 64 * 1024


class LateFence:
    """A fence on a stream of late reads: passed when everything queued before it has run."""

    def __init__(self, reads: LateReads) -> None:
        self._reads = reads

    def wait(self, timeout_s: float) -> bool:
        return self._reads.pending == 0


@pytest.fixture
def reads() -> LateReads:
    return LateReads()


@pytest.fixture
def card(tmp_path: Path) -> Iterator[kvcached.ElasticCard]:
    host = {"host_dir": tmp_path / "host", "host_capacity_bytes": 64 * MIB, "host_granularity_bytes": BLOCK_BYTES}
    quiet = {"prealloc_enabled": False, "idle_trim_s": 3600, "handle_cache_mb": 0}
    with kvcached.open_card("host:0", run_dir=tmp_path / "run", **host, **quiet) as card:
        yield card


def fill_and_queue(pool: kvcached.ElasticPool, reads: LateReads, step: int) -> list[tuple[int, int]]:
    """Take four blocks, write them, and queue the step that reads them."""
    ranges = pool.take(4)
    stride = pool.geometry.block_stride_bytes
    tensor = np.from_dlpack(pool.view((pool.geometry.num_blocks, BLOCK_BYTES), (stride, 1), "uint8"))
    for first, count in ranges:
        tensor[first : first + count] = step
        for block in range(first, first + count):
            reads.submit(step, pool.base_address + block * stride, BLOCK_BYTES, bytes([step]) * BLOCK_BYTES)
    return ranges


def test_a_marker_keeps_pages_until_the_step_has_finished(card: kvcached.ElasticCard, reads: LateReads) -> None:
    pool = card.open_pool("late", block_bytes=BLOCK_BYTES, blocks=512)
    pool.give(fill_and_queue(pool, reads, 1), marker=1)
    assert pool.trim() == 0
    reads.run()
    pool.advance(reads.completed_marker)
    assert pool.trim() > 0


def test_a_fence_keeps_pages_that_the_marker_let_go_too_early(card: kvcached.ElasticCard, reads: LateReads) -> None:
    pool = card.open_pool("late", block_bytes=BLOCK_BYTES, blocks=512, fence=lambda: LateFence(reads))
    pool.give(fill_and_queue(pool, reads, 1))
    assert pool.trim() == 0
    reads.run()
    assert pool.trim() > 0


def test_without_either_the_read_is_caught(card: kvcached.ElasticCard, reads: LateReads) -> None:
    pool = card.open_pool("late", block_bytes=BLOCK_BYTES, blocks=512)
    pool.give(fill_and_queue(pool, reads, 1))
    assert pool.trim() > 0
    with pytest.raises(ReadAfterUnmap):
        reads.run()


def test_a_page_given_behind_work_in_flight_is_taken_again_without_a_new_mapping(card: kvcached.ElasticCard, reads: LateReads) -> None:
    pool = card.open_pool("late", block_bytes=BLOCK_BYTES, blocks=512)
    ranges = fill_and_queue(pool, reads, 1)
    pool.give(ranges, marker=1)
    held = pool.stats().held_bytes
    assert pool.take(4) == ranges
    assert pool.stats().held_bytes == held
    reads.run()
