# SPDX-License-Identifier: Apache-2.0
"""`kvcached control` on real pools in other processes: what kvctl does, over HTTP; who may; what goes wrong."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from real_pool import DEADLINE_S, PoolProcess, eventually
from typer.testing import CliRunner

from kvcached.cli.control import server as server_module
from kvcached.cli.control.command import read_token
from kvcached.cli.control.server import SocketServer
from kvcached.cli.kvctl import app as kvctl
from kvcached.cli.main import app as kvcached
from kvcached.cli.session import Session
from kvcached.errors import SettingError
from kvcached.testing.stopping import stop_process
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Control:
    """`kvcached control` in a process of its own."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        command = [sys.executable, "-m", "kvcached.cli.main", "control", "--run-dir", str(run_dir), "--timeout", "20", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self.at = self._started()
        self.token = ""

    def _started(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if "listening at " in line:
                return line.split("listening at ")[1].strip()
        raise AssertionError(f"it ended with {self.process.wait()}: {self.said}")

    def _connection(self) -> http.client.HTTPConnection:
        host = self.at.removeprefix("http://") if self.at.startswith("http") else "localhost"
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        if self.at.startswith("unix:"):
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(DEADLINE_S)
            connection.sock.connect(self.at.removeprefix("unix:"))
        return connection

    def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        return received(self.sent(method, path, body, **headers))

    def sent(self, method: str, path: str, body: object = None, **headers: str) -> http.client.HTTPConnection:
        connection = self._connection()
        payload = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request(method, path, payload, {"Authorization": f"Bearer {self.token}"} | headers)
        return connection

    def post(self, pool: str, command: str, **body: object) -> tuple[int, Any]:
        return self.call("POST", f"/v1/pools/{pool}/{command}", body)

    def end(self) -> int:
        with self.process:
            self.process.terminate()
            try:
                return self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise


def received(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    with contextlib.closing(connection):
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "application/json"
        return response.status, json.loads(response.read())


@pytest.fixture
def start(run_dir: Path) -> Iterator[Callable[..., Control]]:
    """Makes servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def started(*options: str) -> Control:
            made = Control(run_dir, *options)
            stack.callback(made.end)
            return made

        yield started


@pytest.fixture
def control(run_dir: Path, start: Callable[..., Control]) -> Control:
    started = start("--listen", "127.0.0.1:0")
    started.token = (run_dir / "control.token").read_text().strip()
    return started


def by_kvctl(run_dir: Path, *arguments: str) -> Any:
    return json.loads(CliRunner().invoke(kvctl, ["--run-dir", str(run_dir), *arguments, "--json"]).stdout)


def test_each_command_of_kvctl_acts_on_a_pool(run_dir: Path, chat: PoolProcess, control: Control) -> None:
    chat.take(16)
    eventually(lambda: control.call("GET", "/v1/cards") == (200, by_kvctl(run_dir, "list")))  # the record shows it a moment later
    cards = control.call("GET", "/v1/cards")[1]
    assert cards["cards"][0]["pools"][0]["lease_bytes"] >= 16 * MIB
    deferred = control.post("chat", "limit", size="8MiB")[1]
    assert (deferred["outcome"], deferred["holds"], deferred["overage_bytes"]) == ("deferred", False, 8 * MIB)
    assert control.post("chat", "limit", size="50%", revision=7)[1]["in_force_bytes"] == 32 * MIB
    assert control.post("chat", "limit", size=MIB, revision=6)[1]["outcome"] == "stale"
    assert control.post("chat", "limit", size="none")[1]["in_force_bytes"] is None
    assert control.post("chat", "floor", size=6 * MIB)[1]["in_force_bytes"] == 6 * MIB
    assert control.post("chat", "weight", weight=2) == (200, {"pool": "chat", "weight": 2.0})
    chat.ask("cache")
    assert control.post("chat", "evict", size="4MiB") == (200, {"pool": "chat", "wanted_bytes": 4 * MIB, "given_bytes": 4 * MIB})
    assert control.post("chat", "trim")[1] == {"pool": "chat", "wanted_bytes": None, "given_bytes": 0}
    eventually(lambda: control.call("GET", "/v1/pools/chat/explain") == (200, by_kvctl(run_dir, "explain", "chat")))
    explained = control.call("GET", "/v1/pools/chat/explain")[1]
    assert explained["status"]["floor_bytes"] == 6 * MIB


def test_the_settings_are_those_of_kvctl(run_dir: Path, control: Control) -> None:
    assert control.call("GET", "/v1/config") == (200, json.loads(CliRunner().invoke(kvctl, ["config", "--json"]).stdout))


def test_who_watches_sees_what_changes_until_so_many_looks(chat: PoolProcess, control: Control) -> None:
    with contextlib.closing(control.sent("GET", "/v1/watch?interval=0.05&count=2")) as connection:
        lines = [json.loads(line) for line in connection.getresponse()]
    assert [set(line) for line in lines] == [{"time_s", "run_dir", "cards"}] * 2
    assert lines[0]["time_s"] < lines[1]["time_s"]
    with contextlib.closing(control.sent("GET", "/v1/watch?interval=0.05")) as connection:
        looks = (json.loads(line)["cards"][0]["pools"][0] for line in connection.getresponse())
        assert next(looks)["weight"] == 1.0
        control.post("chat", "weight", weight=2)
        assert next(look for look in looks if look["weight"] == 2.0)["instance"] == "chat"


def test_who_watches_leaves_room_for_others_and_ends_with_the_server(chat: PoolProcess, control: Control) -> None:
    with contextlib.ExitStack() as stack:
        watching = [stack.enter_context(contextlib.closing(control.sent("GET", "/v1/watch?interval=60"))) for _ in range(8)]
        answers = [connection.getresponse() for connection in watching]
        assert all(json.loads(answer.readline())["cards"] for answer in answers)
        status, answer = control.call("GET", "/v1/watch")
        assert (status, answer["error"]["exit_code"]) == (503, 4)
        assert control.post("chat", "trim")[0] == 200
        control.process.terminate()
        assert [answer.read() for answer in answers] == [b""] * 8
        assert control.process.wait(DEADLINE_S) == 0


def test_who_stopped_watching_makes_room(control: Control) -> None:
    def is_let_in() -> bool:
        with contextlib.closing(control.sent("GET", "/v1/watch?interval=0.05")) as connection, connection.getresponse() as response:
            return response.status == 200 and bool(json.loads(response.readline()))

    for _ in range(12):
        eventually(is_let_in)


def test_a_dead_pool_is_unreachable_until_it_is_deleted(chat: PoolProcess, control: Control) -> None:
    status, answer = control.post("chat", "delete")
    assert (status, answer["error"]["type"]) == (409, "PeerRefused")
    chat.kill()
    status, answer = control.post("chat", "trim")
    assert (status, answer["error"]["type"], answer["error"]["exit_code"]) == (503, "PeerLost", 4)
    assert control.post("chat", "delete")[1]["deleted"] is True
    assert control.post("chat", "delete")[0] == 404


def test_a_pool_that_is_silent_holds_up_nobody_else(run_dir: Path, chat: PoolProcess, control: Control) -> None:
    code = PoolProcess(run_dir, "code")
    stop_process(chat.pid)
    try:
        waiting = control.sent("POST", "/v1/pools/chat/trim")
        assert control.post("code", "trim")[0] == 200
        assert select.select([waiting.sock], [], [], 0)[0] == []
        os.kill(chat.pid, signal.SIGCONT)
        assert received(waiting)[0] == 200
    finally:
        code.kill()


def test_a_pool_that_is_stopped_does_not_answer_in_time(run_dir: Path, chat: PoolProcess, start: Callable[..., Control]) -> None:
    control = start("--listen", f"unix:{run_dir.with_name('control.sock')}", "--timeout", "0.3")
    stop_process(chat.pid)
    status, answer = control.post("chat", "trim")
    assert (status, answer["error"]["type"], answer["error"]["exit_code"]) == (504, "PeerTimeout", 4)
    assert control.call("GET", "/v1/cards")[0] == 200


WRONG = (
    ("GET", "/v1/pools/chta/explain", None, 404, "no pool named 'chta'; there are: chat"),
    ("GET", "/v1/nothing", None, 404, "there is nothing at /v1/nothing"),
    ("POST", "/v1/pools/chat/frobnicate", None, 404, "limit, floor, weight, trim, evict, delete"),
    ("GET", "/v1/pools/chat/trim", None, 405, "POST is"),
    ("DELETE", "/v1/cards", None, 405, "GET is"),
    ("POST", "/v1/watch", None, 405, "GET is"),
    ("GET", "/v1/watch?interval=0", None, 400, "interval: "),
    ("GET", "/v1/watch?interval=soon", None, 400, "interval: "),
    ("GET", "/v1/watch?count=-1", None, 400, "count: "),
    ("GET", "/v1/watch?intervall=1", None, 400, "intervall: Extra inputs are not permitted"),
    ("POST", "/v1/config", None, 405, "GET is"),
    ("BREW", "/v1/cards", None, 501, "BREW"),
    ("POST", "/v1/pools/chat/limit", {"size": "3Q"}, 400, "size: "),
    ("POST", "/v1/pools/chat/limit", {"size": -1}, 400, "size: "),
    ("POST", "/v1/pools/chat/limit", {"size": True}, 400, "size: "),
    ("POST", "/v1/pools/chat/limit", {}, 400, "size: Field required"),
    ("POST", "/v1/pools/chat/floor", {"size": "none"}, 400, "size: "),
    ("POST", "/v1/pools/chat/trim", {"sise": 1}, 400, "sise: Extra inputs are not permitted"),
    ("POST", "/v1/pools/chat/weight", {"weight": 0}, 400, "weight: "),
    ("POST", "/v1/pools/chat/trim", b"no JSON", 400, "Invalid JSON"),
    ("POST", "/v1/pools/chat/trim", b" " * 65537, 413, "65536 bytes"),
)


def test_a_wrong_request_is_told_what_is_wrong(chat: PoolProcess, control: Control) -> None:
    for method, path, body, status, says in WRONG:
        found, answer = control.call(method, path, body)
        assert (found, says in answer["error"]["message"]) == (status, True), (method, path, body, answer)


def test_without_the_token_nothing_is_told(control: Control) -> None:
    token = control.token
    for authorization in ("", "Bearer", "Bearer wrong", f"Basic {token}", f"Bearer {token}x", f"Bearer {token[:-1]}", token, "Bearer \xff"):
        status, answer = control.call("GET", "/v1/cards", Authorization=authorization)
        assert (status, set(answer)) == (401, {"error"}), authorization


def test_the_token_is_this_users_alone(run_dir: Path, control: Control) -> None:
    file = run_dir / "control.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_token(file) == control.token
    assert len(control.token) >= 32
    assert not [line for line in control.said if control.token in line]
    file.chmod(0o640)
    with pytest.raises(SettingError, match="chmod 600"):
        read_token(file)
    short = run_dir / "short.token"
    short.touch(0o600)
    with pytest.raises(SettingError, match="at least 16"):
        read_token(short)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.0.2.1:80", "[::]:0", "example.org:80", "9462", "/tmp/x"])
def test_it_listens_on_this_machine_alone(run_dir: Path, address: str) -> None:
    done = CliRunner().invoke(kvcached, ["control", "--run-dir", str(run_dir), "--listen", address], env={"COLUMNS": "300"})
    assert (done.exit_code, "allowed are" in done.stderr) == (2, True)


def test_a_unix_socket_is_this_users_and_goes_with_its_server(run_dir: Path, chat: PoolProcess, start: Callable[..., Control]) -> None:
    path = run_dir.with_name("control.sock")
    first = start("--listen", f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.call("GET", "/v1/pools/chat/explain")[0] == 200
    second = CliRunner().invoke(kvcached, ["control", "--run-dir", str(run_dir), "--listen", f"unix:{path}"])
    assert (second.exit_code, "in use" in second.stderr) == (4, True)
    first.process.kill()
    first.end()
    third = start("--listen", f"unix:{path}", "--token-file", str(run_dir / "own.token"))
    assert third.call("GET", "/v1/cards")[0] == 401
    third.token = read_token(run_dir / "own.token")
    assert third.call("GET", "/v1/cards")[0] == 200
    assert third.end() == 0
    assert not path.exists()


def test_who_sends_a_byte_now_and_then_is_cut_off(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 0.2)
    path = run_dir.with_name("control.sock")
    with SocketServer(path, Session(run_dir, 1.0), None) as server, socket.socket(socket.AF_UNIX) as client:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        client.connect(str(path))
        end = time.monotonic() + DEADLINE_S

        def is_over() -> bool:
            try:
                return client.send(b"x") == 0
            except (BrokenPipeError, ConnectionResetError):
                return True

        eventually(is_over)
        assert time.monotonic() < end
        server.shutdown()
        serving.join()
