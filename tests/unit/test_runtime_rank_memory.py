# SPDX-License-Identifier: Apache-2.0
"""What a participant has performed: lease before create, release before unlease, whatever the device does; and the step gate."""

import threading
from dataclasses import replace

import pytest

from kvcached.errors import PeerLost
from kvcached.ranks.actions import (
    AbortRuns,
    AcquireHandles,
    CommitRuns,
    MapFresh,
    MapHeld,
    PrepareRuns,
    ReleaseHandles,
    UnmapKeep,
    UnmapRelease,
)
from kvcached.ranks.api import LimitsRequest, Outcome, Verdict
from kvcached.runtime.rank_memory import RankMemory
from kvcached.runtime.step_gate import StepGate
from kvcached.testing.ranks import Book, HandFence
from kvcached.units import MIB
from kvcached.vmm.api import ArenaConfig, Call, ZeroBacking
from kvcached.vmm.fake import FakeDevice

PAGE = 2 * MIB
PAGES = 32
DONE = Outcome(Verdict.DONE)


class Rank:
    def __init__(self, *, room_pages=PAGES, planes=1, zero=ZeroBacking.NEVER):
        self.planes = planes
        self.device = FakeDevice(2 * PAGES * planes * PAGE)
        self.arena = self.device.create_arena(ArenaConfig(PAGE, PAGES, planes, PAGES * PAGE, zero))
        self.book = Book(room_pages * planes * PAGE)
        self.memory = RankMemory(self.arena, self.book, facts=None)
        self.book.arena, self.book.device = self.arena, self.device

    def do(self, action):
        return self.memory.perform(action)

    def mapped(self):
        return {page for page in range(PAGES) if self.arena.access(page) == "rw"}

    def pages(self):
        """(mapped, kept as credit, leased) in pages."""
        stats = self.arena.stats()
        unit = PAGE * self.planes
        assert stats.held_bytes <= self.book.lease_bytes
        return stats.mapped_bytes // unit, stats.cached_bytes // unit, self.book.lease_bytes // unit

    def state(self):
        return self.mapped(), self.memory.credit(), self.pages()

    def mend(self):
        for call in Call:
            self.device.fail(call, 0)


@pytest.fixture
def make():
    ranks = []

    def make(**options):
        ranks.append(Rank(**options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.mend()
        rank.memory.close()
        assert rank.book.closed


def acquire(*classes, urgent=False, ticket=0):
    return AcquireHandles(classes, urgent, ticket)


def test_credit_is_leased_held_and_mapped_without_a_lease_or_a_create(make):
    rank = make(planes=2)
    assert rank.do(acquire((1, 3), (4, 1))) == DONE
    assert rank.state() == (set(), ((1, 3), (4, 1)), (0, 7, 7))
    rank.book.room_bytes = 0  # nothing more can be leased
    rank.device.fail(Call.CREATE, 1, from_there_on=True)  # nothing more can be made
    assert rank.do(MapHeld(((8, 4), (0, 1)))) == DONE
    assert rank.state() == ({0, 8, 9, 10, 11}, ((1, 2),), (5, 2, 7))
    assert rank.do(UnmapKeep(((8, 4),))) == DONE
    assert rank.state() == ({0}, ((1, 2), (4, 1)), (1, 6, 7))
    assert rank.do(ReleaseHandles(((4, 1), (1, 1)))) == Outcome(Verdict.DONE, size_bytes=2 * 5 * PAGE)
    assert rank.state() == ({0}, ((1, 1),), (1, 1, 2))


def test_thousands_of_held_handles_are_mapped_on_a_card_that_has_nothing_left():
    pages = 2_000
    device = FakeDevice(pages * PAGE)
    book = Book(pages * PAGE)
    memory = RankMemory(device.create_arena(ArenaConfig(PAGE, pages)), book, facts=None)
    assert memory.perform(acquire((1, pages))) == DONE
    assert device.memory()[0] == 0
    for first in range(0, pages, 100):
        assert memory.perform(MapHeld(tuple((page, 1) for page in range(first, first + 100)))) == DONE
    memory.close()


def test_what_is_mapped_at_once_leaves_credit_as_it_was(make):
    rank = make()
    rank.do(acquire((1, 2)))
    assert rank.do(MapFresh(((0, 1), (4, 4)), False, 0)) == DONE
    assert rank.state() == ({0, 4, 5, 6, 7}, ((1, 2),), (5, 2, 7))
    assert rank.do(UnmapRelease(((0, 1), (4, 4)))) == Outcome(Verdict.DONE, size_bytes=5 * PAGE)
    assert rank.state() == (set(), ((1, 2),), (0, 2, 2))


@pytest.mark.parametrize("action", [acquire((1, 2), (2, 2)), MapFresh(((0, 2), (2, 2), (4, 1), (5, 1)), False, 0)])
def test_without_room_no_driver_call_is_made_and_credit_is_not_touched(make, action):
    rank = make(room_pages=9)
    rank.do(acquire((1, 4)))
    before, calls = rank.state(), rank.device.calls()
    outcome = rank.do(action)
    assert (outcome.verdict, outcome.size_bytes, outcome.ticket) == (Verdict.EXHAUSTED, 5 * PAGE, 0)
    assert (rank.state(), rank.device.calls()) == (before, calls)


@pytest.mark.parametrize("ticket", [0, 5])
def test_an_urgent_refusal_keeps_a_place_and_tells_it(make, ticket):
    rank = make(room_pages=1)
    rank.book.next_ticket = 42
    outcome = rank.do(acquire((1, 2), urgent=True, ticket=ticket))
    assert (outcome.verdict, outcome.ticket) == (Verdict.EXHAUSTED, ticket or 42)
    assert rank.book.tickets == ([42] if not ticket else [5, 5])  # with a place it asks from there, and keeps it


@pytest.mark.parametrize(
    ("wish", "taken_back"),
    [(acquire((1, 2), urgent=True, ticket=5), ReleaseHandles(((1, 2),), 5)), (MapFresh(((0, 2),), True, 5), UnmapRelease(((0, 2),), 5))],
)
def test_a_wish_that_is_taken_back_keeps_its_place_before_the_lease_falls(make, wish, taken_back, monkeypatch):
    rank = make()
    assert rank.do(wish) == DONE
    places = []
    monkeypatch.setattr(rank.book, "want", lambda size, *, owned, ticket, deadline_s: places.append((size, ticket, rank.book.lease_bytes)))
    assert rank.do(taken_back).verdict is Verdict.DONE
    assert places == [(2 * PAGE, 5, 2 * PAGE)]
    assert rank.do(acquire((1, 1))) == DONE
    assert rank.do(ReleaseHandles(((1, 1),))).verdict is Verdict.DONE
    assert len(places) == 1


CASES = {
    "acquire": (None, acquire((1, 3), (2, 2))),
    "map fresh": (acquire((1, 1)), MapFresh(((0, 1), (2, 2), (4, 1)), False, 0)),
    "map held": (acquire((1, 2), (2, 1)), MapHeld(((0, 1), (2, 2), (4, 1)))),
    "unmap keep": (MapFresh(((0, 1), (2, 2), (4, 1)), False, 0), UnmapKeep(((0, 1), (2, 2), (4, 1)))),
    "unmap release": (MapFresh(((0, 1), (2, 2), (4, 1)), False, 0), UnmapRelease(((0, 1), (2, 2), (4, 1)))),
    "prepare": (MapFresh(((0, 1), (2, 2), (4, 1)), False, 0), PrepareRuns(7, ((0, 1), (2, 2), (4, 1)))),
    "release": (acquire((1, 3), (2, 2)), ReleaseHandles(((1, 2), (2, 1)))),
}


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.ACCESS, Call.UNMAP, Call.RELEASE])
def test_each_driver_call_failing_once_changes_nothing_or_says_what_is_unknown(make, name, call, planes):
    before_action, action = CASES[name]
    for nth in range(1, 12):
        rank = make(planes=planes)
        if before_action is not None:
            assert rank.do(before_action) == DONE
        before = rank.state()
        rank.device.fail(call, nth)
        outcome = rank.do(action)
        rank.pages()  # held <= lease
        if outcome.verdict is Verdict.DONE:
            assert nth > 1 or before != rank.state()
            return
        assert outcome.reason
        if outcome.verdict is Verdict.UNKNOWN:
            if name in ("unmap keep", "unmap release", "prepare"):
                assert set(outcome.pages) <= {0, 2, 3, 4}
                assert outcome.pages
            continue
        assert outcome.verdict is (Verdict.BROKEN if name == "map held" else Verdict.EXHAUSTED)
        assert rank.state() == before
        rank.mend()
        again = replace(action, tx=8) if isinstance(action, PrepareRuns) else action  # a failed one is remembered as such
        assert rank.do(again).verdict is Verdict.DONE
    pytest.fail("it never came to an end")


def test_a_commit_gives_back_and_an_abort_maps_again(make):
    rank = make()
    rank.do(MapFresh(((0, 2), (4, 1)), False, 0))
    assert rank.do(PrepareRuns(1, ((0, 2),))) == DONE
    assert rank.mapped() == {4}
    assert rank.book.lease_bytes == 3 * PAGE
    assert rank.do(AbortRuns(1)) == DONE
    assert rank.mapped() == {0, 1, 4}
    assert rank.do(PrepareRuns(2, ((0, 2),))) == DONE
    assert rank.do(CommitRuns(2)) == Outcome(Verdict.DONE, size_bytes=2 * PAGE)
    assert rank.state() == ({4}, (), (1, 0, 1))


def test_an_abort_is_tried_again_and_names_its_pages_when_it_cannot_be(make):
    rank = make()
    rank.do(MapFresh(((0, 2), (4, 1)), False, 0))
    rank.do(PrepareRuns(1, ((0, 2),)))
    rank.device.fail(Call.MAP, 1)
    assert rank.do(AbortRuns(1)) == DONE
    rank.do(PrepareRuns(2, ((0, 2),)))
    rank.device.fail(Call.MAP, 1, from_there_on=True)
    outcome = rank.do(AbortRuns(2))
    assert (outcome.verdict, outcome.pages) == (Verdict.UNKNOWN, (0, 1))
    assert rank.book.lease_bytes == 3 * PAGE


def test_an_undo_that_did_nothing_is_unknown_too(make):
    """The other ranks have undone it."""
    rank = make()
    rank.do(MapFresh(((0, 2), (4, 1)), False, 0))
    rank.device.fail(Call.UNMAP, 1)
    outcome = rank.do(UnmapRelease(((0, 2), (4, 1))))
    assert (outcome.verdict, outcome.pages) == (Verdict.UNKNOWN, (0, 1, 4))


def test_a_promised_unmap_that_did_nothing_is_unknown_too_and_its_handles_are_no_credit(make):
    rank = make()
    rank.do(MapFresh(((0, 2), (4, 1)), False, 0))
    rank.device.fail(Call.UNMAP, 1)
    outcome = rank.do(UnmapKeep(((0, 2), (4, 1))))
    assert (outcome.verdict, outcome.pages) == (Verdict.UNKNOWN, (0, 1, 4))
    assert rank.memory.credit() == ()


@pytest.mark.parametrize(
    ("action", "verdict"),
    [
        (MapHeld(((3, 1),)), Verdict.BROKEN),
        (MapHeld(((3, 2),)), Verdict.BROKEN),
        (ReleaseHandles(((1, 2),)), Verdict.REFUSED),
        (UnmapKeep(((9, 1),)), Verdict.REFUSED),
        (PrepareRuns(1, ((9, 1),)), Verdict.REFUSED),
        (CommitRuns(99), Verdict.REFUSED),
        (MapFresh(((0, 1),), False, 0), Verdict.REFUSED),
    ],
)
def test_a_mistake_of_the_owner_changes_nothing(make, action, verdict):
    rank = make()
    rank.do(MapFresh(((0, 1),), False, 0))
    if isinstance(action, ReleaseHandles):
        rank.do(acquire((1, 1)))
    before = rank.state()
    assert rank.do(action).verdict is verdict
    assert rank.state() == before


def test_after_close_everything_is_refused(make):
    rank = make()
    rank.do(acquire((1, 1)))
    rank.memory.close()
    rank.memory.close()
    for action in (acquire((1, 1)), ReleaseHandles(((1, 1),)), UnmapKeep(((0, 1),))):
        assert rank.do(action).verdict is Verdict.REFUSED
    assert rank.do(MapHeld(((0, 1),))).verdict is Verdict.BROKEN
    assert rank.memory.set_limits(LimitsRequest(1, 0, 1.0, 1)).verdict is Verdict.REFUSED


def test_a_map_from_credit_gets_its_turn_while_handles_are_made(make):
    rank = make()
    rank.do(acquire((1, 1)))
    create, began, go_on = rank.arena.acquire, threading.Event(), threading.Event()

    def slow(run_pages, runs):
        began.set()
        assert go_on.wait(20)
        create(run_pages, runs)

    rank.arena.acquire = slow
    acquiring = threading.Thread(target=rank.do, args=[acquire((1, 20))])
    acquiring.start()
    assert began.wait(20)
    assert rank.do(MapHeld(((0, 1),))) == DONE
    go_on.set()
    acquiring.join(20)
    assert rank.state() == ({0}, ((1, 20),), (1, 20, 21))


def test_handles_are_made_a_few_at_a_time(make):
    rank = make(planes=2)
    sizes = []
    create = rank.arena.acquire
    rank.arena.acquire = lambda run_pages, runs: (sizes.append(runs), create(run_pages, runs))
    rank.do(acquire((1, 20)))
    assert sizes == [8, 8, 4]


def test_the_zero_page_is_leased_from_the_start(make):
    rank = make(zero=ZeroBacking.USED)
    assert rank.book.lease_bytes == PAGE
    rank.do(MapFresh(((0, 1),), False, 0))
    rank.do(UnmapRelease(((0, 1),)))
    assert rank.book.lease_bytes == PAGE == rank.arena.stats().held_bytes


def test_a_record_that_cannot_be_reached_changes_nothing_about_the_memory(make, monkeypatch):
    rank = make()
    rank.do(acquire((1, 2)))

    def lost(*_):
        raise PeerLost("the card's file is gone")

    with monkeypatch.context() as patch:
        patch.setattr(rank.book, "publish", lost)
        patch.setattr(rank.book, "unlease", lost)
        assert rank.do(ReleaseHandles(((1, 2),))).verdict is Verdict.DONE
        assert rank.book.lease_bytes == 2 * PAGE
    rank.do(acquire((1, 1)))
    assert rank.pages() == (0, 1, 1)


# ---------------------------------------------------------------------- the step gate


def test_the_gate_opens_when_the_step_was_submitted_and_has_finished():
    fence = HandFence()
    gate = StepGate(fence)
    assert gate.wait(-1, 0.01)
    assert not gate.wait(3, 0.01)
    gate.submitted(2)
    assert not gate.wait(3, 0.01)
    gate.submitted(3)
    fence.open = False
    assert not gate.wait(3, 0.01)
    fence.let_go()
    assert gate.wait(3, 0.01)


def test_a_step_that_comes_later_wakes_who_waits_for_it():
    gate = StepGate()
    passed = []
    waiting = threading.Thread(target=lambda: passed.append(gate.wait(5, 20)))
    waiting.start()
    gate.submitted(4)
    gate.submitted(5)
    waiting.join(20)
    assert passed == [True]


def test_what_has_passed_needs_no_fence_and_steps_make_none():
    made = []

    def fence():
        made.append(1)
        return HandFence()

    gate = StepGate(fence)
    for step in range(1, 100):
        gate.submitted(step)
    assert made == []
    assert gate.wait(50, 1)
    assert gate.wait(99, 1)
    assert made == [1]


def test_a_closed_gate_waits_for_no_step_that_was_not_submitted():
    gate = StepGate()
    gate.submitted(1)
    gate.close()
    assert gate.wait(1, 20)
    assert not gate.wait(2, 20)
    assert gate.drain(1)
