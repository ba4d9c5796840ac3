# SPDX-License-Identifier: Apache-2.0
"""A gateway that is killed or hands over, and the next one: servers go on, and no request that had no answer is lost."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from test_controller_processes import WAIT_S, Running, in_background, running, until

from kvcached import processes

MANY_LINES = ["x" * 1000] * 200
"""More than a pipe holds that nobody reads."""


def servers(it: Running, name: str = "chat") -> list[dict[str, Any]]:
    return list(json.loads(it.call(f"/health/{name}", method="GET")[1])["servers"])


def pids(it: Running, name: str = "chat") -> list[int]:
    return [int(server["pid"]) for server in servers(it, name)]


def hand_over(it: Running) -> None:
    it.process.send_signal(signal.SIGUSR1)


def is_refused(it: Running) -> bool:
    try:
        it.call("/health", method="GET")
    except OSError:
        return True
    return False


def left(it: Running) -> None:
    """The gateway has ended, in order."""
    assert it.process.wait(WAIT_S) == 0, it.errors()
    assert it.process.stdout is not None
    it.process.stdout.close()


def asked_until_answered(it: Running, **keys: Any) -> tuple[int, bytes]:
    """As a client that repeats what was refused or broke off before an answer."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return it.ask(**keys)
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_a_server_outlives_a_killed_gateway_and_is_the_next_ones(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        child = int((tmp_path / "child").read_text())
        (server,) = servers(it)
        it.kill()
        body = json.dumps({"say": [*MANY_LINES, "alone"]}).encode()
        with urllib.request.urlopen(server["address"] + "/v1/completions", body, timeout=WAIT_S) as response:
            assert json.loads(response.read()) == {"pid": pid}, "it works though nobody hears what it says"

        it.launch()
        assert (it.state(), servers(it)) == ("ready", [{**server, "open": 0}])
        assert json.loads(it.call("/logs/chat", method="GET")[1])["lines"][-1] == "alone"
        assert it.ask(say=["together"])[0] == 200
        until(lambda: "chat | together" in it.errors())
        assert it.engine_pid() == pid
        assert it.calls().count("start") == 1
        it.process.send_signal(signal.SIGTERM)
        left(it)
        assert not processes.is_there(pid)
        assert not processes.is_there(child)
        assert list((tmp_path / "logs").glob("*.process")) == []

        it.launch()
        assert it.state() == "stopped"
        assert it.engine_pid() != pid


def test_the_end_of_an_adopted_server_is_noticed_and_loses_no_request(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        it.kill()
        it.launch()
        (tmp_path / "hold").touch()
        thread, found = in_background(it.ask)
        until(lambda: it.calls().count("/v1/completions") == 2)
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "hold").unlink()
        thread.join(WAIT_S)
        assert isinstance(found[0], tuple)
        assert found[0][0] == 200
        assert json.loads(found[0][1])["pid"] not in (pid, None)
        assert it.calls().count("start") == 2


def test_what_sleeps_is_adopted_asleep_and_what_was_about_to_is_ended(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        assert it.call("/action/sleep/chat?wait_s=60")[0] == 200
        it.kill()
        it.launch()
        assert it.state() == "asleep"
        assert it.engine_pid() == pid
        assert it.calls() == ["start", "/v1/completions", "/sleep?level=1&mode=wait", "/wake_up", "/v1/completions"]

        it.kill()
        it.launch()
        assert (it.state(), pids(it)) == ("ready", [pid])

        (tmp_path / "restless").touch()
        assert it.call("/action/sleep/chat")[0] == 202
        until(lambda: it.calls().count("/sleep?level=1&mode=wait") == 2)
        it.kill()
        it.launch()
        assert it.state() == "stopped"
        assert not processes.is_there(pid)
        assert f"chat: process {pid} of an earlier gateway is ended: it was left going to sleep" in it.errors()


def test_only_what_was_started_for_the_same_thing_is_adopted(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        names = ("chat", "args", "env", "gone", "half")
        it.reload(dict.fromkeys(names, it.chat))
        for name in names[:-1]:
            assert it.call("/v1/completions", {"model": name})[0] == 200
        (tmp_path / "linger").touch()
        it.call("/action/wakeup/half")
        until(lambda: it.calls().count("start") == len(names))
        before = {name: pids(it, name)[0] for name in names}
        it.kill()
        (tmp_path / "linger").unlink()
        it.write(
            {
                "chat": {**it.chat, "ttl_s": 1000, "aliases": ["gpt"]},
                "args": {**it.chat, "args": ["--new"]},
                "env": {**it.chat, "env": {**it.chat["env"], "COLOUR": "red"}},
                "half": it.chat,
            }
        )
        it.launch()
        states = {name: json.loads(it.call(f"/health/{name}", method="GET")[1])["state"] for name in ("chat", "args", "env", "half")}
        assert states == {"chat": "ready", "args": "stopped", "env": "stopped", "half": "stopped"}
        assert {name: processes.is_there(pid) for name, pid in before.items()} == {name: name == "chat" for name in names}
        for name, reason in {
            "args": "it was started with another command",
            "env": "it was started with another environment (COLOUR)",
            "gone": "no model of that name is started here",
            "half": "it was left starting",
        }.items():
            assert f"{name}: process {before[name]} of an earlier gateway is ended: {reason}" in it.errors()


def test_of_several_servers_all_are_adopted_or_none(tmp_path: Path) -> None:
    with running(tmp_path, replicas=2) as it:
        it.engine_pid()
        both = pids(it)
        it.kill()
        it.launch()
        assert (it.state(), pids(it)) == ("ready", both)
        it.kill()
        os.kill(both[0], signal.SIGKILL)
        until(lambda: not processes.is_there(both[0]))
        it.launch()
        assert it.state() == "stopped"
        assert not processes.is_there(both[1])


def test_handed_over_with_every_request_answered(tmp_path: Path) -> None:
    with running(tmp_path, concurrency=2) as it:
        pid = it.engine_pid()
        idle = http.client.HTTPConnection("127.0.0.1", int(it.url.rpartition(":")[2]), timeout=WAIT_S)
        idle.request("GET", "/health")
        idle.getresponse().read()
        stream, streamed = in_background(lambda: it.ask(stream=True, n=50))
        (tmp_path / "hold").touch()
        asking = [in_background(it.ask) for _ in range(4)]  # of whom most wait in the gateway
        until(lambda: json.loads(it.call("/health/chat", method="GET")[1])["waiting"] >= 2)
        hand_over(it)
        until(lambda: is_refused(it))
        assert idle.sock.recv(1) == b"", "a connection without a request is closed at once"
        idle.close()
        late, repeated = in_background(lambda: asked_until_answered(it))
        (tmp_path / "hold").unlink()
        for thread, found in asking:
            thread.join(WAIT_S)
            assert found == [(200, json.dumps({"pid": pid}).encode())]
        stream.join(WAIT_S)
        assert streamed == [(200, b"".join(b"data: %d\n\n" % number for number in range(50)))]
        left(it)
        assert processes.is_there(pid)
        it.launch()
        assert it.state() == "ready"
        late.join(WAIT_S)
        assert repeated == [(200, json.dumps({"pid": pid}).encode())]
        assert it.calls().count("start") == 1


def test_a_body_that_does_not_come_holds_no_hand_over_up(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        with socket.create_connection(("127.0.0.1", int(it.url.rpartition(":")[2])), WAIT_S) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: it.ask()[0] == 200)
            hand_over(it)
            answer = b"".join(iter(lambda: half.recv(4096), b""))
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b'"shutting_down"' in answer
        left(it)
        assert "is ended" not in it.errors()
        it.launch()
        assert pids(it) == [pid]


def test_what_is_half_started_is_not_handed_over(tmp_path: Path) -> None:
    (tmp_path / "linger").touch()
    with running(tmp_path, preload=True) as it:
        until(lambda: (tmp_path / "calls").exists())
        (pid,) = pids(it)
        hand_over(it)
        left(it)
        assert not processes.is_there(pid)
        (tmp_path / "linger").unlink()
        it.launch()


def test_sigterm_ends_servers_even_after_a_wish_to_hand_over(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        (tmp_path / "hold").touch()
        thread, found = in_background(it.ask)
        until(lambda: it.calls().count("/v1/completions") == 2)
        hand_over(it)
        until(lambda: is_refused(it))
        it.process.send_signal(signal.SIGTERM)
        (tmp_path / "hold").unlink()
        thread.join(WAIT_S)
        assert found == [(200, json.dumps({"pid": pid}).encode())]
        left(it)
        assert not processes.is_there(pid)
        it.launch()


def fails_to_start(it: Running, say_to: Path) -> None:
    with say_to.open("wb") as out:
        command = [sys.executable, "-m", "kvcached.cli.main", "serve", str(it.folder / "models.yaml")]
        assert subprocess.run(command, stdout=out, stderr=subprocess.DEVNULL, timeout=WAIT_S, check=False).returncode != 0


def test_a_gateway_that_does_not_get_ready_leaves_servers_as_they_are(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        it.kill()
        plain = it.folder / "models.yaml"
        given = json.loads(plain.read_text())
        with socket.create_server(("127.0.0.1", 0)) as other:
            plain.write_text(json.dumps({**given, "listen": f"127.0.0.1:{other.getsockname()[1]}"}))
            fails_to_start(it, Path("/dev/null"))
        plain.write_text(json.dumps(given))
        fails_to_start(it, Path("/dev/full"))
        it.launch()
        assert (it.state(), pids(it)) == ("ready", [pid])
        assert it.calls().count("start") == 1


def holds_back(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigBlk:")[2].split()[0], 16) >> (number - 1) & 1)


def test_orders_that_come_before_it_can_heed_them_are_kept(tmp_path: Path) -> None:
    def early(number: signal.Signals) -> None:
        until(lambda: holds_back(it.process.pid, number))
        it.process.send_signal(number)

    with running(tmp_path) as it:
        pid = it.engine_pid()
        it.kill()
        it.launch(lambda: early(signal.SIGHUP))
        assert it.errors().count("the file was taken") == 1
        assert not holds_back(it.process.pid, signal.SIGHUP)
        it.kill()
        it.launch(lambda: early(signal.SIGUSR1))
        left(it)
        it.launch()
        assert pids(it) == [pid]


def test_a_changed_file_is_the_next_gateways_when_one_ends(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        (tmp_path / "hold").touch()
        thread, found = in_background(it.ask)
        until(lambda: it.calls().count("/v1/completions") == 2)
        hand_over(it)
        until(lambda: is_refused(it))
        it.reload({"chat": {**it.chat, "args": ["--new"]}, "other": {**it.chat, "preload": True}})
        assert "the file was not taken" in it.errors()
        (tmp_path / "hold").unlink()
        thread.join(WAIT_S)
        assert found == [(200, json.dumps({"pid": pid}).encode())]
        left(it)
        assert it.calls().count("start") == 1
        it.write({"chat": it.chat})
        it.launch()
        assert pids(it) == [pid]
