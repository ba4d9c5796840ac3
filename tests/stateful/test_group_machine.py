# SPDX-License-Identifier: Apache-2.0
"""A pool over several ranks with real sockets and devices whose calls fail: blocks that a step reads are mapped on every rank."""

import tempfile
import time
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from kvcached.core.geometry import BlockGeometry
from kvcached.core.limits import Limits
from kvcached.errors import PoolExhausted
from kvcached.ranks.group import RankGroup
from kvcached.runtime.pool import Pool, PoolOptions
from kvcached.testing.consistency import must_be_consistent
from kvcached.testing.ranks import HELLO, FakeRank
from kvcached.units import MIB
from kvcached.vmm.api import Call

PAGE = 2 * MIB
PAGES = 16
WAIT_S = 20


def geometry(planes):
    return BlockGeometry(PAGE // 4, PAGE // 4, PAGE, PAGES, planes, PAGES * 4)


def ids_of(ranges):
    return [block for first, count in ranges for block in range(first, first + count)]


class GroupMachine(RuleBasedStateMachine):
    blocks = Bundle("blocks")

    @initialize(ranks=st.integers(1, 3), stepping=st.booleans())
    def start(self, ranks, stepping):
        self.folder = tempfile.TemporaryDirectory()
        paths = [Path(self.folder.name) / f"engine-{rank}.sock" for rank in range(ranks)]
        self.ranks = [FakeRank(path, rank, geometry(1 + rank), fence_timeout_s=0.02) for rank, path in enumerate(paths)]
        self.group = RankGroup(paths, HELLO, 10)
        if stepping:
            self.group.begin_steps()
        self.pool = Pool(
            self.group.shared_facts.geometry,
            self.group,
            Limits(PAGES * ranks * PAGE),
            PoolOptions(large_run_pages=4, grow_deadline_s=WAIT_S),
        )
        self.owned = set()
        self.step_number = 0
        self.late = 0

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for rank in self.ranks:
            rank.fence.let_go()
            for call in Call:
                rank.device.fail(call, 0)
        self.pool.close()
        assert all(rank.book.closed for rank in self.ranks)
        for rank in self.ranks:
            rank.close()
        self.folder.cleanup()

    @rule(target=blocks, count=st.integers(1, 30))
    def take(self, count):
        try:
            ids = ids_of(self.pool.take(count))
        except PoolExhausted:
            return multiple()
        assert len(set(ids)) == count
        assert not self.owned & set(ids)
        self.owned |= set(ids)
        return tuple(ids)

    @rule(ids=consumes(blocks))
    def give(self, ids):
        self.owned -= set(ids)
        self.pool.give([(block, 1) for block in ids], self.step_number)

    @rule(finished=st.booleans())
    def step(self, finished):
        """Every rank gets the operations and runs: it reads all that is owned."""
        self.step_number += 1
        ops = self.group.step_ops()
        pages = {self.pool.geometry.page_of(block) for block in self.owned}
        for rank in self.ranks:
            rank.server.apply_step_ops(ops)
            assert pages <= rank.mapped_pages()
            rank.gate.submitted(self.step_number)
        if finished:
            self.pool.advance(self.step_number)

    @precondition(lambda self: self.late < 5)
    @rule(rank=st.integers(0, 2))
    def a_stream_falls_behind(self, rank):
        self.late += 1
        self.ranks[rank % len(self.ranks)].fence.open = False

    @rule()
    def streams_catch_up(self):
        for rank in self.ranks:
            rank.fence.let_go()
        self.pool.advance(self.step_number)

    @rule(pages=st.integers(1, PAGES))
    def shrink(self, pages):
        self.pool.shrink(pages, deadline_s=0.2)

    @rule(pages=st.integers(1, 6))
    def grow_reserve(self, pages):
        self.pool.grow_reserve(pages)

    @rule()
    def trim(self):
        self.pool.trim_handles()

    @rule(rank=st.integers(0, 2), pages=st.integers(0, PAGES))
    def room(self, rank, pages):
        chosen = self.ranks[rank % len(self.ranks)]
        chosen.book.room_bytes = pages * chosen.page_bytes

    @rule(rank=st.integers(0, 2), nth=st.integers(1, 4))
    def the_driver_is_full(self, rank, nth):
        """Creating fails; a map from credit, which was promised, does not create."""
        self.ranks[rank % len(self.ranks)].device.fail(Call.CREATE, nth)

    @rule(pages=st.integers(1, PAGES))
    def limit(self, pages):
        self.pool.set_limits(Limits(pages * self.pool.geometry.release_step_bytes, revision=self.pool.limits.revision + 1), WAIT_S)

    @invariant()
    def nothing_is_wrong(self):
        if not hasattr(self, "pool"):
            return
        must_be_consistent(self.pool)
        assert self.pool.failed is None
        for rank in self.ranks:
            assert rank.arena.stats().held_bytes <= rank.book.most_bytes

    @rule()
    def at_rest_all_ranks_are_the_same(self):
        """When everything has been told to everyone, each rank maps exactly what the ledger says is mapped, and leases what it holds."""
        for rank in self.ranks:
            rank.fence.let_go()
        self.step_number += 1
        ops = self.group.step_ops()
        for rank in self.ranks:
            rank.server.apply_step_ops(ops)
            rank.gate.submitted(self.step_number)
        self.pool.advance(self.step_number)
        end = time.monotonic() + WAIT_S
        while not self._is_at_rest():
            assert time.monotonic() < end, "it does not come to rest"
            time.sleep(0.002)
        pages = {page.page for page in self.pool.ledger.pages()}
        for rank in self.ranks:
            assert rank.mapped_pages() == pages
            assert rank.arena.stats().held_bytes == rank.book.lease_bytes

    def _is_at_rest(self):
        counts = self.pool.counts()
        return self.group._coordinator.is_idle and not counts.mapping_pages and not counts.unmapping_pages


GroupMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestGroupMachine = GroupMachine.TestCase
