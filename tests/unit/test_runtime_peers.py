# SPDX-License-Identifier: Apache-2.0
"""Pressure on the cards that a pool is on, and what several ranks tell as one."""

import json

import pytest

from kvcached.card.card import Card
from kvcached.card.record import CardIdentity, EntrySpec, Kind, Usage
from kvcached.core.geometry import BlockGeometry
from kvcached.errors import HandshakeMismatch, PeerTimeout
from kvcached.log_lines import JsonLine
from kvcached.ranks.facts import MapperFacts, agreed
from kvcached.runtime.control import BytesAnswer
from kvcached.runtime.peers import Peers
from kvcached.units import MIB

PAGE = 2 * MIB


class World:
    """Two cards of 100 pages, and who was asked for how much."""

    def __init__(self, run_dir, monkeypatch):
        self.run_dir = run_dir
        self.cards = [
            Card.open(run_dir, CardIdentity(f"CARD-{n}", "card", 100 * PAGE), budget_bytes=100 * PAGE, settle_s=0) for n in range(2)
        ]
        self.asked = []
        self.answers = {}
        world = self

        class Client:
            def __init__(self, path, timeout_s):
                self.path = str(path)

            def pressure(self, wanted_bytes):
                world.asked.append((self.path, wanted_bytes // PAGE))
                answer = world.answers.get(self.path, 0)
                if isinstance(answer, Exception):
                    raise answer
                return BytesAnswer(given_bytes=min(wanted_bytes, answer * PAGE))

        monkeypatch.setattr("kvcached.runtime.peers.ControlClient", Client)

    def add(self, instance, card, pages, rank=0, parked=0, floor=0):
        spec = EntrySpec(Kind.KV, instance, instance, endpoint=f"/{instance}", limit_bytes=100 * PAGE, floor_bytes=floor * PAGE, rank=rank)
        entry = self.cards[card].register(spec)
        if pages:
            assert entry.lease(pages * PAGE, owned=True).granted
        entry.publish(Usage(mapped_bytes=pages * PAGE, parked_bytes=parked * PAGE))
        return entry

    def peers(self, page_bytes_by_card, page_bytes=PAGE, ahead_pages=0):
        return Peers(self.run_dir, page_bytes_by_card, page_bytes, "mine", most_ahead_bytes=ahead_pages * PAGE)


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch)
    yield world
    for card in world.cards:
        card.close()


def test_only_the_card_that_is_short_is_pressed(world):
    for card in range(2):
        world.add("mine", card, 10, rank=card)
    world.add("near", 0, 20, parked=20)
    world.add("far", 1, 85, parked=50)
    world.answers["/far"] = 50
    peers = world.peers({"CARD-0": PAGE, "CARD-1": PAGE})
    assert peers.press(30 * PAGE, 1.0) == 30 * PAGE
    assert world.asked == [("/far", 30)]


def test_ranks_that_share_a_card_need_it_together_and_never_ask_themselves(world):
    for rank in range(2):
        world.add("mine", 0, 20, rank=rank)
    world.add("other", 0, 50, parked=30)
    world.answers["/other"] = 15  # not enough: whoever else could give is asked too
    assert world.peers({"CARD-0": 2 * PAGE}).press(10 * PAGE, 1.0) == 15 * PAGE
    assert world.asked == [("/other", 20)]


def test_an_owner_with_two_ranks_here_is_asked_once(world):
    world.add("mine", 0, 10)
    for rank in range(2):
        world.add("other", 0, 40, rank=rank, parked=20)
    world.peers({"CARD-0": PAGE}).press(30 * PAGE, 1.0)
    assert world.asked == [("/other", 30)]


def test_a_peer_that_does_not_answer_is_passed_over(world):
    world.add("mine", 0, 10)
    world.add("deaf", 0, 40, parked=40)
    world.add("kind", 0, 40, parked=20)
    world.answers |= {"/deaf": PeerTimeout("deaf"), "/kind": 10}
    assert world.peers({"CARD-0": PAGE}).press(10 * PAGE, 1.0) == 10 * PAGE


def test_asks_that_follow_each_other_ask_for_as_much_again_as_was_given_and_never_a_further_pool_for_that_alone(world, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("kvcached.runtime.peers.time.monotonic", lambda: clock[0])
    world.add("mine", 0, 10)
    world.add("first", 0, 40, parked=40)
    world.add("second", 0, 40, parked=20)
    world.answers |= {"/first": 4, "/second": 40}
    peers = world.peers({"CARD-0": PAGE}, ahead_pages=6)
    for wanted in (1, 1, 1, 2, 5):
        clock[0] += 0.9
        peers.press(wanted * PAGE, 0.5)
    clock[0] += 1.1
    peers.press(PAGE, 0.5)
    to_first = [pages for path, pages in world.asked if path == "/first"]
    assert to_first == [1, 2, 4, 8, 11, 1]  # 0, 1, 3, 7 and 11 were given before, and 6 is the most
    assert [pages for path, pages in world.asked if path == "/second"] == [7]  # of 5 wanted the first gave 4: there was need


def test_what_was_given_and_who_gave_nothing_are_facts_in_the_log(world, caplog):
    caplog.set_level("INFO", "kvcached.pressure")
    world.add("mine", 0, 10)
    world.add("silent", 0, 30, parked=30)
    world.add("other", 0, 40, parked=20)
    world.answers |= {"/silent": PeerTimeout("too busy"), "/other": 20}
    world.peers({"CARD-0": PAGE}).press(50 * PAGE, 1.0)
    facts = {record["event"]: record for record in (json.loads(JsonLine().format(record)) for record in caplog.records)}
    assert [facts["gave_back"][name] for name in ("giver", "asker", "given_bytes", "level")] == ["other", "mine", 20 * PAGE, "INFO"]
    assert [facts["gave_nothing"][name] for name in ("giver", "reason", "level")] == ["silent", "too busy", "WARNING"]
    assert [facts[event]["wanted_bytes"] for event in ("gave_back", "gave_nothing")] == [50 * PAGE, 30 * PAGE]


def test_the_ceiling_is_that_of_the_card_that_allows_least_in_the_owners_bytes(world):
    world.add("mine", 0, 0)
    world.add("mine", 0, 0, rank=1)
    world.add("mine", 1, 0, rank=2)
    world.add("other", 0, 10, floor=20)
    world.add("other", 1, 10, floor=70)
    peers = world.peers({"CARD-0": 2 * PAGE, "CARD-1": PAGE // 2})
    assert peers.ceiling_bytes() == 40 * PAGE  # 80 pages for two ranks; the other card's 30 pages hold 60 halves
    assert world.peers({"CARD-9": PAGE}).ceiling_bytes() is None


def test_the_others_spare_what_they_keep_beyond_their_floors_on_the_card_that_is_short(world):
    world.add("mine", 0, 10, parked=10)
    world.add("mine", 1, 10, rank=1, parked=10)
    world.add("rich", 0, 40, parked=30, floor=25)
    world.add("at-its-floor", 0, 20, parked=20, floor=20)
    world.add("poor", 0, 3, parked=3)
    world.add("busy", 1, 60, parked=2)
    assert world.peers({"CARD-0": PAGE}).spare_bytes() == 18 * PAGE
    assert world.peers({"CARD-0": 4 * PAGE}).spare_bytes() == 3 * PAGE  # 15 are three whole pages of four, and 3 are none
    peers = world.peers({"CARD-0": PAGE, "CARD-1": PAGE // 4})
    assert peers.spare_bytes() == 0  # both cards have room
    world.add("weights", 0, 27)
    assert peers.spare_bytes() == 18 * PAGE
    world.add("weights", 1, 30)
    assert peers.spare_bytes() == 8 * PAGE  # what is spare on the one card does not help on the other
    assert world.peers({"CARD-9": PAGE}).spare_bytes() == 0


def geometry(planes=1, pages=32):
    return BlockGeometry(PAGE, PAGE, PAGE, pages, planes, pages)


def test_several_ranks_tell_as_one():
    one = MapperFacts(geometry(), 3, "A", 90 * PAGE)
    big = MapperFacts(geometry(planes=2), 3, "B", 100 * PAGE)
    assert agreed([one]).page_bytes_by_card == one.page_bytes_by_card == {"A": PAGE}
    facts = agreed([one, big, one])
    assert facts.geometry == big.geometry
    assert facts.page_bytes_by_card == {"A": 2 * PAGE, "B": 2 * PAGE}
    assert facts.budget_bytes == 100 * PAGE
    assert MapperFacts.from_text(facts.to_text()) == facts


@pytest.mark.parametrize(
    ("other", "why"),
    [(MapperFacts(geometry(pages=31), 3, "A", PAGE), "number their pages"), (MapperFacts(geometry(), 2, "A", PAGE), "rank 1 2")],
)
def test_ranks_that_differ_are_refused(other, why):
    with pytest.raises(HandshakeMismatch, match=why):
        agreed([MapperFacts(geometry(), 3, "A", PAGE), other])
