# SPDX-License-Identifier: Apache-2.0
"""Mappers and owners in real processes on host cards: killed at random, stopped, and two pools that want the same two cards."""

import os
import random
import signal
import threading
import time

import pytest

from kvcached.card.card import Card
from kvcached.card.record import EntrySpec, Kind
from kvcached.runtime.cards import OpenCard
from kvcached.testing.rank_kills import KillRounds
from kvcached.testing.rank_processes import Nursery, Place
from kvcached.testing.stopping import stop_process

PAGE = 65536
SETTLED_S = 2.1  # a new card file grants only what is unused until then
WAIT_S = 60


@pytest.fixture
def place(tmp_path):
    return Place(str(tmp_path), PAGE, pages=64, card_pages=100)


@pytest.fixture
def nursery(place):
    nursery = Nursery(place)
    yield nursery
    nursery.close()


@pytest.fixture
def cards(place):
    """Both cards, held open so that their files stay; two seconds old."""
    cards = [OpenCard.open(place.settings(), name) for name in ("host:0", "host:1")]
    time.sleep(SETTLED_S)
    yield cards
    for card in cards:
        card.close()


def eventually(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def leased_bytes(card):
    return card.record.snapshot().leased_bytes


@pytest.mark.timeout(900)
def test_kill_9_of_any_rank_at_any_moment(place, nursery, cards):
    """Also `benchmarks/ranks.py --kill-rounds 1000`."""
    rounds = KillRounds(place, nursery, cards[0], random.Random(20), ranks=4)
    for number in range(40):
        rounds.play(number)
    assert rounds.maps > 40


def test_kill_9_of_the_owner_alone_frees_nothing_while_its_mappers_are_held(place, nursery, cards):
    mappers = [nursery.rank("held", rank, f"host:{rank}") for rank in range(2)]
    owner = nursery.owner("held", 2)
    assert owner.ask("map", 60) == "DONE"
    for mapper in mappers:
        stop_process(mapper.pid)
    owner.kill()
    others = [card.record.register(EntrySpec(Kind.KV, "other", "other", limit_bytes=100 * PAGE)) for card in cards]
    for _ in range(10):
        for card, other in zip(cards, others, strict=True):
            assert not other.lease(41 * PAGE, owned=True).granted
            assert card.device.memory()[0] == 40 * PAGE
        time.sleep(0.05)
    for other in others:
        assert other.lease(40 * PAGE, owned=True).granted
        other.unlease(40 * PAGE)
    for mapper in mappers:
        mapper.signal(signal.SIGCONT)
    for other in others:
        eventually(lambda other=other: other.lease(100 * PAGE, owned=True).granted)
    assert [mapper.ask("close") for mapper in mappers] == [True, True]


def test_two_pools_with_crossed_ranks_share_two_cards(place, nursery, cards):
    """Also `benchmarks/ranks.py --crossed-rounds 10000`."""
    mappers = [nursery.rank(name, rank, f"host:{rank ^ flip}") for name, flip in (("here", 0), ("there", 1)) for rank in range(2)]
    owners = [nursery.owner(name, 2) for name in ("here", "there")]
    over, stop = [], threading.Event()

    def watch():
        while not stop.wait(0.001):
            over.extend(size for card in cards if (size := leased_bytes(card)) > 100 * PAGE)

    watcher = threading.Thread(target=watch)
    watcher.start()
    rounds_file = os.path.join(place.folder, "rounds")
    for owner in owners:
        owner.begin("play", 60, rounds_file, 200, 0.001)
    results = [owner.end() for owner in owners]
    stop.set()
    watcher.join()
    assert over == []
    total = sum(result["rounds"] for result in results)
    assert total >= 200
    assert min(result["rounds"] for result in results) >= 0.4 * total, results
    for owner in owners:
        assert owner.ask("close")
    eventually(lambda: [leased_bytes(card) for card in cards] == [0, 0])
    assert all(mapper.ask("close") for mapper in mappers)


def test_an_owner_that_closes_takes_all_memory_of_its_ranks_with_it(nursery, cards):
    mappers = [nursery.rank("orderly", rank, f"host:{rank}") for rank in range(2)]
    owner = nursery.owner("orderly", 2)
    assert owner.ask("map", 10) == "DONE"
    assert [leased_bytes(card) for card in cards] == [10 * PAGE, 10 * PAGE]
    assert owner.ask("close")
    assert [leased_bytes(card) for card in cards] == [0, 0]
    assert [card.device.memory()[0] for card in cards] == [100 * PAGE, 100 * PAGE]
    assert [mapper.ask("close") for mapper in mappers] == [True, True]
    assert Card.list_cards(cards[0].settings.run_dir)[0].live == ()
