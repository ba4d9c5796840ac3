# SPDX-License-Identifier: Apache-2.0
"""The engine-free API on a small host card: what a caller asks for is what counts, or is refused with the number that works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kvcached
from kvcached.card import Card
from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.errors import PeerTimeout, PoolExhausted, SettingError
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvcached.card.record import Record
    from kvcached.ranks.api import MapperTally


@pytest.fixture
def card(tmp_path: Path) -> Iterator[kvcached.ElasticCard]:
    """Without a reserve: for two seconds a new card grants what is neither leased nor in use, and a reserve is both."""
    options = {"host_capacity_bytes": 64 * MIB, "host_granularity_bytes": 65536, "budget": "32MiB", "prealloc_enabled": False}
    with kvcached.open_card("host:0", run_dir=str(tmp_path / "run"), host_dir=str(tmp_path / "host"), **options) as card:
        yield card


def in_record(card: kvcached.ElasticCard) -> Record:
    """What the card's record says of the only pool."""
    ((entry,),) = [snapshot.live for snapshot in Card.list_cards(card._card.settings.run_dir)]
    return entry.record


def test_a_lifted_limit_is_none_and_all_that_the_card_has_can_be_held(card: kvcached.ElasticCard) -> None:
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128, limit="8MiB", floor="0")
    answer = pool.set_limit(NO_LIMIT_BYTES)
    assert (answer.outcome, answer.in_force_bytes, answer.reason) == ("applied", NO_LIMIT_BYTES, "")
    assert pool.stats().limit_bytes == in_record(card).limit_bytes == NO_LIMIT_BYTES
    assert pool._pool.max_blocks() == 32
    pool.take(32)
    with pytest.raises(PoolExhausted):
        pool.take(1)


def test_a_limit_beyond_the_card_is_clamped(card: kvcached.ElasticCard) -> None:
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128)
    answer = pool.set_limit("48MiB")
    assert (answer.outcome, answer.in_force_bytes) == ("clamped", 32 * MIB)
    assert answer.reason == "the card's budget or the address range sets the bound"


def test_a_limit_below_what_always_stays_mapped_is_clamped_up(card: kvcached.ElasticCard) -> None:
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128)
    ((block, _),) = pool.take(1)
    pool._pool.pin_page_of(block)
    step_bytes = pool.geometry.release_step_bytes
    answer = pool.set_limit(step_bytes // 2)
    assert (answer.outcome, answer.asked_bytes, answer.in_force_bytes) == ("clamped", step_bytes // 2, step_bytes)
    assert answer.reason == "the pages that always stay mapped set the bound"


def test_a_floor_above_the_limit_in_force_is_clamped_to_it_in_the_answer_as_in_the_record(card: kvcached.ElasticCard) -> None:
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128, limit="8MiB")
    answer = pool._owner.operations.floor(12 * MIB)
    assert (answer.outcome, answer.in_force_bytes, answer.reason) == ("clamped", 8 * MIB, "the pool's own limit sets the bound")
    assert pool.stats().floor_bytes == in_record(card).floor_bytes == 8 * MIB
    pool.set_limit("4MiB")
    assert pool.stats().floor_bytes == in_record(card).floor_bytes == 4 * MIB


def test_a_floor_that_does_not_fit_is_refused_with_what_was_asked(card: kvcached.ElasticCard) -> None:
    card.open_pool("other", block_bytes=MIB, blocks=8, floor="4MiB")
    pool = card.open_pool("chat", block_bytes=MIB, blocks=128, floor="2MiB")
    answer = pool._owner.operations.floor(48 * MIB)
    assert (answer.outcome, answer.asked_bytes, answer.in_force_bytes) == ("rejected", 48 * MIB, 2 * MIB)
    assert answer.reason.startswith(
        "48 MiB asked, and the card's budget or the address range sets the bound: a floor of 32 MiB does not fit"
    )
    assert pool._owner.operations.floor(30 * MIB).reason.startswith("a floor of 30 MiB does not fit")


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
