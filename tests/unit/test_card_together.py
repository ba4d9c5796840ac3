# SPDX-License-Identifier: Apache-2.0
"""Leases over several cards: all or none, one ticket everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcached.card import Card, CardIdentity, Entry, EntrySpec, Kind, Refusal, lease_together
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from pathlib import Path

NOW_S = 100.0


@pytest.fixture
def cards(tmp_path: Path) -> list[Card]:
    identities = [CardIdentity(uuid, uuid, 1000) for uuid in ("GPU-b", "GPU-a")]
    return [Card.open(tmp_path / "run", identity, budget_bytes=100, settle_s=0, clock=lambda: NOW_S) for identity in identities]


def enter(cards: list[Card], instance: str, **words: int) -> list[Entry]:
    return [card.register(EntrySpec(Kind.KV, instance, **words)) for card in cards]  # type: ignore[arg-type]


def leases(entries: list[Entry]) -> list[int]:
    return [entry.lease_bytes for entry in entries]


def ask(entries: list[Entry], delta: int, *, want: bool = False) -> bool:
    return lease_together([(entry, delta) for entry in entries], owned=True, deadline_s=1.0, want=want).granted


def test_all_cards_grant_or_none(cards: list[Card]) -> None:
    a, b = enter(cards, "a"), enter(cards, "b")
    assert ask(a, 60)
    assert b[0].lease(30, owned=True).granted
    result = lease_together([(entry, 20) for entry in b], owned=True)
    assert (result.granted, result.grantable_bytes, result.refusal) == (False, 10, Refusal.BUDGET)
    assert (leases(a), leases(b)) == ([60, 60], [30, 0])
    assert ask(b, 10)
    assert leases(b) == [40, 10]
    assert [entry.record.ticket for entry in b] == [0, 0]


def test_one_that_waits_holds_nothing_but_its_place_on_every_card(cards: list[Card]) -> None:
    a, b = enter(cards, "a"), enter(cards, "b")
    assert a[0].lease(90, owned=True).granted
    assert not ask(b, 50, want=True)
    assert leases(b) == [0, 0]
    assert b[0].record.ticket == b[1].record.ticket > 0
    assert a[1].lease(60, owned=True).refusal is Refusal.TURN
    assert a[1].lease(50, owned=True).granted
    a[0].unlease(40)
    assert a[0].lease(1, owned=True).refusal is Refusal.TURN
    assert ask(b, 50, want=True)
    assert leases(b) == [50, 50]
    assert [entry.record.ticket for entry in b] == [0, 0]


def test_two_that_wait_for_the_same_cards_stand_in_the_same_order_on_each(cards: list[Card]) -> None:
    a, b, c = (enter(cards, name) for name in "abc")
    assert c[0].lease(100, owned=True).granted
    assert c[1].lease(100, owned=True).granted
    b[1].want(60, owned=True)
    assert not ask(a, 60, want=True)
    assert not ask(b, 60, want=True)
    ahead = [first.record.ticket < second.record.ticket for first, second in zip(b, a, strict=True)]
    assert ahead in ([True, True], [False, False])
    for entry in c:
        entry.unlease(100)
    assert [ask(a, 60, want=True), ask(b, 60, want=True)] == [False, True]
    b[0].unlease(60)
    b[1].unlease(60)
    assert ask(a, 60, want=True)


def test_what_can_never_be_leaves_no_tickets(cards: list[Card]) -> None:
    a = enter(cards, "a", limit_bytes=10)
    assert not ask(a, 11, want=True)
    assert [entry.record.ticket for entry in a] == [0, 0]


def test_no_wishes_and_no_bytes_are_misuse(cards: list[Card]) -> None:
    a = enter(cards, "a")
    with pytest.raises(Misuse):
        lease_together([], owned=True)
    with pytest.raises(Misuse):
        lease_together([(a[0], 5), (a[1], 0)], owned=True)
    assert leases(a) == [0, 0]
