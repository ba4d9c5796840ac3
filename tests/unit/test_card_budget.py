# SPDX-License-Identifier: Apache-2.0
"""Who may lease how much: bounds, floors, turns, fair shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.card.budget import (
    FLOOR_CLASS,
    OWNED_CLASS,
    SPARE_CLASS,
    Ask,
    Claim,
    Refusal,
    Room,
    Verdict,
    ceiling_bytes,
    default_floor_bytes,
    fair_shares,
    floors_room_bytes,
    judge,
    next_ticket,
    over_bytes,
    short_bytes,
    want_class,
)
from kvcached.card.record import EMPTY, NO_LIMIT_BYTES, Kind, Record


def pool(lease: int = 0, *, ownable: int | None = None, floor: int = 0, limit: int = NO_LIMIT_BYTES, **words: int) -> Record:
    return Record(
        kind=Kind(words.pop("kind", Kind.KV)),
        lease_bytes=lease,
        ownable_bytes=lease if ownable is None else ownable,
        floor_bytes=floor,
        limit_bytes=limit,
        weight=1.0,
        **words,
    )


def waiter(wanted: int, ticket: int, *, want: int = OWNED_CLASS, until: int = 100, **words: int) -> Record:
    return pool(wanted_bytes=wanted, ticket=ticket, want_class=want, wanted_until_ns=until, **words)


def owned(records: list[Record], delta: int, room: Room, slot: int = 0) -> Verdict:
    return judge(records, Ask(slot, delta, delta), room)


def spare(records: list[Record], delta: int, room: Room, slot: int = 0) -> Verdict:
    return judge(records, Ask(slot, delta, 0), room)


def test_what_is_left_of_the_budget_is_granted_and_not_a_byte_more() -> None:
    records = [pool(30), EMPTY, pool(50)]
    assert owned(records, 20, Room(100)) == (True, 20, Refusal.NONE, "")
    verdict = owned(records, 21, Room(100))
    assert verdict[:3] == (False, 20, Refusal.BUDGET)
    assert "80 B of 100 B" in verdict.reason
    assert "21 B wanted" in verdict.reason


def test_the_devices_free_memory_bounds_a_grant() -> None:
    assert owned([pool(30)], 11, Room(100, free_bytes=10))[:3] == (False, 10, Refusal.DEVICE)
    assert owned([pool(30)], 10, Room(100, free_bytes=10)).granted
    assert owned([pool(30)], 1, Room(100, free_bytes=-5))[:3] == (False, 0, Refusal.DEVICE)


def test_above_the_budget_nothing_is_granted() -> None:
    assert owned([pool(30), pool(90)], 1, Room(100))[:3] == (False, 0, Refusal.BUDGET)


def test_a_pools_limit_bounds_it() -> None:
    assert owned([pool(30, limit=40)], 11, Room(100))[:3] == (False, 10, Refusal.LIMIT)
    assert owned([pool(50, limit=40)], 1, Room(100))[:3] == (False, 0, Refusal.LIMIT)


def test_more_than_can_ever_be_is_said_so() -> None:
    verdict = owned([pool(0), pool(floor=30)], 71, Room(100))
    assert verdict[:3] == (False, 70, Refusal.NEVER)
    assert "71 B against 70 B" in verdict.reason


def test_owned_blocks_leave_the_others_floors_alone() -> None:
    records = [pool(10), pool(5, floor=40)]
    assert owned(records, 50, Room(100)).granted
    assert owned([pool(10), pool(45, floor=40)], 46, Room(100))[:2] == (False, 45)
    assert owned(records, 51, Room(100))[:3] == (False, 50, Refusal.NEVER)


def test_parked_and_cached_pages_may_stand_on_the_others_floors() -> None:
    records = [pool(10), pool(5, floor=40)]
    assert spare(records, 85, Room(100)).granted
    assert not spare(records, 86, Room(100)).granted


def test_lent_floors_cannot_be_owned_later() -> None:
    records = [pool(95, ownable=10), pool(5, floor=40)]
    verdict = judge(records, Ask(0, 0, 51), Room(100))
    assert verdict[:2] == (False, 50)
    assert judge(records, Ask(0, 0, 50), Room(100)).granted


def test_owned_blocks_of_others_beyond_their_floor_count_in_full() -> None:
    records = [pool(30, ownable=0), pool(70, floor=10)]
    assert judge(records, Ask(0, 0, 31), Room(100))[:3] == (False, 30, Refusal.FLOORS)


def test_a_new_file_grants_floors_only() -> None:
    records = [pool(3, floor=10)]
    assert owned(records, 7, Room(100, settling=True)).granted
    assert owned(records, 8, Room(100, settling=True))[:3] == (False, 7, Refusal.SETTLING)
    assert owned(records, 7, Room(100, free_bytes=6, settling=True))[:3] == (False, 6, Refusal.DEVICE)


def test_one_who_waits_is_served_first() -> None:
    records = [pool(60), waiter(30, ticket=1)]
    assert owned(records, 11, Room(100, now_ns=50))[:3] == (False, 10, Refusal.TURN)
    assert owned(records, 30, Room(100, now_ns=50), slot=1).granted
    assert owned(records, 40, Room(100, now_ns=101)).granted, "a ticket that nobody renews ends"


def test_tickets_go_in_order() -> None:
    records = [waiter(30, ticket=2, lease=50), waiter(30, ticket=1)]
    assert not owned(records, 30, Room(100), slot=0).granted
    assert owned(records, 30, Room(100), slot=1).granted


def test_a_pool_below_its_floor_goes_before_older_tickets() -> None:
    records = [waiter(40, ticket=1), pool(0, floor=30), pool(60)]
    assert owned(records, 30, Room(100), slot=1).granted
    assert owned(records, 31, Room(100), slot=1)[:3] == (False, 0, Refusal.TURN)
    assert want_class(records[1], Ask(1, 30, 30)) == FLOOR_CLASS
    assert want_class(records[1], Ask(1, 31, 31)) == OWNED_CLASS
    assert want_class(records[1], Ask(1, 31, 0)) == SPARE_CLASS


def test_a_reserve_waits_for_those_that_need_memory_for_requests() -> None:
    records = [waiter(10, ticket=1, want=SPARE_CLASS), waiter(20, ticket=2), pool(75)]
    assert not spare(records, 10, Room(100)).granted
    assert owned(records, 20, Room(100), slot=1).granted


def test_the_next_ticket_is_behind_all_that_wait() -> None:
    records = [waiter(1, ticket=4), waiter(1, ticket=9, until=10), EMPTY]
    assert next_ticket(records, now_ns=2) == 10
    assert next_ticket(records, now_ns=50) == 50, "the time counts, so that tickets of several cards compare"
    assert next_ticket([waiter(1, ticket=60), EMPTY], now_ns=50) == 61
    assert next_ticket([EMPTY], now_ns=0) == 1


def test_a_live_entry_that_cannot_be_read_stops_grants() -> None:
    assert owned([pool(1), Record(kind=Kind.UNREADABLE)], 1, Room(100))[:3] == (False, 0, Refusal.UNREADABLE)


def test_another_version_is_counted_in_full() -> None:
    other = Record(version=9, kind=Kind.OTHER, lease_bytes=60, ownable_bytes=50, floor_bytes=55)
    assert owned([pool(0), other], 41, Room(100))[:2] == (False, 40)
    assert floors_room_bytes([other], None, 100) == 45


def test_the_room_for_a_floor_leaves_floors_and_weights_alone() -> None:
    records = [pool(90, floor=20), pool(30, kind=Kind.OTHER)]
    assert floors_room_bytes(records, None, 100) == 50
    assert floors_room_bytes(records, 0, 100) == 70


def test_the_ceiling_counts_what_never_comes_back() -> None:
    records = [pool(0), pool(50, floor=20), pool(30, kind=Kind.OTHER), EMPTY]
    assert ceiling_bytes(records, 0, 100, owned=True) == 50
    assert ceiling_bytes(records, 0, 100, owned=False) == 70
    assert ceiling_bytes([pool(0, limit=7)], 0, 100, owned=True) == 7


def test_short_and_over() -> None:
    records = [pool(90), pool(15, floor=20)]
    assert short_bytes(records, 100) == 10
    assert over_bytes(records, 100) == 5
    assert short_bytes(records, 200) == over_bytes(records, 200) == 0


def test_default_floor() -> None:
    assert default_floor_bytes(160, 50) == 10
    assert default_floor_bytes(1600, 50) == 50


SIZES = st.integers(0, 200)


@st.composite
def cards(draw: st.DrawFn) -> tuple[list[Record], int]:
    """Slots and a budget that satisfy what the record promises: the three sums are within the budget."""
    budget = draw(st.integers(1, 200))
    lease_left = committed_left = budget
    records = []
    for _ in range(draw(st.integers(1, 5))):
        lease = draw(st.integers(0, lease_left))
        floor = draw(st.integers(0, committed_left))
        ownable = draw(st.integers(0, min(lease, committed_left)))
        lease_left -= lease
        committed_left -= max(floor, ownable)
        waits = {"ticket": draw(st.integers(0, 3)), "wanted_bytes": draw(SIZES), "wanted_until_ns": draw(st.integers(0, 2))}
        records.append(
            pool(lease, ownable=ownable, floor=floor, limit=draw(st.integers(floor, 400)), want_class=draw(st.integers(0, 2)), **waits)
        )
    return records, budget


@settings(deadline=None)
@given(cards(), st.integers(1, 200), st.booleans(), st.none() | SIZES, st.booleans())
def test_a_grant_keeps_every_sum_and_the_grantable_number_is_exact(
    card: tuple[list[Record], int], delta: int, is_owned: bool, free: int | None, settling: bool
) -> None:
    records, budget = card
    room = Room(budget, free, settling, now_ns=1)
    verdict = judge(records, Ask(0, delta, delta if is_owned else 0), room)
    assert verdict.granted == (delta <= verdict.grantable_bytes)
    assert verdict.granted == (verdict.reason == "")
    if not verdict.granted:
        return
    mine = records[0]
    grown = mine._replace(lease_bytes=mine.lease_bytes + delta, ownable_bytes=mine.ownable_bytes + (delta if is_owned else 0))
    assert sum(record.lease_bytes for record in [grown, *records[1:]]) <= budget
    assert short_bytes([grown, *records[1:]], budget) == 0
    assert grown.lease_bytes <= mine.limit_bytes
    assert free is None or delta <= free
    assert not settling or grown.lease_bytes <= mine.floor_bytes


@settings(deadline=None)
@given(cards())
def test_a_floor_can_always_return_without_taking_an_owned_block(card: tuple[list[Record], int]) -> None:
    """Once the others gave back what they do not own, the first pool's floor is granted."""
    records, budget = card
    others = [record._replace(lease_bytes=record.ownable_bytes, ticket=0) for record in records[1:]]
    mine = records[0]
    missing = mine.floor_bytes - mine.lease_bytes
    if missing > 0:
        ask = Ask(0, missing, min(missing, mine.floor_bytes - mine.ownable_bytes))
        assert judge([mine, *others], ask, Room(budget)).granted


CLAIMS = st.lists(st.builds(Claim, st.integers(0, 100), st.sampled_from([0.5, 1.0, 2.0, 3.0]), st.integers(0, 300)), min_size=1, max_size=6)


@settings(deadline=None)
@given(CLAIMS, st.integers(0, 400))
def test_fair_shares_fit_the_budget_and_waste_nothing(claims: list[Claim], budget: int) -> None:
    shares = fair_shares(claims, budget)
    assert sum(shares) <= budget
    demand = sum(claim.demand_bytes for claim in claims)
    assert sum(shares) >= min(budget, demand) - 2 * len(claims)
    floors_fit = sum(min(claim.floor_bytes, claim.demand_bytes) for claim in claims) <= budget
    for claim, share in zip(claims, shares, strict=True):
        assert 0 <= share <= claim.demand_bytes
        assert not floors_fit or share >= min(claim.floor_bytes, claim.demand_bytes)


@pytest.mark.parametrize(
    ("claims", "budget", "shares"),
    [
        ([Claim(0, 1, 100), Claim(0, 1, 100)], 100, [50, 50]),
        ([Claim(0, 3, 100), Claim(0, 1, 100)], 100, [75, 25]),
        ([Claim(0, 1, 10), Claim(0, 1, 100)], 100, [10, 90]),
        ([Claim(40, 1, 100), Claim(0, 1, 100)], 100, [70, 30]),
        ([Claim(150, 1, 200), Claim(50, 1, 200)], 100, [75, 25]),
        ([Claim(0, 1, 5)], 100, [5]),
        ([], 100, []),
    ],
)
def test_fair_shares(claims: list[Claim], budget: int, shares: list[int]) -> None:
    assert fair_shares(claims, budget) == shares
