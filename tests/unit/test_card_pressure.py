# SPDX-License-Identifier: Apache-2.0
"""Who gives back how much: cheapest first, floors kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.card.pressure import Demand, Source, demands, giveable_bytes
from kvcached.card.record import EMPTY, Kind, Record

NOW_NS = 1000


def pool(lease: int, *, floor: int = 0, weight: float = 1.0, **words: int) -> Record:
    return Record(kind=Kind.KV, lease_bytes=lease, floor_bytes=floor, weight=weight, **words)


def test_parked_goes_first_then_retired_then_cached() -> None:
    records = [pool(0), pool(60, parked_bytes=10, handles_bytes=5, retired_bytes=20, cached_bytes=25)]
    assert demands(records, 0, 10, 100, NOW_NS) == [Demand(1, Source.PARKED, 10)]
    assert demands(records, 0, 38, 100, NOW_NS) == [
        Demand(1, Source.PARKED, 15),
        Demand(1, Source.RETIRED, 20),
        Demand(1, Source.CACHED, 3),
    ]
    assert sum(demand.bytes for demand in demands(records, 0, 1000, 100, NOW_NS)) == 60


def test_everyones_parked_pages_go_before_anyones_cached_blocks() -> None:
    records = [pool(0), pool(50, cached_bytes=50), pool(10, parked_bytes=10)]
    assert demands(records, 0, 30, 60, NOW_NS) == [Demand(2, Source.PARKED, 10), Demand(1, Source.CACHED, 20)]


def test_cached_blocks_within_the_floor_stay() -> None:
    records = [pool(0), pool(50, floor=30, cached_bytes=40, parked_bytes=10)]
    assert demands(records, 0, 100, 100, NOW_NS) == [Demand(1, Source.PARKED, 10), Demand(1, Source.CACHED, 10)]
    assert giveable_bytes(pool(20, floor=30, cached_bytes=20), Source.CACHED) == 0


def test_the_one_furthest_above_its_share_gives_first() -> None:
    records = [pool(0), pool(20, cached_bytes=20), pool(80, cached_bytes=80)]
    assert demands(records, 0, 30, 100, NOW_NS)[0] == Demand(2, Source.CACHED, 30)
    heavy = [pool(0), pool(40, cached_bytes=40), pool(60, cached_bytes=60, weight=4.0)]
    assert demands(heavy, 0, 30, 100, NOW_NS)[0] == Demand(1, Source.CACHED, 30)


def test_a_wish_counts_towards_the_share_while_it_lasts_and_no_longer() -> None:
    def first_to_give(until_ns: int) -> int:
        hungry = pool(45, cached_bytes=45, wanted_bytes=100, ticket=1, wanted_until_ns=until_ns)
        return demands([pool(0), hungry, pool(40, cached_bytes=40)], 0, 10, 100, NOW_NS)[0].slot

    assert (first_to_give(NOW_NS), first_to_give(NOW_NS - 1)) == (2, 1)


def test_weights_and_the_asker_give_nothing() -> None:
    other = Record(kind=Kind.OTHER, lease_bytes=50, parked_bytes=50, cached_bytes=50)
    assert demands([pool(30, parked_bytes=30), other, EMPTY], 0, 30, 100, NOW_NS) == []


def test_an_asker_that_is_not_on_the_card_presses_all() -> None:
    assert demands([pool(30, parked_bytes=30)], -1, 20, 100, NOW_NS) == [Demand(0, Source.PARKED, 20)]


@st.composite
def pools(draw: st.DrawFn) -> Record:
    parts = [draw(st.integers(0, 30)) for _ in range(5)]
    parked, handles, retired, cached, own = parts
    usage = {"parked_bytes": parked, "handles_bytes": handles, "retired_bytes": retired, "cached_bytes": cached}
    return pool(sum(parts), floor=draw(st.integers(0, 60)), weight=draw(st.sampled_from([0.5, 1.0, 2.0])), owned_bytes=own, **usage)


@settings(deadline=None)
@given(st.lists(pools(), min_size=1, max_size=6), st.integers(1, 300))
def test_nobody_gives_owned_blocks_or_a_cached_floor_and_all_that_can_be_given_is(records: list[Record], wanted: int) -> None:
    plan = demands(records, 0, wanted, 500, NOW_NS)
    available = sum(giveable_bytes(record, source) for record in records[1:] for source in Source)
    assert sum(demand.bytes for demand in plan) == min(wanted, available)
    assert [demand.source.value for demand in plan] == sorted(demand.source.value for demand in plan)
    for slot, record in enumerate(records[1:], start=1):
        given_bytes = {demand.source: demand.bytes for demand in plan if demand.slot == slot}
        assert sum(given_bytes.values()) <= record.lease_bytes - record.owned_bytes
        if Source.CACHED in given_bytes:
            assert record.lease_bytes - sum(given_bytes.values()) >= record.floor_bytes
