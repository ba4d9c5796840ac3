# SPDX-License-Identifier: Apache-2.0
"""Records of servers: what they name is adopted or ended, and nothing else is touched."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from kvcached import processes
from kvcached.controller import launcher, leftovers
from kvcached.controller.adoption import Purpose, Record
from kvcached.controller.backends import BackendFailed
from kvcached.controller.build import backend_of
from kvcached.controller.config import parse_config
from kvcached.controller.engine_command import purpose_of
from kvcached.controller.handover import take_over
from kvcached.controller.launcher import EngineBackend
from kvcached.controller.process import EngineProcess, Listener
from kvcached.controller.states import State
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    Scene = Callable[[EngineBackend], Awaitable[None]]

WAIT_S = 60.0
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
SERVER = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep({pause_s})
        self.send_response({status} if self.path == "/health" else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
PURPOSE = Purpose("chat", 0, "a.log", "/here", ("python",), {})


@contextlib.contextmanager
def group(code: str = "print(flush=True); import time; time.sleep(600)") -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group, and has said something."""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        try:
            process.said = process.stdout.readline()  # type: ignore[attr-defined]
            yield process
        finally:
            process.kill()


def note(log: Path, pid: int) -> None:
    leftovers.note(log, Record(pid, processes.start_of(pid), leftovers.boot(), 15_000, "stop", State.READY, PURPOSE))


def end_all(folder: Path) -> None:
    leftovers.end_all(leftovers.groups_in(folder))


def change(record: Path, **fields: object) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), **fields}))


def test_what_has_a_record_is_ended(tmp_path: Path) -> None:
    with group() as one, group() as other:
        note(tmp_path / "a.log", one.pid)
        assert (tmp_path / "a.process").stat().st_mode & 0o077 == 0, "it may have a secret"
        end_all(tmp_path)
        assert one.wait(WAIT_S) == -15
        assert other.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_TERM_GRACE_S", 0.1)
    with group(STUBBORN) as one:
        note(tmp_path / "a.log", one.pid)
        end_all(tmp_path)
        assert one.wait(WAIT_S) == -9


@pytest.mark.parametrize("fields", [{"start": 1}, {"boot": "another"}, {"pid": 1}, {"pid": 0}, {"pid": -1}, {"pid": "x"}])
def test_another_process_of_that_number_is_left_alone(tmp_path: Path, fields: dict[str, object]) -> None:
    with group() as one:
        note(tmp_path / "a.log", one.pid)
        change(tmp_path / "a.process", **fields)
        end_all(tmp_path)
        assert one.poll() is None
    assert list(tmp_path.iterdir()) == []


def test_on_a_full_disk_a_record_still_says_how_a_server_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with group() as one:
        record = Record(one.pid, processes.start_of(one.pid), leftovers.boot(), 15_000, "kv", State.ASLEEP, PURPOSE)
        leftovers.note(tmp_path / "a.log", record)
        with monkeypatch.context() as patched:
            patched.setattr("kvcached.controller.leftovers.os.open", full)
            for state in (State.WAKING, State.READY):
                leftovers.note(tmp_path / "a.log", replace(record, state=state))
                (found,) = leftovers.groups_in(tmp_path)
                assert found.record is not None
                assert found.record.state is state
            for log, state in (("a.log", State.GOING_TO_SLEEP), ("b.log", State.READY)):
                with pytest.raises(OSError, match="no space"):
                    leftovers.note(tmp_path / log, replace(record, state=state))


def test_what_is_no_record_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.process").write_text("[")
    (tmp_path / "b.process").write_text("[]")
    assert leftovers.groups_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_forgotten(tmp_path: Path) -> None:
    with group() as one:
        note(tmp_path / "a.log", one.pid)
        leftovers.forget(tmp_path / "a.log")
        leftovers.forget(tmp_path / "a.log")
        end_all(tmp_path)
        assert one.poll() is None


def test_a_folder_is_one_gateways(tmp_path: Path) -> None:
    with leftovers.claimed(tmp_path), pytest.raises(SettingError, match="another gateway uses"), leftovers.claimed(tmp_path):
        pass
    with leftovers.claimed(tmp_path):
        assert os.listdir(tmp_path) == [".gateway"]


# ---------------------------------------------------------------------- adoption


def config_in(folder: Path) -> Any:
    chat = {"engine": "vllm", "model": "none", "sleep": "host", "env": {"A": "1"}}
    return parse_config(json.dumps({"log_dir": str(folder), "models": {"chat": chat}}))


def left(folder: Path, pid: int, port: int, **facts: Any) -> None:
    """A record as a gateway with that configuration would have written it."""
    purpose = purpose_of("chat", config_in(folder).models["chat"], 0, {}, Path.cwd(), "chat.log")
    record = Record(pid, processes.start_of(pid), leftovers.boot(), port, "host", State.READY, purpose)
    leftovers.note(folder / "chat.log", replace(record, **facts))


def taken_over(folder: Path, scene: Scene | None = None) -> dict[str, State]:
    """What the next gateway takes; then the scene, with its servers."""

    async def play() -> dict[str, State]:
        config = config_in(folder)
        async with aiohttp.ClientSession() as session:
            backend = backend_of("chat", config.models["chat"], config, {}, session)
            assert isinstance(backend, EngineBackend)
            found = await take_over(folder, {"chat": backend})
            if scene is not None:
                await scene(backend)
            return found

    return asyncio.run(asyncio.wait_for(play(), WAIT_S))


def server(status: int = 200, pause_s: float = 0.0) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return group(SERVER.format(status=status, pause_s=pause_s))


def port_of(process: subprocess.Popen[bytes]) -> int:
    return int(process.said)  # type: ignore[attr-defined]


def test_a_server_that_answers_is_adopted_and_its_group_can_be_ended(tmp_path: Path) -> None:
    (tmp_path / "chat.log").write_text("first\nlast\n")

    async def scene(backend: EngineBackend) -> None:
        (replica,) = backend.replicas
        assert (replica.address, replica.up, replica.pid) == (f"http://127.0.0.1:{port_of(one)}", True, one.pid)
        assert backend.journal.after(0, 10).lines == ("first", "last")
        await backend.stop()
        assert one.wait(WAIT_S) == -15
        assert not (tmp_path / "chat.process").exists()

    with server() as one:
        left(tmp_path, one.pid, port_of(one))
        assert taken_over(tmp_path, scene) == {"chat": State.READY}


def test_one_that_could_not_be_put_to_sleep_is_found_awake(tmp_path: Path) -> None:
    class Memory:
        async def give_back(self, leader: int | None) -> None:
            assert json.loads((tmp_path / "chat.process").read_text())["state"] == "going to sleep"
            raise BackendFailed("it is busy")

    async def scene(backend: EngineBackend) -> None:
        backend._kv_memory[:] = [Memory()]  # type: ignore[list-item]
        backend._model = backend._model.model_copy(update={"sleep": "kv"})
        with pytest.raises(BackendFailed, match="busy"):
            await backend.sleep()
        assert json.loads((tmp_path / "chat.process").read_text())["state"] == "ready"

    with server() as one:
        left(tmp_path, one.pid, port_of(one))
        assert taken_over(tmp_path, scene) == {"chat": State.READY}


def test_a_group_that_does_not_end_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcached.controller.process.KILL_GRACE_S", 0.1)
    monkeypatch.setattr("kvcached.controller.process.EngineProcess._is_there", lambda self: True)

    async def scene(backend: EngineBackend) -> None:
        await backend.stop()
        assert (tmp_path / "chat.process").exists(), "the next gateway has to know of it"

    with server() as one:
        left(tmp_path, one.pid, port_of(one))
        taken_over(tmp_path, scene)


def test_one_that_sleeps_is_not_asked_for_its_health_which_could_run_the_model(tmp_path: Path) -> None:
    with server(status=503) as one:
        left(tmp_path, one.pid, port_of(one), state=State.ASLEEP)
        assert taken_over(tmp_path) == {"chat": State.ASLEEP}
        assert one.poll() is None, "no gateway that ends without a word ends what it adopted"


@pytest.mark.parametrize(("status", "pause_s"), [(503, 0.0), (200, 600.0)])
def test_one_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, pause_s: float) -> None:
    monkeypatch.setattr(launcher, "_ADOPTION_TIMEOUT_S", 0.2 if pause_s else WAIT_S)
    with server(status, pause_s) as one:
        left(tmp_path, one.pid, port_of(one))
        assert taken_over(tmp_path) == {}
        assert one.wait(WAIT_S) == -15
    assert not (tmp_path / "chat.process").exists()


def test_one_whose_port_another_program_has_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with server() as other, group() as one:
        left(tmp_path, one.pid, port_of(other))
        assert taken_over(tmp_path) == {}
        assert one.wait(WAIT_S) == -15
        assert other.poll() is None
    assert f"chat: process {one.pid} of an earlier gateway is ended: it does not listen on port {port_of(other)}" in caplog.messages


def test_a_record_of_another_version_is_enough_to_end_it(tmp_path: Path) -> None:
    with server() as one:
        left(tmp_path, one.pid, port_of(one))
        change(tmp_path / "chat.process", purpose={"words": "of another version"})
        assert taken_over(tmp_path) == {}
        assert one.wait(WAIT_S) == -15


def test_a_process_that_has_the_number_of_one_that_ended_is_left_alone(tmp_path: Path) -> None:
    async def play() -> None:
        told = asyncio.get_running_loop().create_future()
        record = Record(one.pid, 1, leftovers.boot(), 15_000, "host", State.READY, PURPOSE)
        process = EngineProcess.adopt("chat", tmp_path / "chat.log", record, Listener(told.set_result, print))
        assert await told == ""
        await process.stop()

    with group() as one:
        asyncio.run(asyncio.wait_for(play(), WAIT_S))
        assert one.poll() is None


@pytest.mark.parametrize("told", ["by the kernel", "by a look"])
def test_the_end_of_one_that_is_no_child_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    if told == "by a look":

        def refused(pid: int) -> int:
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", refused)

    async def scene(backend: EngineBackend) -> None:
        ended = asyncio.get_running_loop().create_future()
        backend.on_ended = ended.set_result
        for _ in range(3):
            assert not await backend.is_gone(backend.replicas[0])
        assert backend.replicas[0].up
        os.kill(one.pid, signal.SIGKILL)
        assert await ended == "its server ended"
        assert not backend.replicas[0].up
        await backend.stop()

    with server() as one:
        left(tmp_path, one.pid, port_of(one))
        assert taken_over(tmp_path, scene) == {"chat": State.READY}
