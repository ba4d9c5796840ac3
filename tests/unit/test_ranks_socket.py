# SPDX-License-Identifier: Apache-2.0
"""Both ends of a rank's connection over a real socket: who is let in, what comes when, and how it ends."""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.errors import HandshakeMismatch, Misuse, PeerLost, PeerRefused, PeerTimeout, StateUnknown
from kvcached.ranks.actions import AcquireHandles, MapHeld, UnmapKeep
from kvcached.ranks.api import LimitsRequest, MapperStatus, Outcome, Report, Verdict
from kvcached.ranks.frames import FrameReader, hello_of_rank
from kvcached.ranks.group import RankGroup
from kvcached.ranks.link import Link
from kvcached.ranks.messages import Hello, StatusRequest, encode
from kvcached.ranks.operations import Op, OpKind
from kvcached.ranks.server import RankServer
from kvcached.ranks.transactions import Query
from kvcached.testing.ranks import HELLO, FakeRank
from kvcached.units import MIB

PAGE = 2 * MIB
GEOMETRY = BlockGeometry(PAGE, PAGE, PAGE, 16, 1, 16)
WAIT_S = 60
DONE = Outcome(Verdict.DONE)


def eventually(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


class Slow:
    """A rank's memory whose calls of some kinds wait until they are let go."""

    def __init__(self, *kinds):
        self.kinds = kinds
        self.let_go = threading.Event()
        self.begun = threading.Event()
        self.actions = []
        self.lock = threading.Lock()

    def perform(self, action):
        if isinstance(action, self.kinds):
            self.begun.set()
            assert self.let_go.wait(WAIT_S)
        with self.lock:
            self.actions.append(action)
        return DONE

    def set_limits(self, limits):
        return DONE

    def report(self, report):
        pass

    def status(self):
        return MapperStatus(1, 2, 3, 4, 5)


class OpenGate:
    def wait(self, step, timeout_s):
        return True

    def drain(self, timeout_s):
        return True

    def close(self):
        pass


@pytest.fixture
def rank(tmp_path):
    rank = FakeRank(tmp_path / "engine-0.sock", 0, GEOMETRY)
    yield rank
    rank.close()


@pytest.fixture
def serve(tmp_path):
    """Make a server over a memory double; returns it with a list that grows when its owner is lost."""
    servers = []

    def make(memory):
        lost = []
        facts = FakeFacts.text()
        server = RankServer(
            tmp_path / "engine-0.sock", memory, OpenGate(), hello_of_rank(replace(HELLO, facts=facts), 0), lambda: lost.append(1)
        )
        servers.append((server, memory))
        return server, lost

    yield make
    for server, memory in servers:
        memory.let_go.set()
        assert server.close()


class FakeFacts:
    @staticmethod
    def text():
        from kvcached.ranks.facts import MapperFacts

        return MapperFacts(GEOMETRY, 0, "FAKE", 16 * PAGE).to_text()


def connect(tmp_path, hello=HELLO, timeout_s=10):
    return RankGroup([tmp_path / "engine-0.sock"], hello, timeout_s)


# ---------------------------------------------------------------------- who is let in


@pytest.mark.parametrize(
    ("field", "name"), [("package_version", "package version"), ("instance", "instance"), ("engine", "engine"), ("seams", "seams")]
)
def test_a_difference_is_refused_by_its_name_and_the_right_owner_is_still_served(tmp_path, field, name):
    mine = Hello("1", "engine", "", "vllm 0.26", "abcd")
    rank = FakeRank(tmp_path / "engine-0.sock", 0, GEOMETRY, hello=mine)
    with pytest.raises(HandshakeMismatch, match=f"{name} differs"):
        connect(tmp_path, replace(mine, **{field: "other"}))
    group = connect(tmp_path, mine)
    assert group.status(WAIT_S).held_bytes == 0
    group.close()
    rank.close()


def test_the_socket_of_another_rank_is_refused(tmp_path, rank):
    other = FakeRank(tmp_path / "engine-1.sock", 0, GEOMETRY)
    with pytest.raises(HandshakeMismatch, match="instance differs: 'engine-1' here, 'engine-0' at the peer"):
        RankGroup([tmp_path / "engine-0.sock", tmp_path / "engine-1.sock"], HELLO, 10)
    other.close()


def test_a_peer_of_another_user_is_refused_by_either_end(tmp_path, rank, monkeypatch, caplog):
    monkeypatch.setattr("kvcached.ranks.frames.peer_of", lambda connection: (1234, 4321))
    with pytest.raises(PeerRefused, match="belongs to user 4321"):
        Link(0, tmp_path / "engine-0.sock", HELLO, time.monotonic() + 5)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "engine-0.sock"))
        connection.settimeout(WAIT_S)
        with pytest.raises(PeerLost):  # not even a greeting
            FrameReader(connection).receive()
    eventually(lambda: caplog.text.count("belongs to user 4321") == 2)
    assert not rank.owner_lost.is_set()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_real_process_of_another_user_cannot_even_connect(tmp_path, rank):
    script = "import os, socket, sys\nos.setuid(65534)\nsocket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
    ended = subprocess.run([sys.executable, "-c", script, tmp_path / "engine-0.sock"], capture_output=True, text=True, check=False)
    assert "PermissionError" in ended.stderr


def test_the_first_message_must_be_a_greeting(tmp_path, rank, caplog):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(tmp_path / "engine-0.sock"))
        connection.sendall(encode(StatusRequest(), 1))
        connection.settimeout(WAIT_S)
        with pytest.raises(PeerLost):
            FrameReader(connection).receive()
    assert "no greeting" in caplog.text


def test_two_mappers_of_one_name_are_refused_and_a_stale_socket_is_replaced(tmp_path, rank):
    with pytest.raises(PeerRefused, match="another live process"):
        RankServer(tmp_path / "engine-0.sock", rank.memory, rank.gate, HELLO, lambda: None)
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "stale.sock"))
    stale.close()
    assert RankServer(tmp_path / "stale.sock", rank.memory, OpenGate(), HELLO, lambda: None).close()


def test_nobody_there_is_a_timeout(tmp_path):
    with pytest.raises(PeerTimeout, match="no mapper answers"):
        connect(tmp_path, timeout_s=0.1)


def test_a_mapper_that_starts_later_is_found(tmp_path):
    ranks = []
    timer = threading.Timer(0.2, lambda: ranks.append(FakeRank(tmp_path / "engine-0.sock", 0, GEOMETRY)))
    timer.start()
    group = connect(tmp_path)
    assert group.status(WAIT_S).held_bytes == 0
    group.close()
    ranks[0].close()


# ---------------------------------------------------------------------- what comes when


def test_a_map_does_not_wait_behind_an_unmap_that_waits_for_its_fence(tmp_path, rank):
    group = connect(tmp_path)
    assert group.map([(1, 1)], urgent=True).result(WAIT_S) == DONE
    rank.fence.open = False
    unmap = group.unmap([(1, 1)], 0)
    assert group.map([(2, 1)], urgent=True).result(WAIT_S) == DONE
    assert not unmap.done()
    rank.fence.let_go()
    assert unmap.result(WAIT_S) == Outcome(Verdict.DONE, size_bytes=PAGE)
    group.close()


def test_the_step_waits_for_maps_that_another_thread_is_making(tmp_path, serve):
    memory = Slow(MapHeld)
    server, _ = serve(memory)
    group = connect(tmp_path)
    group.begin_steps()
    assert group.map([(1, 1)], urgent=False).result(WAIT_S) == DONE  # brought to the rank at once
    assert memory.begun.wait(WAIT_S)
    stepped = threading.Event()
    step = threading.Thread(target=lambda: (server.apply_step_ops(group.step_ops()), stepped.set()))
    step.start()
    assert not stepped.wait(0.1)
    memory.let_go.set()
    step.join(WAIT_S)
    assert stepped.is_set()
    assert [type(action) for action in memory.actions] == [AcquireHandles, MapHeld]
    group.close()


def test_the_maps_of_a_step_overtake_an_acquisition(tmp_path, serve):
    memory = Slow(AcquireHandles)
    memory.let_go.set()
    server, _ = serve(memory)
    group = connect(tmp_path)
    group.begin_steps()
    assert group.map([(1, 1)], urgent=True).result(WAIT_S) == DONE
    memory.let_go.clear()
    memory.begun.clear()
    slow = group.map([(2, 1)], urgent=True)
    assert memory.begun.wait(WAIT_S)
    server.apply_step_ops((Op(1, OpKind.MAP, ((1, 1),)),))
    assert memory.actions[-1] == MapHeld(((1, 1),))
    assert not slow.done()
    memory.let_go.set()
    assert slow.result(WAIT_S) == DONE
    group.close()


def test_the_same_operations_by_step_and_by_message_are_performed_once(tmp_path, serve):
    memory = Slow()
    server, _ = serve(memory)
    group = connect(tmp_path)
    group.begin_steps()
    group.map([(1, 1)], urgent=True).result(WAIT_S)
    for _ in range(3):
        server.apply_step_ops(group.step_ops())
        with group._lock:
            group._links[0].send(Query(0, (Op(1, OpKind.MAP, ((1, 1),)),)))
    group.status(WAIT_S)
    assert memory.actions.count(MapHeld(((1, 1),))) == 1
    group.close()


def test_an_operation_that_never_came_stops_the_step(tmp_path, rank):
    with pytest.raises(StateUnknown, match="operation 1 never came"):
        rank.server.apply_step_ops((Op(2, OpKind.MAP, ((1, 1),)),))


def test_a_step_of_an_owner_that_is_gone_does_not_run(tmp_path, rank):
    group = connect(tmp_path)
    group.close()
    assert rank.owner_lost.wait(WAIT_S)
    rank.server.apply_step_ops(())
    with pytest.raises(StateUnknown, match="is gone"):
        rank.server.apply_step_ops((Op(1, OpKind.MAP, ((1, 1),)),))


def test_a_second_owner_is_told_that_there_is_a_first(tmp_path, rank):
    group = connect(tmp_path)
    with pytest.raises(PeerTimeout, match="another owner"):
        connect(tmp_path, timeout_s=0.1)
    assert group.map([(1, 1)], urgent=True).result(WAIT_S) == DONE
    group.close()


# ---------------------------------------------------------------------- how it ends


def test_a_lost_owner_is_told_once_and_all_memory_goes(tmp_path, rank, caplog):
    group = connect(tmp_path)
    assert group.map([(1, 2)], urgent=True).result(WAIT_S) == DONE
    group._links[0]._socket.shutdown(2)  # as when its process dies
    assert rank.owner_lost.wait(WAIT_S)
    assert rank.book.closed
    assert "is lost" in caplog.text
    group.close()


def test_a_lost_owner_is_waited_out_while_work_is_in_flight(tmp_path, rank):
    group = connect(tmp_path)
    assert group.map([(1, 2)], urgent=True).result(WAIT_S) == DONE
    rank.fence.open = False
    group._links[0]._socket.shutdown(2)
    assert not rank.owner_lost.wait(0.1)
    assert rank.mapped_pages() == {1, 2}
    rank.fence.let_go()
    assert rank.owner_lost.wait(WAIT_S)
    group.close()


def test_what_was_begun_ends_before_a_lost_owner_is_told(tmp_path, serve):
    memory = Slow(UnmapKeep)
    server, lost = serve(memory)
    group = connect(tmp_path)
    group.begin_steps()
    assert group.map([(1, 1)], urgent=True).result(WAIT_S) == DONE
    server.apply_step_ops(group.step_ops())
    group._last_step_s = math.inf  # the next step is always near, however busy the machine
    group.unmap([(1, 1)], 0)
    assert memory.begun.wait(WAIT_S)
    group._links[0]._socket.shutdown(2)
    eventually(lambda: server._orphaned)
    time.sleep(0.05)
    assert lost == []
    memory.let_go.set()
    eventually(lambda: lost == [1])
    group.close()


def test_stopping_the_server_is_no_lost_owner_and_no_error(tmp_path, rank, caplog):
    group = connect(tmp_path)
    told = []
    group.when_lost(told.append)
    assert rank.server.close()
    assert rank.server.close()
    eventually(lambda: told)
    assert "has stopped" in told[0]
    assert not rank.owner_lost.is_set()
    assert not (tmp_path / "engine-0.sock").exists()
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []
    group.close()


def test_a_name_in_use_is_refused_by_that_name_however_often_it_is_tried(tmp_path, rank, serve):
    group = connect(tmp_path)
    for _ in range(4):
        with pytest.raises(PeerRefused, match="two instances with the same name"):
            serve(Slow(UnmapKeep))
    with pytest.raises(PeerTimeout):
        connect(tmp_path, timeout_s=0.2)
    group.close()


def test_a_server_that_nobody_greeted_stops(rank, tmp_path):
    assert rank.server.close()
    assert not (tmp_path / "engine-0.sock").exists()


@pytest.mark.parametrize("kind", [AcquireHandles, UnmapKeep])
def test_a_running_driver_call_is_not_torn_down_but_reported(tmp_path, serve, kind, monkeypatch, caplog):
    monkeypatch.setattr("kvcached.ranks.server._STOP_TIMEOUT_S", 0.1)
    memory = Slow(kind)
    server, lost = serve(memory)
    group = connect(tmp_path)
    group.begin_steps()
    mapped = group.map([(1, 1)], urgent=True)
    if kind is UnmapKeep:
        assert mapped.result(WAIT_S) == DONE
        server.apply_step_ops(group.step_ops())
        group._last_step_s = math.inf
        group.unmap([(1, 1)], 0)
    assert memory.begun.wait(WAIT_S)
    assert not server.close()
    assert (tmp_path / "engine-0.sock").exists()
    assert "has not ended" in caplog.text
    with pytest.raises(PeerTimeout):
        connect(tmp_path, timeout_s=0.05)
    monkeypatch.undo()
    memory.let_go.set()
    assert server.close()
    assert not (tmp_path / "engine-0.sock").exists()
    assert lost == []
    group.close()


def test_after_close_every_call_ends(tmp_path, rank):
    group = connect(tmp_path)
    group.close()
    for future in (group.map([(1, 1)], urgent=True), group.unmap([(1, 1)], 0), group.set_limits(LimitsRequest(1, 0, 1.0, 1))):
        assert future.result(WAIT_S).verdict in (Verdict.BROKEN, Verdict.BUSY)
    assert group.trim().result(WAIT_S).verdict is Verdict.DONE
    group.report(Report())
    with pytest.raises(PeerLost):
        group.status(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mapper_with_a_bug_is_a_lost_rank(tmp_path, serve):
    memory = Slow(UnmapKeep)
    server, _ = serve(memory)
    group = connect(tmp_path)
    group.begin_steps()
    assert group.map([(1, 1)], urgent=True).result(WAIT_S) == DONE
    server.apply_step_ops(group.step_ops())
    group._last_step_s = math.inf
    memory.begun.set = None  # the slow lane trips over it
    assert group.unmap([(1, 1)], 0).result(WAIT_S).verdict is Verdict.BROKEN
    group.close()


def test_a_forked_child_keeps_no_connection_open(tmp_path, rank):
    link = Link(0, tmp_path / "engine-0.sock", HELLO, time.monotonic() + 10)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)  # outlives the parent's end of the connection
        os._exit(0)
    link._socket.close()
    lost = rank.owner_lost.wait(WAIT_S)
    os.write(write, b"x")
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)
    assert lost


def test_a_forked_child_is_refused_whatever_lock_another_thread_held(tmp_path, rank):
    group = connect(tmp_path)
    with group._lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            os._exit(sum(_is_refused(call) for call in (lambda: group.map([(1, 1)], urgent=True), group.step_ops, group.close)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert group.map([(1, 1)], urgent=True).result(WAIT_S) == DONE
    group.close()


def _is_refused(call):
    try:
        call()
    except Misuse:
        return True
    return False


def test_a_message_that_an_owner_may_not_send_ends_the_connection(tmp_path, rank, caplog):
    group = connect(tmp_path)
    with group._lock:
        group._links[0].send(DONE)
    assert rank.owner_lost.wait(WAIT_S)
    assert "sent Outcome" in caplog.text
    group.close()
