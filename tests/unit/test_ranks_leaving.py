# SPDX-License-Identifier: Apache-2.0
"""In which order a rank leaves: what runs ends first, then the memory goes, then the owner is let go; what does not end keeps it all."""

from __future__ import annotations

import threading
import time

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.engines.vllm import leaving
from kvcached.engines.vllm.leaving import Exit
from kvcached.engines.vllm.occupancy import Occupancy
from kvcached.errors import PeerLost
from kvcached.ranks.api import Outcome, Report, Verdict
from kvcached.ranks.facts import MapperFacts
from kvcached.ranks.frames import hello_of_rank
from kvcached.ranks.group import RankGroup
from kvcached.ranks.messages import Hello
from kvcached.ranks.operations import Op, OpKind
from kvcached.ranks.server import RankServer
from kvcached.ranks.transactions import Query
from kvcached.testing.ranks import HELLO, FakeRank
from kvcached.units import MIB

PAGE = 2 * MIB
GEOMETRY = BlockGeometry(PAGE, PAGE, PAGE, 16, 1, 16)
WAIT_S = 60


def eventually(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


class Worker:
    """What an engine's worker has: steps, a stream, a rank that serves."""

    def __init__(self, path):
        self.rank = FakeRank(path, 0, GEOMETRY)
        self.rank.server._on_owner_lost = self.owner_lost
        self.occupancy = Occupancy()
        self.exit = Exit("rank 0 of engine", self.occupancy, self.rank.fence)
        self.left = []
        self.closed = []
        self.answered = threading.Event()

    def owner_lost(self):
        self.left.append(self.leave("the scheduler is gone"))
        self.answered.set()

    def leave(self, reason):
        return self.exit.work_has_ended(reason) and self.exit.give_back(self.rank.server, [self, self.rank.memory])

    def close(self):
        """The first of its parts: at this time nothing has gone yet."""
        self.closed.append((self.rank.book.closed, self.rank.server._path.exists()))


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr(leaving, "_STEP_END_S", 0.1)
    worker = Worker(tmp_path / "engine-0.sock")
    yield worker
    worker.rank.close()


@pytest.fixture
def group(tmp_path, worker):
    group = RankGroup([tmp_path / "engine-0.sock"], HELLO, 10)
    assert group.map([(1, 2)], urgent=True).result(WAIT_S).verdict is Verdict.DONE
    yield group
    group.close()


def test_the_owner_is_let_go_when_the_memory_is_given_back_and_not_before(tmp_path, worker, group):
    told = []
    group.when_lost(told.append)
    assert worker.rank.server.stop()
    eventually(lambda: told)
    assert "has stopped" in told[0]
    assert group.map([(5, 1)], urgent=True).result(WAIT_S).verdict is Verdict.BROKEN
    group.report(Report())
    ended = threading.Thread(target=group.close)
    ended.start()
    ended.join(0.1)
    assert ended.is_alive()
    assert (tmp_path / "engine-0.sock").exists()
    worker.rank.memory.close()
    assert worker.rank.server.close()
    ended.join(WAIT_S)
    assert group._links[0].gone
    assert not (tmp_path / "engine-0.sock").exists()
    assert len(told) == 1


def test_what_is_sent_to_a_rank_that_reads_no_more_is_no_loss(worker, group):
    """Its goodbye is on the way, and says why."""
    told = []
    group.when_lost(told.append)
    with group._turn():
        assert worker.rank.server.stop()
        group._transmit(group._links[0], Query(0))
        group._transmit(group._links[0], Query(0))
        assert group._lost == []
    eventually(lambda: told)
    assert "has stopped" in told[0]
    assert not group._links[0].gone


def test_an_owner_that_leaves_waits_until_the_memory_is_back(worker, group):
    with worker.rank.memory._held.lock:  # it cannot be closed yet
        ended = threading.Thread(target=group.close)
        ended.start()
        eventually(lambda: worker.rank.server._orphaned)
        ended.join(0.1)
        assert ended.is_alive()
    ended.join(WAIT_S)
    assert worker.rank.book.closed


def test_a_lost_owners_memory_goes_before_the_socket(worker, group):
    group._links[0]._socket.shutdown(2)
    assert worker.answered.wait(WAIT_S)
    assert worker.left == [True]
    assert worker.closed == [(False, True)]
    assert worker.rank.book.closed
    assert not worker.rank.server._path.exists()


def test_a_part_that_fails_to_close_does_not_keep_the_owner(worker, group):
    worker.closed = None  # its close raises
    with pytest.raises(AttributeError):
        worker.leave("the engine ends")
    eventually(lambda: group._links[0].gone)


def test_memory_is_kept_while_the_stream_has_not_passed_its_work(worker, group, caplog):
    """What was queued when the owner was lost still reads it."""
    worker.rank.gate.drain = lambda timeout_s: True  # the server has seen its end; then more was queued
    worker.rank.fence.open = False
    group._links[0]._socket.shutdown(2)
    assert worker.answered.wait(WAIT_S)
    assert worker.left == [False]
    assert "the work of rank 0 of engine has not ended" in caplog.text
    assert "the scheduler is gone" in caplog.text
    assert not worker.rank.book.closed
    assert worker.rank.mapped_pages() == {1, 2}
    with pytest.raises(PeerLost, match="scheduler is gone"), worker.occupancy:
        pass
    worker.rank.fence.let_go()
    assert worker.leave("the engine ends")
    assert worker.rank.book.closed


def test_memory_is_kept_under_a_step_that_runs(worker, group, caplog):
    with worker.occupancy:
        assert not worker.leave("the engine ends")
        assert "has not ended" in caplog.text
        assert worker.rank.mapped_pages() == {1, 2}
    assert worker.leave("the engine ends")


def test_memory_is_kept_under_a_call_of_the_owner_that_runs(worker, group, monkeypatch):
    with worker.rank.memory._held.lock, monkeypatch.context() as patched:
        patched.setattr("kvcached.ranks.server._STOP_TIMEOUT_S", 0.1)
        group.map([(5, 1)], urgent=True)
        eventually(lambda: worker.rank.server._participant._running)
        assert not worker.leave("the engine ends")
        assert worker.closed == []
    assert worker.leave("the engine ends")


class SlowGate:
    """A stream that never passes; remembers for how long it was waited for."""

    def __init__(self):
        self.timeouts_s = []
        self.waiting = threading.Event()
        self.let_go = threading.Event()

    def wait(self, step, timeout_s):
        self.timeouts_s.append(timeout_s)
        self.waiting.set()
        if timeout_s:
            self.let_go.wait(WAIT_S)
        return False

    def drain(self, timeout_s):
        return True

    def close(self):
        pass


class Memory:
    """Does whatever it is asked to."""

    def perform(self, action):
        return Outcome(Verdict.DONE)


def test_a_lost_owners_unmaps_wait_for_one_deadline_in_all(tmp_path):
    gate, lost = SlowGate(), threading.Event()
    hello = hello_of_rank(Hello("1", "engine", MapperFacts(GEOMETRY, 0, "FAKE", 16 * PAGE).to_text()), 0)
    server = RankServer(tmp_path / "engine-0.sock", Memory(), gate, hello, lost.set, fence_timeout_s=3.0)
    group = RankGroup([tmp_path / "engine-0.sock"], HELLO, 10)
    server.apply_step_ops(tuple(Op(number, OpKind.UNMAP, ((number, 1),), 7) for number in range(1, 9)))
    assert gate.waiting.wait(WAIT_S)
    group._links[0]._socket.shutdown(2)
    eventually(lambda: server._orphaned)
    gate.let_go.set()
    assert lost.wait(WAIT_S)
    assert gate.timeouts_s == [3.0] + [0.0] * 7
    assert server.close()
    group.close()
