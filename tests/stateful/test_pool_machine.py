# SPDX-License-Identifier: Apache-2.0
"""Pool, mapper and a device whose calls fail: whatever happens, blocks lie on mapped pages and the lease covers what is held."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from kvcached.card.budget import Refusal
from kvcached.card.entry import LeaseResult
from kvcached.core.geometry import BlockGeometry
from kvcached.core.limits import Limits
from kvcached.errors import PoolExhausted
from kvcached.ranks.facts import MapperFacts
from kvcached.runtime.keeper import Keeper, KeeperOptions
from kvcached.runtime.mapper import Mapper
from kvcached.runtime.pool import Pool, PoolOptions
from kvcached.testing.consistency import must_be_consistent
from kvcached.units import MIB
from kvcached.vmm.api import ArenaConfig, Call
from kvcached.vmm.fake import FakeDevice

PAGE = 2 * MIB
PAGES = 24
BLOCKS_PER_PAGE = 4
GEOMETRY = BlockGeometry(PAGE // BLOCKS_PER_PAGE, PAGE // BLOCKS_PER_PAGE, PAGE, PAGES, 1, PAGES * BLOCKS_PER_PAGE)


class Book:
    """A card with a budget that the machine changes; refuses to be overdrawn."""

    def __init__(self):
        self.room_bytes = PAGES * PAGE
        self.lease_bytes = 0

    def lease(self, delta_bytes, *, owned, deadline_s, want):
        room = max(0, self.room_bytes - self.lease_bytes)
        if delta_bytes > room:
            return LeaseResult(False, room, Refusal.BUDGET, "leased")
        self.lease_bytes += delta_bytes
        return LeaseResult(True, room, Refusal.NONE, "")

    def unlease(self, delta_bytes, usage=None):
        self.lease_bytes -= delta_bytes

    def publish(self, usage):
        assert usage.held_bytes <= self.lease_bytes

    def set_limits(self, *limits):
        pass

    def heartbeat(self):
        return False

    def close(self):
        pass


class PoolMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")
    prefixes = Bundle("prefixes")

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.device = FakeDevice(PAGES * PAGE)
        self.book = Book()
        self.arena = self.device.create_arena(ArenaConfig(page_bytes=PAGE, pages=PAGES))
        facts = MapperFacts(GEOMETRY, 0, "FAKE", PAGES * PAGE)
        self.mapper = Mapper(self.arena, self.book, facts=facts, handle_cache_bytes=2 * PAGE)
        self.pool = Pool(GEOMETRY, self.mapper, Limits(PAGES * PAGE), PoolOptions(large_run_pages=4, grow_deadline_s=0.0))
        self.keeper = Keeper(self.pool, KeeperOptions(1, 3, 1.0), clock=lambda: self.now)
        self.step = 0
        self.completed = -1
        self.owned = set()
        self.cached = set()
        self.busy_until = {}  # page -> the last step that may read it
        self.pool.on_evict = self._evicted

    def teardown(self):
        self.device.fail(Call.UNMAP, 0)
        self.pool.close()

    def _evicted(self, ids):
        assert set(ids) <= self.cached
        self.cached -= set(ids)

    def _ids(self, ranges):
        return [block for first, count in ranges for block in range(first, first + count)]

    @rule(target=blocks, count=st.integers(1, 40))
    def take(self, count):
        try:
            ids = self._ids(self.pool.take(count))
        except PoolExhausted:
            return multiple()
        assert len(ids) == len(set(ids)) == count
        assert not self.owned & set(ids)
        assert len(self.owned) + len(self.cached) + count <= self.pool.counts().limit_pages * GEOMETRY.max_blocks_per_page
        assert not self.cached & set(ids)
        self.owned |= set(ids)
        return tuple(ids)

    @rule(ids=consumes(blocks), in_flight=st.booleans())
    def give(self, ids, in_flight):
        self._leave(ids, in_flight)
        self.pool.give([(block, 1) for block in ids], self.step if in_flight else -1)

    @rule(target=prefixes, ids=consumes(blocks), in_flight=st.booleans())
    def give_cached(self, ids, in_flight):
        self._leave(ids, in_flight)
        self.cached |= set(ids)
        self.pool.give_cached(ids, self.step if in_flight else -1, last_use=self.step)
        return ids

    def _leave(self, ids, in_flight):
        self.owned -= set(ids)
        if in_flight and self.step > self.completed:
            self.busy_until.update({GEOMETRY.page_of(block): self.step for block in ids})

    @rule(target=blocks, ids=consumes(prefixes))
    def touch(self, ids):
        still = [block for block in ids if block in self.cached]
        self.pool.touch(still)
        self.cached -= set(still)
        self.owned |= set(still)
        return tuple(still)

    @rule(ids=consumes(prefixes))
    def evict(self, ids):
        still = [block for block in ids if block in self.cached]
        self.cached -= set(still)
        self.pool.evict(still)

    @rule()
    def schedule(self):
        self.step += 1

    @precondition(lambda self: self.completed < self.step)
    @rule()
    def complete(self):
        self.completed = self.step
        self.busy_until.clear()
        self.pool.advance(self.completed)

    @rule(pages=st.integers(1, PAGES), keep=st.integers(0, 4))
    def shrink(self, pages, keep):
        self.pool.shrink(pages, keep_parked=keep)

    @rule(pages=st.integers(0, PAGES))
    def limit(self, pages):
        self.pool.set_limits(Limits(pages * PAGE, revision=self.pool.limits.revision + 1))

    @rule(pages=st.integers(0, PAGES))
    def budget(self, pages):
        self.book.room_bytes = pages * PAGE

    @rule(call=st.sampled_from([Call.CREATE, Call.MAP, Call.ACCESS]), nth=st.integers(1, 4))
    def fail_next(self, call, nth):
        self.device.fail(call, nth)

    @rule(seconds=st.sampled_from([0.05, 0.3, 2.0]))
    def tick(self, seconds):
        self.now += seconds
        self.keeper.tick()

    @invariant()
    def the_ledger_is_right(self):
        must_be_consistent(self.pool)
        counts = self.pool.counts()
        assert (counts.owned_blocks, counts.cached_blocks) == (len(self.owned), len(self.cached))

    @invariant()
    def what_is_kept_is_mapped(self):
        for block in self.owned | self.cached:
            assert self.arena.access(GEOMETRY.page_of(block)) == "rw"

    @invariant()
    def what_is_in_flight_is_mapped(self):
        for page in self.busy_until:
            assert self.arena.access(page) == "rw"

    @invariant()
    def the_lease_covers_what_is_held(self):
        assert self.arena.stats().held_bytes <= self.book.lease_bytes
        assert self.pool.failed is None


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
