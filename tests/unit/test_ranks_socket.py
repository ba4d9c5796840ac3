# SPDX-License-Identifier: Apache-2.0
"""Owner and mapper over a real socket in one process: every future ends, whatever happens to the peer."""

import queue
import threading
from concurrent.futures import Future

import pytest

from kvcached.errors import HandshakeMismatch, PeerLost, PeerRefused, PeerTimeout
from kvcached.ranks.api import LimitsRequest, MapperStatus, Outcome, Report, Verdict, finished
from kvcached.ranks.client import RemoteMapper
from kvcached.ranks.messages import Hello
from kvcached.ranks.server import MapperServer

HELLO = Hello("1", "engine", "facts")


class Recorder:
    """A mapper double that answers at once, except unmaps, which wait until they are let go."""

    def __init__(self):
        self.calls = []
        self.let_go = threading.Event()

    def map(self, runs, *, urgent):
        self.calls.append(("map", tuple(runs), urgent))
        return finished(Outcome(Verdict.DONE))

    def unmap(self, runs, after_step):
        assert self.let_go.wait(20)
        self.calls.append(("unmap", tuple(runs)))
        return finished(Outcome(Verdict.DONE, size_bytes=7))

    def trim(self):
        raise_in_future = Future()
        raise_in_future.set_exception(RuntimeError("driver went mad"))
        return raise_in_future

    def set_limits(self, limits):
        self.calls.append(("limits", limits))
        return finished(Outcome(Verdict.REFUSED, reason="the floor does not fit"))

    def when_lost(self, tell):
        pass

    def report(self, report):
        self.calls.append(("report", report))

    def status(self, timeout_s):
        return MapperStatus(1, 2, 3, 4, 5)

    def close(self):
        pass


@pytest.fixture
def mapper():
    return Recorder()


@pytest.fixture
def lost():
    return threading.Event()


@pytest.fixture
def server(tmp_path, mapper, lost):
    server = MapperServer(tmp_path / "m.sock", mapper, HELLO, lost.set)
    yield server
    mapper.let_go.set()
    server.close()


@pytest.fixture
def client(tmp_path, server):
    client = RemoteMapper(tmp_path / "m.sock", Hello("1", "engine", ""), timeout_s=5)
    yield client
    client.close()


def test_calls_arrive_and_are_answered(client, mapper):
    assert client.hello == HELLO
    assert client.map([(3, 1), (5, 2)], urgent=True).result(5) == Outcome(Verdict.DONE)
    assert client.status(5) == MapperStatus(1, 2, 3, 4, 5)
    report = Report(1, 2, 3, 4)
    client.report(report)
    client.status(5)  # answered after the report, since both are in one lane
    assert mapper.calls == [("map", ((3, 1), (5, 2)), True), ("report", report)]


def test_a_map_does_not_wait_behind_an_unmap_that_waits_for_its_fence(client, mapper):
    unmap = client.unmap([(1, 1)], 0)
    assert client.map([(2, 1)], urgent=False).result(5).verdict is Verdict.DONE
    assert not unmap.done()
    mapper.let_go.set()
    assert unmap.result(5) == Outcome(Verdict.DONE, size_bytes=7)


def test_an_exception_in_the_mapper_is_a_broken_outcome(client, mapper):
    outcome = client.trim().result(5)
    assert outcome.verdict is Verdict.BROKEN
    assert "driver went mad" in outcome.reason


def test_a_mapper_that_raises_is_answered_for(client, mapper):
    mapper.let_go.set()
    mapper.unmap = lambda runs, after_step: 1 / 0
    outcome = client.unmap([(1, 1)], 0).result(5)
    assert outcome.verdict is Verdict.BROKEN
    assert "ZeroDivisionError" in outcome.reason


def test_a_batch_that_is_too_long_to_send_fails_at_once_and_alone(client):
    with pytest.raises(PeerRefused, match="fewer runs"):
        client.map([(page, 1) for page in range(300_000)], urgent=True).result(5)
    assert client.map([(1, 1)], urgent=True).result(5).verdict is Verdict.DONE


def test_a_lost_mapper_ends_every_waiting_future_and_every_later_call(client, server):
    waiting = client.unmap([(1, 1)], 0)
    server._connection.shutdown(2)
    with pytest.raises(PeerLost):
        waiting.result(5)
    with pytest.raises(PeerLost):
        client.map([(1, 1)], urgent=True).result(5)


def test_a_loss_is_told_at_once_and_to_whoever_asks_later(client, server):
    told = queue.Queue()
    client.when_lost(told.put)
    server._connection.shutdown(2)
    assert "is gone" in told.get(timeout=5)
    client.when_lost(told.put)
    assert "is gone" in told.get(timeout=5)


def test_refused_limits_are_an_answer_and_the_connection_stays(client, server, lost):
    outcome = client.set_limits(LimitsRequest(1, 2, 3.0, 4)).result(5)
    assert (outcome.verdict, outcome.reason) == (Verdict.REFUSED, "the floor does not fit")
    assert client.status(5).held_bytes == 5
    assert not lost.is_set()


def test_reports_to_a_mapper_that_does_not_answer_never_block(client, mapper):
    mapper.hold = threading.Event()
    answer = mapper.report
    mapper.report = lambda report: mapper.hold.wait(20) and answer(report)
    for _ in range(20_000):
        client.report(Report())
    mapper.hold.set()
    assert client.status(20).held_bytes == 5
    assert len(mapper.calls) <= 2


def test_a_lost_owner_is_noticed_once(client, server, lost):
    client.close()
    assert lost.wait(5)


def test_closing_the_server_is_no_lost_owner(client, server, lost, tmp_path):
    server.close()
    assert not lost.is_set()
    assert not (tmp_path / "m.sock").exists()


def test_nobody_there_is_a_timeout(tmp_path):
    with pytest.raises(PeerTimeout, match="no mapper answers"):
        RemoteMapper(tmp_path / "nobody.sock", HELLO, timeout_s=0.1)


def test_a_mapper_that_starts_later_is_found(tmp_path, mapper, lost):
    started = []
    timer = threading.Timer(0.3, lambda: started.append(MapperServer(tmp_path / "late.sock", mapper, HELLO, lost.set)))
    timer.start()
    client = RemoteMapper(tmp_path / "late.sock", HELLO, timeout_s=10)
    assert client.status(5).held_bytes == 5
    client.close()
    started[0].close()


def test_another_instance_is_refused_by_name(tmp_path, server):
    with pytest.raises(HandshakeMismatch, match="instance differs"):
        RemoteMapper(tmp_path / "m.sock", Hello("1", "someone else", ""), timeout_s=5)


def test_two_mappers_of_one_name_are_refused_and_a_stale_socket_is_replaced(tmp_path, server, mapper, lost):
    with pytest.raises(PeerRefused, match="another live process"):
        MapperServer(tmp_path / "m.sock", mapper, HELLO, lost.set)
    import socket

    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "stale.sock"))
    stale.close()
    MapperServer(tmp_path / "stale.sock", mapper, HELLO, lost.set).close()
