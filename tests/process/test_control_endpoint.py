# SPDX-License-Identifier: Apache-2.0
"""The control endpoint between real processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from control_pool import CAPACITY_BYTES, Served, SlowPool, SmallPool

import kvcached.runtime.endpoint
from kvcached.errors import HandshakeMismatch, Misuse, PeerLost, PeerRefused, PeerTimeout, SettingError
from kvcached.log_lines import JsonLine
from kvcached.runtime.control import ControlClient, ControlServer, PoolStatus, endpoint_path, prepare_run_dir
from kvcached.runtime.control_messages import MAX_MESSAGE_BYTES
from kvcached.testing.stopping import stop_process
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Served]]:
    """Start a server process for instance `a` in `tmp_path`; all are ended afterwards."""
    started: list[Served] = []

    def launch() -> Served:
        served = Served(tmp_path, "a")
        started.append(served)
        served.wait_ready()
        return served

    yield launch
    for served in started:
        served.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return endpoint_path(tmp_path, "a")


def raw_exchange(path: Path, payload: bytes, *, length: int | None = None) -> dict[str, object]:
    """Send a frame as it is and read one answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(struct.pack(">I", len(payload) if length is None else length) + payload)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> dict[str, object]:
    stream = connection.makefile("rb")
    (size,) = struct.unpack(">I", stream.read(4))
    answer = json.loads(stream.read(size))
    assert isinstance(answer, dict)
    return answer


def failure(answer: dict[str, object]) -> tuple[str, str]:
    error = answer["error"]
    assert isinstance(error, dict)
    return error["type"], error["message"]


class TestOperations:
    def test_every_operation_reaches_the_pool_and_its_answer_comes_back(self, start: Callable[[], Served], path: Path) -> None:
        start()
        client = ControlClient(path, 10)
        pong = client.ping()
        assert (pong.protocol, pong.instance) == (1, "a")
        assert pong.pid != os.getpid()
        status = client.status()
        assert (status.owned_bytes, status.cached_bytes, status.parked_bytes) == (4 * MIB, 6 * MIB, 8 * MIB)
        assert client.trim(3 * MIB).given_bytes == 3 * MIB
        assert client.evict(2 * MIB).given_bytes == 2 * MIB
        assert client.pressure(MIB).given_bytes == MIB
        assert client.trim().given_bytes == 4 * MIB
        assert [row.size_bytes for row in client.explain().rows] == [4 * MIB, 4 * MIB, 0]
        assert client.metrics().misses == 3
        assert client.weight(2.5).weight == 2.5
        assert client.floor(MIB).in_force_bytes == MIB
        assert (client.status().weight, client.status().floor_bytes) == (2.5, MIB)

    def test_a_limit_is_applied_deferred_clamped_or_stale(self, start: Callable[[], Served], path: Path) -> None:
        start()
        client = ControlClient(path, 10)
        applied = client.limit(10 * MIB, revision=5)
        assert (applied.outcome, applied.in_force_bytes, applied.overage_bytes, applied.revision) == ("applied", 10 * MIB, 0, 5)
        assert client.status().mapped_bytes == 10 * MIB
        deferred = client.limit(MIB)
        assert (deferred.outcome, deferred.overage_bytes, deferred.revision) == ("deferred", 3 * MIB, 6)
        stale = client.limit(2 * MIB, revision=5)
        assert (stale.outcome, stale.in_force_bytes) == ("stale", MIB)
        clamped = client.limit(2 * CAPACITY_BYTES)
        assert (clamped.outcome, clamped.asked_bytes, clamped.in_force_bytes) == ("clamped", 2 * CAPACITY_BYTES, CAPACITY_BYTES)

    def test_an_error_of_the_pool_reaches_the_client_by_name(self, start: Callable[[], Served], path: Path) -> None:
        start()
        client = ControlClient(path, 10)
        with pytest.raises(PeerRefused, match=r"^Misuse: a floor of .* is above the capacity"):
            client.floor(CAPACITY_BYTES + 1)
        client.trim()
        with pytest.raises(PeerRefused, match=r"^PoolExhausted: .*nothing is parked"):
            client.pressure(MIB)
        assert client.ping().instance == "a"

    @pytest.mark.parametrize(("weight", "named"), [(13.0, "StateUnknown: the state of page 13"), (14.0, "ZeroDivisionError: a bug")])
    def test_a_bug_of_the_pool_is_told_and_the_endpoint_lives_on(
        self, start: Callable[[], Served], path: Path, weight: float, named: str
    ) -> None:
        start()
        with pytest.raises(PeerRefused, match=named):
            ControlClient(path, 10).weight(weight)
        assert ControlClient(path, 10).status().weight == 1.0

    def test_fifty_clients_at_once_are_all_answered_and_give_each_byte_once(self, start: Callable[[], Served], path: Path) -> None:
        start()

        def trim_and_look(_: int) -> int:
            client = ControlClient(path, 30)
            given_bytes = client.trim(MIB).given_bytes
            assert client.status().instance == "a"
            return given_bytes

        with ThreadPoolExecutor(50) as executor:
            given = list(executor.map(trim_and_look, range(50)))
        assert sorted(given, reverse=True) == [MIB] * 8 + [0] * 42


class TestNonsense:
    def test_an_oversize_message_is_refused_unread(self, start: Callable[[], Served], path: Path) -> None:
        start()
        assert failure(raw_exchange(path, b"", length=MAX_MESSAGE_BYTES + 1)) == (
            "HandshakeMismatch",
            f"a message of {MAX_MESSAGE_BYTES + 1} bytes is longer than {MAX_MESSAGE_BYTES}",
        )

    @pytest.mark.parametrize(
        "payload",
        [
            b"",
            b"\xff\xfe\x00garbage",
            b"[" * 60_000,
            b"{}",
            b'{"v": 1}',
            b'{"v": 1, "request": {"op": "format_disk"}}',
            b'{"v": 1, "request": {"op": "limit"}}',
            b'{"v": 1, "request": {"op": "limit", "limit_bytes": -1}}',
            b'{"v": 1, "request": {"op": "limit", "limit_bytes": true}}',
            b'{"v": 1, "request": {"op": "limit", "limit_bytes": "3"}}',
            b'{"v": 1, "request": {"op": "limit", "limit_bytes": 9223372036854775808}}',
            b'{"v": 1, "request": {"op": "weight", "weight": NaN}}',
            b'{"v": 1, "request": {"op": "weight", "weight": 0}}',
            b'{"v": 1, "request": {"op": "trim", "all": true}}',
            b'{"v": 1, "request": {"op": "ping"}, "more": 1}',
        ],
    )
    def test_what_is_no_request_is_refused_and_changes_nothing(self, path: Path, payload: bytes) -> None:
        pool = SmallPool("a")
        before = pool.status()
        with ControlServer(path, pool):
            kind, message = failure(raw_exchange(path, payload))
            assert (kind, message[:14]) == ("Misuse", "not a request:")
            assert ControlClient(path, 10).status() == before

    def test_another_protocol_version_is_named(self, start: Callable[[], Served], path: Path) -> None:
        start()
        assert failure(raw_exchange(path, b'{"v": 2, "request": {"op": "unheard of"}}')) == (
            "HandshakeMismatch",
            "this endpoint speaks protocol 1, the request is of protocol 2",
        )

    def test_a_slow_client_gets_a_timeout_and_does_not_hold_up_others(self, tmp_path: Path, path: Path) -> None:
        with (
            ControlServer(path, SmallPool("a"), io_timeout_s=1.0, max_connections=2),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow,
        ):
            slow.connect(str(path))
            with contextlib.suppress(BrokenPipeError):  # on a busy machine it has its answer already
                slow.sendall(b"\x00\x00")
            assert ControlClient(path, 10).ping().instance == "a"
            assert failure(read_answer(slow)) == ("PeerTimeout", "no complete message within the deadline")

    def test_slow_clients_in_every_place_delay_others_by_the_deadline_only(self, path: Path) -> None:
        with ControlServer(path, SmallPool("a"), io_timeout_s=0.2, max_connections=2):
            slow = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(6)]
            for connection in slow:
                connection.connect(str(path))
            assert ControlClient(path, 20).ping().instance == "a"
            for connection in slow:
                connection.close()

    def test_a_client_that_leaves_at_once_leaves_no_thread_behind(self, path: Path) -> None:
        before = set(threading.enumerate())
        with ControlServer(path, SmallPool("a"), max_connections=2):
            for _ in range(20):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.connect(str(path))
            assert ControlClient(path, 10).ping().instance == "a"
        assert set(threading.enumerate()) <= before


class TestClient:
    def serve_once(self, path: Path, reply: bytes) -> threading.Thread:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(1)

        def answer() -> None:
            with listener, listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        return thread

    @pytest.mark.parametrize(
        ("reply", "error", "message"),
        [
            (b"", PeerLost, "closed the connection"),
            (struct.pack(">I", 100) + b"{", PeerLost, "before its message was complete"),
            (struct.pack(">I", 1 << 30), HandshakeMismatch, "longer than"),
            (struct.pack(">I", 3) + b"???", HandshakeMismatch, "not understood"),
            (struct.pack(">I", 19) + b'{"v":2,"answer":{}}', HandshakeMismatch, "protocol 2"),
            (struct.pack(">I", 19) + b'{"v":1,"answer":{}}', HandshakeMismatch, "instance"),
            (struct.pack(">I", 7) + b'{"v":1}', HandshakeMismatch, "not understood"),
        ],
    )
    def test_a_bad_answer_is_an_error_with_a_name(self, tmp_path: Path, reply: bytes, error: type[Exception], message: str) -> None:
        path = tmp_path / "s"
        thread = self.serve_once(path, reply)
        with pytest.raises(error, match=message):
            ControlClient(path, 10).status()
        thread.join()

    def test_nobody_there(self, path: Path) -> None:
        with pytest.raises(PeerLost, match="nobody answers at"):
            ControlClient(path, 1).ping()

    def test_a_stopped_process_is_a_timeout_not_a_hang(self, start: Callable[[], Served], path: Path) -> None:
        process = start()
        stop_process(process.pid)
        with pytest.raises(PeerTimeout):
            ControlClient(path, 0.3).status()
        process.signal(signal.SIGCONT)
        assert ControlClient(path, 10).status().instance == "a"

    def test_a_full_queue_is_a_timeout_not_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
            listener.bind(str(path))
            listener.listen(0)
            first.connect(str(path))
            with pytest.raises(PeerTimeout, match="accepts no connection"):
                ControlClient(path, 0.2).ping()


class TestLife:
    def test_a_killed_server_is_replaced_on_the_same_path(self, start: Callable[[], Served], path: Path) -> None:
        first = start()
        first.kill()
        assert path.exists()
        with pytest.raises(PeerLost):
            ControlClient(path, 1).ping()
        second = start()
        assert ControlClient(path, 10).ping().pid == second.pid

    def test_a_live_server_is_not_replaced(self, start: Callable[[], Served], path: Path) -> None:
        first = start()
        with pytest.raises(SettingError, match="another KVCACHED_IPC_NAME"):
            ControlServer(path, SmallPool("a")).start()
        stop_process(first.pid)
        with pytest.raises(SettingError, match="another KVCACHED_IPC_NAME"):
            ControlServer(path, SmallPool("a")).start()
        first.signal(signal.SIGCONT)
        assert ControlClient(path, 10).ping().pid == first.pid

    def test_of_many_that_start_at_once_after_a_crash_one_wins(
        self, start: Callable[[], Served], path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kvcached.runtime.endpoint, "_LOCK_TIMEOUT_S", 60.0)
        first = start()
        first.kill()
        barrier = threading.Barrier(8)
        servers = [ControlServer(path, SmallPool("a")) for _ in range(8)]

        def begin(server: ControlServer) -> bool:
            barrier.wait()
            try:
                server.start()
            except SettingError:
                return False
            return True

        with ThreadPoolExecutor(8) as executor:
            assert sorted(executor.map(begin, servers)) == [False] * 7 + [True]
        assert ControlClient(path, 10).ping().pid == os.getpid()
        for server in servers:
            server.stop()
        assert not path.exists()

    def test_a_file_that_is_no_socket_is_left_alone(self, tmp_path: Path, path: Path) -> None:
        prepare_run_dir(tmp_path)
        path.write_text("precious")
        with pytest.raises(SettingError):
            ControlServer(path, SmallPool("a")).start()
        assert path.read_text() == "precious"

    def test_stop_refuses_new_requests_finishes_running_ones_and_unlinks_last(self, path: Path) -> None:
        pool = SlowPool("a")
        server = ControlServer(path, pool)
        server.start()
        with ThreadPoolExecutor(2) as executor:
            running = executor.submit(ControlClient(path, 20).status)
            assert pool.entered.wait(10)
            assert server.stop(timeout_s=0.1) is False
            with pytest.raises(PeerLost):
                ControlClient(path, 1).ping()
            pool.release.set()
            assert isinstance(running.result(20), PoolStatus)
        assert server.stop()
        assert not path.exists()

    def test_stop_waits_for_a_running_request(self, path: Path) -> None:
        pool = SlowPool("a")
        server = ControlServer(path, pool)
        server.start()
        with ThreadPoolExecutor(2) as executor:
            running = executor.submit(ControlClient(path, 20).status)
            assert pool.entered.wait(10)
            stopped = executor.submit(server.stop, 20)
            assert not running.done()
            assert path.exists()
            pool.release.set()
            assert stopped.result(20) is True
            assert running.result(20).instance == "a"
        assert not path.exists()

    def test_stop_wakes_an_endpoint_whose_places_are_all_taken(self, path: Path) -> None:
        before = set(threading.enumerate())
        server = ControlServer(path, SmallPool("a"), io_timeout_s=0.2, max_connections=1)
        server.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
            slow.connect(str(path))
            waiting.connect(str(path))
            assert server.stop() is True
        assert set(threading.enumerate()) <= before

    def test_stop_ends_the_accepting_thread_while_a_request_still_has_the_only_place(self, path: Path) -> None:
        pool = SlowPool("a")
        server = ControlServer(path, pool, max_connections=1)
        server.start()
        with ThreadPoolExecutor(1) as executor:
            running = executor.submit(ControlClient(path, 20).status)
            assert pool.entered.wait(10)
            assert server.stop(timeout_s=0.1) is False
            accepting = [thread for thread in threading.enumerate() if thread.name == "kvcached-control"]
            for thread in accepting:
                thread.join(60)
            still_there = [thread for thread in accepting if thread.is_alive()]
            pool.release.set()
            assert running.result(20).instance == "a"
        assert still_there == []

    def test_stop_leaves_a_successors_socket_alone(self, tmp_path: Path, path: Path) -> None:
        first = ControlServer(path, SmallPool("a"))
        first.start()
        path.unlink()
        with ControlServer(path, SmallPool("a")):
            first.stop()
            assert ControlClient(path, 10).ping().instance == "a"

    def test_a_second_start_is_misuse_and_a_second_stop_does_nothing(self, path: Path) -> None:
        server = ControlServer(path, SmallPool("a"))
        server.start()
        with pytest.raises(Misuse):
            server.start()
        assert server.stop()
        assert server.stop()
        with pytest.raises(Misuse):
            server.start()

    def test_a_deleted_socket_or_run_directory_is_made_again(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        path = endpoint_path(run_dir, "a")
        with ControlServer(path, SmallPool("a")) as server:
            assert server.ensure_bound() is False
            shutil.rmtree(run_dir)
            assert server.ensure_bound() is True
            assert ControlClient(path, 10).ping().instance == "a"
            assert server.ensure_bound() is False
        assert server.ensure_bound() is False
        assert not path.exists()

    def test_a_forked_child_does_not_keep_a_dead_endpoint_alive(self, tmp_path: Path, path: Path) -> None:
        script = (
            "import os, sys, time; from pathlib import Path; from control_pool import SmallPool\n"
            "from kvcached.runtime.control import ControlServer, endpoint_path\n"
            f"ControlServer(endpoint_path(Path({str(tmp_path)!r}), 'a'), SmallPool('a')).start()\n"
            "child = os.fork()\n"
            "if child == 0: time.sleep(60)\n"
            "print(child, flush=True); time.sleep(60)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])},
        )
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert ControlClient(path, 10).ping().pid == process.pid
            process.kill()
            process.wait()
            with ControlServer(path, SmallPool("a")):
                assert ControlClient(path, 10).ping().pid == os.getpid()
        finally:
            os.kill(child, signal.SIGKILL)
            process.stdout.close()

    def test_a_held_directory_lock_is_a_timeout(self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        prepare_run_dir(tmp_path)
        monkeypatch.setattr(kvcached.runtime.endpoint, "_LOCK_TIMEOUT_S", 0.1)
        held = os.open(path.parent, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PeerTimeout, match="holds the lock"):
            ControlServer(path, SmallPool("a")).start()
        os.close(held)
        with ControlServer(path, SmallPool("a")):
            assert ControlClient(path, 10).ping().instance == "a"

    def test_a_change_is_one_line_in_the_log_and_a_look_is_none(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "kvcached.control")
        with ControlServer(path, SmallPool("a")):
            ControlClient(path, 10).status()
            ControlClient(path, 10).metrics()
            ControlClient(path, 10).limit(12 * MIB)
        assert len(caplog.messages) == 1
        facts = json.loads(JsonLine().format(caplog.records[0]))
        assert (facts["event"], facts["pool"], facts["request"]["limit_bytes"]) == ("control", "a", 12 * MIB)
        assert facts["answer"]["outcome"] == "applied"
        assert "limit_bytes=12582912" in caplog.messages[0]
        assert f"pid {os.getpid()} uid {os.getuid()}" in caplog.messages[0]


class TestWhoMay:
    def test_the_socket_and_its_directories_are_private(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        umask = os.umask(0)
        try:
            with ControlServer(endpoint_path(run_dir, "a"), SmallPool("a")) as server:
                modes = [stat.S_IMODE(found.stat().st_mode) for found in (run_dir, run_dir / "pools", server.path)]
        finally:
            os.umask(umask)
        assert modes == [0o700, 0o700, 0o600]

    def test_a_directory_that_everybody_may_write_to_is_refused(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        run_dir.chmod(0o777)
        with pytest.raises(SettingError, match="no private directory"):
            prepare_run_dir(run_dir)

    @pytest.mark.skipif(os.getuid() != 0, reason="only root may give a directory away")
    def test_a_directory_of_somebody_else_is_refused_unless_its_group_is_ours(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "run"
        run_dir.mkdir(mode=0o700)
        os.chown(run_dir, 4242, 4243)
        with pytest.raises(SettingError, match="belongs to user 4242"):
            prepare_run_dir(run_dir)
        prepare_run_dir(run_dir, group=4243)

    @pytest.fixture
    def open_directory(self) -> Iterator[Path]:
        """Outside pytest's own directory, which every other pytest run that starts closes to other users again."""
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            Path(directory).chmod(0o755)
            yield Path(directory)

    @pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
    def test_other_users_are_refused_and_members_of_the_group_are_not(self, open_directory: Path) -> None:
        run_dir = open_directory / "run"
        path = endpoint_path(run_dir, "a")
        with ControlServer(path, SmallPool("a"), group=4243):
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert stat.S_IMODE(run_dir.stat().st_mode) == 0o2770
            assert "PeerRefused" in self.ping_as(path, 4242, 4242)
            for directory in (run_dir, path.parent):
                directory.chmod(0o755)
            path.chmod(0o666)  # the file's mode is one barrier, the kernel's word on the peer another
            assert "PeerRefused" in self.ping_as(path, 4242, 4242)
            assert "may not control" in self.ping_as(path, 4242, 4242)
            assert self.ping_as(path, 4242, 4243) == "instance a"
            assert self.ping_as(path, 4242, 4242, 77, 4243) == "instance a"

    def ping_as(self, path: Path, user: int, group: int, *more: int) -> str:
        """What a process of that user, group and further groups gets. The parts are loaded before the change of user."""
        script = (
            "import os, sys; from pathlib import Path; from kvcached.errors import PeerError\n"
            "from kvcached.runtime.control import ControlClient\n"
            f"client = ControlClient(Path({str(path)!r}), 10)\n"
            f"os.setgroups({list(more)}); os.setgid({group}); os.setuid({user})\n"
            "try: print('instance', client.ping().instance)\n"
            "except PeerError as error: print(type(error).__name__, error)\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment).stdout.strip()

    def test_names_that_cannot_be_files_and_paths_too_long_for_a_socket(self, tmp_path: Path) -> None:
        for name in ("", "a/b", "..", ".hidden", "a b", "x" * 41, "ü"):
            with pytest.raises(SettingError, match="KVCACHED_IPC_NAME"):
                endpoint_path(tmp_path, name)
        with pytest.raises(SettingError, match="KVCACHED_RUN_DIR"):
            endpoint_path(tmp_path / ("y" * 100), "a")
