# SPDX-License-Identifier: Apache-2.0
"""The canary of a real pool on a host card: what goes wrong with its memory is found and named, and afterwards it refuses work."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING, cast

import pytest

import kvcached
from kvcached.core.canary import GUARD_BYTES, stamp_of
from kvcached.errors import GeometryError, InvariantBroken, Misuse, StateUnknown
from kvcached.runtime.canary import HostBytes, WatchedPool, WatcherHere
from kvcached.runtime.pool import Pool
from kvcached.units import MIB
from kvcached.vmm.api import Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvcached.runtime.mapper import Mapper

BLOCK = 64 * 1024


@pytest.fixture
def card(tmp_path: Path) -> Iterator[kvcached.ElasticCard]:
    options = {"host_capacity_bytes": 64 * MIB, "host_granularity_bytes": 65536, "budget": "64MiB", "handle_cache_mb": 0, "canary": True}
    with kvcached.open_card("host:0", run_dir=str(tmp_path / "run"), host_dir=str(tmp_path / "host"), **options) as card:
        yield card


@pytest.fixture
def pool(card: kvcached.ElasticCard) -> kvcached.ElasticPool:
    return card.open_pool("chat", block_bytes=BLOCK, blocks=512)


def watched(pool: kvcached.ElasticPool) -> WatchedPool:
    return cast("WatchedPool", pool._pool)


def checks(pool: kvcached.ElasticPool) -> int:
    return cast("WatcherHere", watched(pool)._watcher).canary.checks


def data_of(pool: kvcached.ElasticPool, block: int) -> int:
    return pool.base_address + block * pool.geometry.block_stride_bytes


def broken(text: str) -> object:
    return pytest.raises(InvariantBroken, match=re.escape(text))


def test_blocks_can_be_filled_to_the_last_byte(pool: kvcached.ElasticPool) -> None:
    for first, count in pool.take(200):
        for block in range(first, first + count):
            ctypes.memset(data_of(pool, block), 0xFF, BLOCK)
    pool.check_stamps()
    assert checks(pool) == 200


def test_one_byte_too_many_is_found_at_the_next_step(pool: kvcached.ElasticPool) -> None:
    ((block, _),) = pool.take(1)
    pool.advance(1)
    ctypes.memset(data_of(pool, block), 0xAB, BLOCK + 1)
    with broken(f"pool {pool.instance}, block {block} of generation 1, page 0: 1 of {GUARD_BYTES} bytes were overwritten, from byte 0"):
        pool.advance(2)
    with pytest.raises(StateUnknown, match="canary"):
        pool.take(1)


def test_it_is_found_when_the_block_is_given_back(pool: kvcached.ElasticPool) -> None:
    ((block, _),) = pool.take(1)
    ctypes.memset(data_of(pool, block) + BLOCK + GUARD_BYTES - 1, 1, 1)
    with broken("from byte 255 behind the data on stands 01"):
        pool.give([(block, 1)])


def test_a_lost_page_is_named_and_no_fault(pool: kvcached.ElasticPool) -> None:
    ((block, _),) = pool.take(1)
    cast("Mapper", watched(pool)._port)._arena.unmap([Run(0, 1)], keep=False)
    with broken(f"block {block} of generation 1, page 0: nothing is mapped there"):
        pool.check_stamps()


def test_a_page_that_was_mapped_anew_is_named(pool: kvcached.ElasticPool) -> None:
    pool.take(1)
    arena = cast("Mapper", watched(pool)._port)._arena
    arena.unmap([Run(0, 1)], keep=False)
    arena.map([Run(0, 1)])
    with broken("zeros stand there"):
        pool.check_stamps()


def test_two_pools_with_one_memory_name_each_other(card: kvcached.ElasticCard, pool: kvcached.ElasticPool) -> None:
    other = card.open_pool("other", block_bytes=BLOCK, blocks=64)
    ((block, _),) = pool.take(1)
    ((theirs, _),) = other.take(1)
    stamp = HostBytes(other.base_address).read([theirs * other.geometry.block_stride_bytes + BLOCK], GUARD_BYTES)[0]
    assert stamp == stamp_of(other.instance, 0, theirs, 1)
    ctypes.memmove(data_of(pool, block) + BLOCK, stamp, GUARD_BYTES)
    with broken(f"block {block} of generation 1, page 0: the stamp of pool {other.instance}, block {theirs}, generation 1"):
        pool.check_stamps()
    other.check_stamps()


def test_a_ledger_that_hands_a_block_out_twice_is_found(pool: kvcached.ElasticPool) -> None:
    ((block, _),) = pool.take(1)
    watched(pool).ledger.give([(block, 1)], -1)
    with broken(f"hands out block {block} again"):
        pool.take(1)


def looked_at(pool: kvcached.ElasticPool) -> int:
    """How many blocks a step looks at."""
    before = checks(pool)
    pool.advance(1)
    return checks(pool) - before


def test_ids_that_are_taken_cached_touched_and_evicted_are_watched(pool: kvcached.ElasticPool) -> None:
    inner = watched(pool)
    inner.grow(8)
    inner.take_ids([3, 5, 6])
    assert looked_at(pool) == 3
    inner.give_cached([3, 5, 6], -1, 1)
    assert looked_at(pool) == 0
    inner.touch([3])
    assert looked_at(pool) == 1
    inner.evict([5])
    inner.take_ids([5])
    assert looked_at(pool) == 2
    inner.give([(3, 1), (5, 1)])
    inner.free_pages(512)  # evicts the last one, whose page holds nothing else
    inner.take_ids([6])
    assert looked_at(pool) == 1


def test_a_write_into_a_cached_block_is_named(pool: kvcached.ElasticPool) -> None:
    inner = watched(pool)
    ((block, _),) = pool.take(1)
    inner.give_cached([block], -1, 1)
    ctypes.memset(data_of(pool, block) + BLOCK // 2, 7, 1)
    pool.advance(1)
    with broken(f"block {block} of generation 1, page 0: its data changed while it was cached"):
        inner.touch([block])


def test_sets_are_watched(pool: kvcached.ElasticPool) -> None:
    inner = watched(pool)
    ids = [block for first, count in inner.take(200) for block in range(first, first + count)]
    inner.give([(block, 1) for block in ids[::2]])
    ranges, sets = inner.take_sets(60)
    assert sets
    assert looked_at(pool) == 160
    inner.give_sets(sets)
    inner.give(ranges)
    assert looked_at(pool) == 100
    inner.take_ids(ids[::2])


def test_cached_blocks_may_go_and_come_back_with_new_stamps(pool: kvcached.ElasticPool) -> None:
    inner = watched(pool)
    ids = [block for first, count in inner.take(100) for block in range(first, first + count)]
    inner.give_cached(ids, -1, 1)
    inner.free_pages(1000)
    assert pool.trim() > 0
    pool.take(300)
    pool.check_stamps()


def test_what_was_not_taken_cannot_be_given_and_nothing_is_lost(pool: kvcached.ElasticPool) -> None:
    ((first, count),) = pool.take(2)
    with pytest.raises(Misuse):
        pool.give([(first, count + 1)])
    pool.give([(first, count)])
    pool.take(2)


def test_planes_have_stamps_of_their_own(card: kvcached.ElasticCard) -> None:
    pool = card.open_pool("planes", block_bytes=BLOCK, blocks=64, planes=3)
    ((block, _),) = pool.take(1)
    ctypes.memset(data_of(pool, block) + 2 * pool.geometry.plane_bytes, 7, BLOCK + 2)
    with broken(f"block {block} of generation 1, page 0, plane 2: 2 of 256 bytes were overwritten"):
        pool.check_stamps()


def test_dense_blocks_are_refused_by_name(card: kvcached.ElasticCard) -> None:
    with pytest.raises(GeometryError, match="KVCACHED_CANARY needs 256 bytes behind each block"):
        card.open_pool("dense", block_bytes=BLOCK, blocks=64, can_pad_stride=False)


def test_without_the_setting_nothing_is_there(tmp_path: Path) -> None:
    with kvcached.open_card("host:0", run_dir=str(tmp_path / "run"), host_dir=str(tmp_path / "host"), budget="16MiB") as card:
        pool = card.open_pool("chat", block_bytes=BLOCK, blocks=64)
        assert type(pool._pool) is Pool
        assert pool.geometry.block_stride_bytes == BLOCK
        with pytest.raises(Misuse, match="KVCACHED_CANARY"):
            pool.check_stamps()


def test_a_hole_among_many_pieces_hides_no_other(pool: kvcached.ElasticPool) -> None:
    pool.take(2)
    memory, stride = HostBytes(pool.base_address), pool.geometry.block_stride_bytes
    far = pool.geometry.range_bytes - 64
    offsets = [0, far, stride, far] * 400
    assert memory.write(offsets, [b"x" * 64] * len(offsets)) == [far] * 800
    assert memory.read(offsets, 64) == [b"x" * 64, None] * 800
    assert memory.read([], 64) == []
