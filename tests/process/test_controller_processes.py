# SPDX-License-Identifier: Apache-2.0
"""`kvcached serve` as a process with servers as processes: started on request, killed, put to sleep, ended without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcached import processes
from kvcached.controller import leftovers
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parent
WAIT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


class Running:
    """The gateway's process."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder = folder
        package = folder / "path" / "vllm" / "entrypoints" / "cli"
        package.mkdir(parents=True)
        for parent in (package, *list(package.parents)[:2]):
            (parent / "__init__.py").touch()
        shutil.copy(HERE / "standin_server.py", package / "main.py")
        chat = {"engine": "vllm", "model": "none", "python": sys.executable, "sleep": "host", **keys}
        chat["env"] = {"PYTHONPATH": str(folder / "path"), "STANDIN_FOLDER": str(folder), **keys.get("env", {})}
        self.chat = chat
        self.write({"chat": chat})
        self.launch()

    def launch(self, early: Callable[[], object] = lambda: None) -> None:
        """Returns when it is ready. `early` is called before."""
        with (self.folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvcached.cli.main", "serve", str(self.folder / "models.yaml")],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        early()
        assert self.process.stdout is not None
        found = re.search(rb"http://\S+:\d+", self.process.stdout.readline())
        assert found is not None, self.errors()
        self.url = found[0].decode()

    def write(self, models: dict[str, Any]) -> None:
        given = {"listen": "127.0.0.1:0", "log_dir": str(self.folder / "logs"), "models": models}
        (self.folder / "models.yaml").write_text(json.dumps(given))

    def reload(self, models: dict[str, Any]) -> None:
        """Returns when the gateway said what it made of it."""
        said = self.errors().count("the file was")
        self.write(models)
        self.process.send_signal(signal.SIGHUP)
        until(lambda: self.errors().count("the file was") > said)

    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> tuple[int, bytes]:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def ask(self, **keys: Any) -> tuple[int, bytes]:
        return self.call("/v1/completions", {"model": "chat", **keys})

    def engine_pid(self) -> int:
        status, body = self.ask()
        assert status == 200
        return int(json.loads(body)["pid"])

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split()

    def state(self) -> str:
        return str(json.loads(self.call("/health/chat", method="GET")[1])["state"])

    def kill(self) -> None:
        """SIGKILL: nothing that it started hears of it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0


@contextlib.contextmanager
def running(folder: Path, **keys: Any) -> Iterator[Running]:
    it = Running(folder, **keys)
    try:
        yield it
        it.stop()
    finally:
        it.kill()
        leftovers.end_all(leftovers.groups_in(folder / "logs"))


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


def test_started_by_the_first_request_and_ended_with_all_its_children(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        assert it.state() == "stopped"
        pid = it.engine_pid()
        child = int((tmp_path / "child").read_text())
        assert processes.is_there(pid)
        assert processes.is_there(child)
        assert "ready as chat" in (tmp_path / "logs" / "chat.log").read_text()
    assert "chat | ready as chat" in (tmp_path / "stderr").read_text()
    assert not processes.is_there(pid)
    assert not processes.is_there(child)


def test_kill_9_loses_no_request_that_had_not_begun_to_stream(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        (tmp_path / "hold").touch()
        asking = [in_background(it.ask) for _ in range(5)]
        until(lambda: it.calls().count("/v1/completions") == 6)
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "hold").unlink()
        for thread, found in asking:
            thread.join(WAIT_S)
            assert isinstance(found[0], tuple)
            assert found[0][0] == 200
            assert json.loads(found[0][1])["pid"] != pid
        assert it.calls().count("start") == 2


def test_an_open_stream_survives_an_orderly_end(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        it.engine_pid()
        thread, found = in_background(lambda: it.ask(stream=True, n=50))
        until(lambda: it.calls().count("/v1/completions") == 2)
        it.stop()
        thread.join(WAIT_S)
        assert found == [(200, b"".join(b"data: %d\n\n" % number for number in range(50)))]


def test_asleep_by_its_ttl_and_awake_by_a_request(tmp_path: Path) -> None:
    with running(tmp_path, ttl_s=0.1) as it:
        pid = it.engine_pid()
        until(lambda: it.state() == "asleep")
        assert it.engine_pid() == pid
        assert it.calls()[:5] == ["start", "/v1/completions", "/sleep?level=1&mode=wait", "/wake_up", "/v1/completions"]


def test_a_wake_up_without_memory_is_tried_again_and_leaves_it_asleep_meanwhile(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        assert it.call("/action/sleep/chat?wait_s=60")[0] == 200
        (tmp_path / "trouble").touch()
        assert it.engine_pid() == pid
        assert it.calls()[2:] == ["/sleep?level=1&mode=wait", "/wake_up", "/sleep?level=1&mode=wait", "/wake_up", "/v1/completions"]


@pytest.mark.parametrize("sleep", ["stop"])
def test_sleep_that_ends_the_server(tmp_path: Path, sleep: str) -> None:
    with running(tmp_path, sleep=sleep) as it:
        pid = it.engine_pid()
        assert it.call("/action/sleep/chat?wait_s=60")[0] == 200
        assert not processes.is_there(pid)
        assert it.engine_pid() != pid


def test_one_that_cannot_start_is_tried_three_times_and_then_told(tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    with running(tmp_path) as it:
        status, body = it.ask()
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "model_failed")
        assert "it cannot start" in error["message"]
        assert it.calls() == ["start"] * 3
        assert it.call("/health/chat", method="GET")[0] == 503


def test_why_it_ended_and_what_can_be_done_about_it_is_told(tmp_path: Path) -> None:
    after = "".join(f"    line {number} of a traceback\n" for number in range(100))
    (tmp_path / "die").write_text(f"  Value error, Sleep mode is not supported on current platform.\n{after}")
    with running(tmp_path) as it:
        _, body = it.ask()
        message = json.loads(body)["error"]["message"]
        log = tmp_path / "logs" / "chat.log"
        assert f"Value error, Sleep mode is not supported on current platform. (its log: {log}) -> the engine found no GPU" in message


def test_one_whose_port_somebody_else_has_is_not_taken_for_ready_and_is_started_again_with_another(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "silent").touch()
    with running(tmp_path) as it, contextlib.ExitStack() as stack:
        thread, found = in_background(it.ask)
        until(lambda: (tmp_path / "squatter").exists() and bool((tmp_path / "squatter").read_text()))
        stack.callback(os.kill, int((tmp_path / "squatter").read_text()), signal.SIGKILL)
        until(lambda: "GET /health" in (tmp_path / "squatter.log").read_text())  # the other program answers, with 404
        assert it.state() == "starting"
        (tmp_path / "silent").unlink()
        thread.join(WAIT_S)
        assert isinstance(found[0], tuple)
        assert found[0][0] == 200
        assert it.calls() == ["start", "start", "/v1/completions"]
        assert re.search(r"chat.* found port \d+ taken by another program; its next start gets another port", it.errors())


def test_what_is_left_of_a_server_whose_leader_is_gone_is_ended_too(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        child = int((tmp_path / "child").read_text())
        it.kill()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not processes.is_there(pid))
        assert processes.is_there(child)
        it.launch()
        assert not processes.is_there(child)


def test_a_second_gateway_does_not_touch_the_servers_of_the_first(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        command = [sys.executable, "-m", "kvcached.cli.main", "serve", str(tmp_path / "models.yaml")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert (done.returncode, "another gateway uses" in done.stderr) == (2, True)
        assert it.engine_pid() == pid


def together(it: Running, count: int) -> list[object]:
    """Who answers so many requests that are open at once."""
    before = it.calls().count("/v1/completions")
    (it.folder / "hold").touch()
    asking = [in_background(it.engine_pid) for _ in range(count)]
    until(lambda: it.calls().count("/v1/completions") == before + count)
    (it.folder / "hold").unlink()
    for thread, _ in asking:
        thread.join(WAIT_S)
    return [pid for _, found in asking for pid in found]


def test_replicas_share_the_requests_and_one_that_dies_is_started_again(tmp_path: Path) -> None:
    with running(tmp_path, replicas=2) as it:
        pid = it.engine_pid()
        pids = together(it, 4)
        assert sorted(pids.count(one) for one in set(pids)) == [2, 2]
        os.kill(pid, signal.SIGKILL)
        assert [it.engine_pid() == pid for _ in range(3)] == [False] * 3
        assert it.state() == "ready"
        until(lambda: len(set(together(it, 2))) == 2)
        assert it.calls().count("start") == 3


def test_a_changed_file_is_taken_without_dropping_a_stream(tmp_path: Path) -> None:
    with running(tmp_path) as it:
        pid = it.engine_pid()
        thread, found = in_background(lambda: it.ask(stream=True, n=50))
        until(lambda: it.calls().count("/v1/completions") == 2)
        it.reload({"chat": {**it.chat, "aliases": ["gpt"]}})
        assert it.call("/v1/completions", {"model": "gpt"})[0] == 200
        assert it.calls().count("start") == 1
        it.reload({"chat": {**it.chat, "args": ["--new"]}, "more": it.chat})
        assert it.engine_pid() != pid
        assert it.calls().count("start") == 2
        thread.join(WAIT_S)
        assert found == [(200, b"".join(b"data: %d\n\n" % number for number in range(50)))]
        assert not processes.is_there(pid)
        it.reload({"chat": {**it.chat, "colour": "red"}})
        assert "models.chat.colour: there is no such key" in it.errors()
        wrong = {**it.chat, "env": {**it.chat["env"], "KVCACHED_LIMIT": "much"}}
        it.reload({"chat": it.chat, "more": it.chat, "wrong": wrong, "last": it.chat})
        assert "KVCACHED_LIMIT" in it.errors()
        assert [card["id"] for card in json.loads(it.call("/v1/models", method="GET")[1])["data"]] == ["chat", "more"]
        assert it.ask()[0] == 200
        it.reload({"more": it.chat})
        assert it.call("/v1/completions", {"model": "chat"})[0] == 404


def test_a_corrected_file_ends_a_start_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "linger").touch()
    (tmp_path / "right").mkdir()
    with running(tmp_path) as it:
        thread, found = in_background(it.ask)
        until(lambda: (tmp_path / "calls").exists() and "started as process" in it.errors())
        pids = re.findall(r"started as process (\d+)", it.errors())
        it.reload({"chat": {**it.chat, "env": {**it.chat["env"], "STANDIN_FOLDER": str(tmp_path / "right")}}})
        thread.join(WAIT_S)
        assert [answer[0] for answer in found if isinstance(answer, tuple)] == [200]
        assert it.calls() == ["start"]
        assert not processes.is_there(int(pids[0]))


def test_a_corrected_file_ends_the_pause_of_one_that_fails(tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    with running(tmp_path, preload=True) as it:
        until(lambda: (tmp_path / "calls").exists() and it.calls().count("start") == 4 and it.state() == "failed")
        (tmp_path / "die").unlink()
        it.reload({"chat": {**it.chat, "aliases": ["gpt"]}})
        assert it.ask()[0] == 200, "it was to be tried again in 8 s, and requests refused until then"


def test_the_end_does_not_wait_for_a_model_that_is_starting(tmp_path: Path) -> None:
    (tmp_path / "linger").touch()
    with running(tmp_path, preload=True) as it:
        until(lambda: (tmp_path / "calls").exists())
        thread, found = in_background(it.ask)
        until(lambda: json.loads(it.call("/health/chat", method="GET")[1])["waiting"] == 1)
        it.stop()
        thread.join(WAIT_S)
        assert isinstance(found[0], tuple)
        assert found[0][0] == 503
        assert b"shutting_down" in found[0][1]


def test_logs_and_memory_are_told_by_model(tmp_path: Path, run_dir: Path) -> None:
    (tmp_path / "say").write_text("first\n\x1b[31msecond\x1b[0m <b>\n")
    (tmp_path / "pool").write_text("8")

    def pools() -> list[dict[str, Any]]:
        return [pool for card in json.loads(it.call("/cards", method="GET")[1])["cards"] for pool in card["pools"]]

    with running(tmp_path, sleep="kv", env={"KVCACHED_RUN_DIR": str(run_dir)}) as it:
        assert json.loads(it.call("/logs/chat", method="GET")[1])["lines"] == []
        assert pools() == []
        it.engine_pid()
        until(lambda: sum(pool["used_bytes"] for pool in pools()) == 8 * MIB)
        assert [pool["model"] for pool in pools()] == ["chat"]
        told = json.loads(it.call("/logs/chat", method="GET")[1])
        assert told["lines"][:2] == ["first", "\x1b[31msecond\x1b[0m <b>"]
        assert told["lines"][-1] == "ready as chat"
        assert json.loads(it.call(f"/logs/chat?after={told['next']}", method="GET")[1])["lines"] == []
        (tmp_path / "pool").write_text("0")
        it.engine_pid()
        assert it.call("/action/limit/chat?limit=32MiB")[0] == 200
        until(lambda: [pool["limit_bytes"] for pool in pools()] == [32 * MIB])
