# SPDX-License-Identifier: Apache-2.0
"""The mapper: the lease rises before the first create and falls after the release, whatever the device does in between."""

import threading
import time

import pytest

from kvcached.card.budget import Refusal
from kvcached.card.entry import LeaseResult
from kvcached.core.geometry import BlockGeometry
from kvcached.errors import PeerLost, PeerRefused, PeerTimeout
from kvcached.ranks.api import LimitsRequest, Report, Verdict
from kvcached.ranks.facts import MapperFacts
from kvcached.runtime.mapper import Mapper
from kvcached.units import MIB
from kvcached.vmm.api import ArenaConfig, Call, ZeroBacking
from kvcached.vmm.fake import FakeDevice

PAGE = 2 * MIB


class Book:
    """An entry of a card with room for `room_bytes`. Checks that the lease covers what is held whenever it falls."""

    def __init__(self, room_bytes):
        self.room_bytes = room_bytes
        self.lease_bytes = 0
        self.arena = None
        self.device = None
        self.usage = None
        self.limits = None
        self.limits_error = None
        self.publish_error = None
        self.closed = False

    def lease(self, delta_bytes, *, owned, deadline_s, want):
        assert owned
        assert delta_bytes > 0
        if self.lease_bytes + delta_bytes > self.room_bytes:
            return LeaseResult(False, self.room_bytes - self.lease_bytes, Refusal.BUDGET, "the card's budget is leased")
        self.lease_bytes += delta_bytes
        return LeaseResult(True, self.room_bytes - self.lease_bytes, Refusal.NONE, "")

    def unlease(self, delta_bytes, usage=None):
        self.lease_bytes -= delta_bytes
        assert self.lease_bytes >= self.arena.stats().held_bytes
        self.usage = usage

    def publish(self, usage):
        if self.publish_error:
            raise self.publish_error
        self.usage = usage

    def set_limits(self, *limits):
        if self.limits_error:
            raise self.limits_error
        self.limits = limits

    def heartbeat(self):
        return False

    def close(self):
        free_bytes, total_bytes = self.device.memory()
        assert free_bytes == total_bytes  # memory goes before the entry
        self.closed = True


class Gate:
    def __init__(self):
        self.open = True

    def __call__(self):
        return self

    def wait(self, timeout_s):
        return self.open


@pytest.fixture
def device():
    device = FakeDevice(64 * PAGE)
    return device


def make(device, room_pages=16, planes=1, cache_bytes=0, zero=ZeroBacking.NEVER, fence=None):
    config = ArenaConfig(page_bytes=PAGE, pages=32, planes=planes, plane_stride_bytes=32 * PAGE, zero_backing=zero)
    book = Book(room_pages * PAGE)
    book.device = device
    arena = book.arena = device.create_arena(config)
    facts = MapperFacts(BlockGeometry(PAGE, PAGE, PAGE, 32, planes, 32), 0, "FAKE", room_pages * PAGE)
    mapper = Mapper(arena, book, facts=facts, handle_cache_bytes=cache_bytes, **({"fence": fence} if fence else {}))
    return mapper, book, arena


def test_the_lease_is_what_is_held(device):
    mapper, book, arena = make(device, planes=2)
    assert mapper.map([(0, 2), (5, 1)], urgent=True).result().verdict is Verdict.DONE
    assert book.lease_bytes == arena.stats().held_bytes == 6 * PAGE
    outcome = mapper.unmap([(0, 2)], 0).result()
    assert (outcome.verdict, outcome.size_bytes) == (Verdict.DONE, 4 * PAGE)
    assert book.lease_bytes == 2 * PAGE
    mapper.close()
    assert book.closed


@pytest.mark.parametrize("meanwhile", ["map", "unmap"])
def test_lease_and_memory_are_told_of_one_moment(device, monkeypatch, meanwhile):
    mapper, _book, arena = make(device)
    mapper.map([(0, 2), (2, 2)], urgent=True)
    look, changes = arena.stats, {"map": lambda: mapper.map([(8, 3)], urgent=True), "unmap": lambda: mapper.unmap([(0, 2)], 0)}
    asking = threading.get_ident()

    def stats():
        seen = look()
        if threading.get_ident() == asking and changes:  # another thread changes it behind this look
            change = changes[meanwhile]
            changes.clear()
            change()
        return seen

    monkeypatch.setattr(arena, "stats", stats)
    status = mapper.status(1.0)
    assert status.held_bytes == status.lease_bytes == {"map": 7, "unmap": 2}[meanwhile] * PAGE
    mapper.close()


def test_without_a_lease_no_driver_call_is_made(device):
    mapper, book, _arena = make(device, room_pages=3)
    before = device.calls()
    outcome = mapper.map([(page, 1) for page in range(4)], urgent=True).result()
    assert (outcome.verdict, outcome.size_bytes) == (Verdict.EXHAUSTED, 3 * PAGE)
    assert device.calls() == before
    assert book.lease_bytes == 0
    mapper.close()


@pytest.mark.parametrize("call", [Call.CREATE, Call.MAP, Call.ACCESS])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_driver_out_of_memory_under_a_valid_lease_is_pressure(device, call, nth):
    mapper, book, arena = make(device)
    device.fail(call, nth)
    outcome = mapper.map([(0, 1), (2, 1), (4, 1)], urgent=True).result()
    assert outcome.verdict is Verdict.EXHAUSTED
    assert book.lease_bytes == arena.stats().held_bytes == 0
    assert mapper.map([(0, 1), (2, 1), (4, 1)], urgent=True).result().verdict is Verdict.DONE
    mapper.close()


def test_a_failed_undo_is_unknown_and_stays_in_the_lease(device):
    mapper, book, arena = make(device)
    device.fail(Call.ACCESS, 2)
    device.fail(Call.UNMAP, 1, from_there_on=True)
    outcome = mapper.map([(0, 1), (2, 1)], urgent=True).result()
    assert outcome.verdict is Verdict.UNKNOWN
    assert outcome.pages
    assert book.lease_bytes == arena.stats().held_bytes > 0
    device.fail(Call.UNMAP, 0)
    mapper.close()


def test_an_unmap_waits_for_the_fence_and_gives_up(device):
    gate = Gate()
    mapper, _book, arena = make(device, fence=gate)
    mapper.map([(0, 1)], urgent=True)
    gate.open = False
    assert mapper.unmap([(0, 1)], 0).result().verdict is Verdict.BUSY
    assert arena.stats().mapped_pages == 1
    gate.open = True
    assert mapper.unmap([(0, 1)], 0).result().verdict is Verdict.DONE
    mapper.close()


def test_kept_handles_stay_leased_and_make_room_when_it_is_short(device):
    mapper, book, arena = make(device, room_pages=4, cache_bytes=4 * PAGE)
    mapper.map([(0, 2)], urgent=True)
    mapper.unmap([(0, 2)], 0)
    assert book.lease_bytes == arena.stats().cached_bytes == 2 * PAGE
    creates = device.calls()[Call.CREATE]
    mapper.map([(4, 2)], urgent=True)
    assert device.calls()[Call.CREATE] == creates
    mapper.unmap([(4, 2)], 0)
    assert mapper.map([(page, 1) for page in range(4)], urgent=True).result().verdict is Verdict.DONE
    assert arena.stats().cached_bytes == 0
    mapper.unmap([(page, 1) for page in range(4)], 0)
    assert mapper.trim().result().size_bytes == 4 * PAGE
    assert book.lease_bytes == 0
    mapper.close()


def test_the_zero_page_is_leased_from_the_start(device):
    mapper, book, arena = make(device, zero=ZeroBacking.USED)
    assert book.lease_bytes == PAGE
    mapper.map([(0, 1)], urgent=True)
    mapper.unmap([(0, 1)], 0)
    assert book.lease_bytes == PAGE == arena.stats().held_bytes
    mapper.close()


def test_a_mistake_of_the_owner_is_refused_and_changes_nothing(device):
    mapper, book, _arena = make(device)
    mapper.map([(0, 1)], urgent=True)
    assert mapper.map([(0, 1)], urgent=True).result().verdict is Verdict.REFUSED
    assert mapper.unmap([(7, 1)], 0).result().verdict is Verdict.REFUSED
    assert book.lease_bytes == PAGE
    mapper.close()
    assert mapper.map([(3, 1)], urgent=True).result().verdict is Verdict.REFUSED


def test_what_is_given_back_is_shown_with_the_lease_and_the_rest_soon(device):
    """No grant depends on what is shown, so a map writes nothing but its lease."""
    mapper, book, _ = make(device)
    mapper.report(Report(parked_bytes=6))
    assert book.usage.parked_bytes == 6
    mapper.map([(0, 1), (1, 1)], urgent=True)
    mapper.unmap([(0, 1)], 0)
    assert (book.usage.mapped_bytes, book.usage.parked_bytes) == (PAGE, 6)
    mapper.map([(0, 1)], urgent=True)
    end = time.monotonic() + 20
    while book.usage.mapped_bytes < 2 * PAGE:
        assert time.monotonic() < end
        time.sleep(0.01)
    mapper.close()


@pytest.mark.parametrize(
    ("error", "verdict"),
    [(PeerRefused("a floor does not fit"), Verdict.REFUSED), (PeerTimeout("locked"), Verdict.BUSY), (None, Verdict.DONE)],
)
def test_limits_are_entered_or_refused_and_the_mapper_goes_on(device, error, verdict):
    mapper, book, _ = make(device)
    book.limits_error = error
    assert mapper.set_limits(LimitsRequest(10 * PAGE, PAGE, 2.0, 1)).result().verdict is verdict
    assert book.limits == (None if error else (10 * PAGE, PAGE, 2.0, 1))
    assert mapper.map([(0, 1)], urgent=True).result().verdict is Verdict.DONE
    mapper.close()


def test_a_record_that_cannot_be_reached_changes_nothing_about_the_memory(device):
    mapper, book, arena = make(device)
    mapper.map([(0, 2)], urgent=True)
    book.publish_error = PeerLost("the card's file is gone")
    assert mapper.unmap([(0, 2)], 0).result().verdict is Verdict.DONE
    assert arena.stats().held_bytes == 0
    book.publish_error = None
    mapper.close()
