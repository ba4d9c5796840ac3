# SPDX-License-Identifier: Apache-2.0
"""The engine-free API on a small host card: what a caller asks for is what counts, or is refused with the number that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvcached
from kvcached.card.record import NO_LIMIT_BYTES
from kvcached.errors import PeerTimeout, PoolExhausted, SettingError
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvcached.ranks.api import MapperTally


@pytest.fixture
def card(tmp_path: Path) -> Iterator[kvcached.ElasticCard]:
    options = {"host_capacity_bytes": 64 * MIB, "host_granularity_bytes": 65536, "budget": "32MiB"}
    with kvcached.open_card("host:0", run_dir=str(tmp_path / "run"), host_dir=str(tmp_path / "host"), **options) as card:
        yield card


def test_no_limit_is_all_that_the_pool_can_ever_hold(card: kvcached.ElasticCard) -> None:
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128, limit="8MiB")
    answer = pool.set_limit(NO_LIMIT_BYTES)
    assert (answer.outcome, answer.in_force_bytes) == ("applied", 32 * MIB)


def test_a_limit_beyond_the_card_is_clamped(card: kvcached.ElasticCard) -> None:
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128)
    answer = pool.set_limit("48MiB")
    assert (answer.outcome, answer.in_force_bytes) == ("clamped", 32 * MIB)


def test_a_floor_above_the_limit_is_refused_with_both_numbers(card: kvcached.ElasticCard) -> None:
    with pytest.raises(SettingError, match=r"KVCACHED_FLOOR is 16 MiB.* at most the pool's limit, 8 MiB"):
        card.open_pool("chat", block_bytes=MIB, blocks=128, limit="8MiB", floor="16MiB")
    card.open_pool("chat", block_bytes=MIB, blocks=128, limit="8MiB", floor="8MiB").close()


def test_a_pool_tells_its_counters_also_where_its_ranks_do_not(card: kvcached.ElasticCard, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128)
    with pytest.raises(PoolExhausted):
        pool.take(100)
    metrics = pool._owner.operations.metrics()
    assert (metrics.misses, metrics.refusing, metrics.block_bytes, len(metrics.ranks)) == (1, False, MIB, 1)

    def silent(timeout_s: float) -> list[MapperTally]:
        assert timeout_s < 0.5, "an exporter waits no longer for the pool"
        raise PeerTimeout("not every one of 2 ranks answered")

    monkeypatch.setattr(pool._owner.pool, "port_tally", silent)
    pool._owner.pool.fail("a rank is gone")
    metrics = pool._owner.operations.metrics()
    assert (metrics.misses, metrics.refusing, metrics.ranks) == (1, True, ())
