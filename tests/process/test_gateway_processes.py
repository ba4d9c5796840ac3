# SPDX-License-Identifier: Apache-2.0
"""`kvcached serve` with `processes: 2`: the second carries streams while the first lives, and no longer."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 120.0
EVENT = b"data: {}\n\n"


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.05)


class Handler(BaseHTTPRequestHandler):
    """An event at once, and another when the test says so."""

    protocol_version = "HTTP/1.1"
    go = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"a\r\n" + EVENT + b"\r\n")
        self.go.wait(WAIT_S)
        self.wfile.write(b"a\r\n" + EVENT + b"\r\n0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    Handler.go.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.go.set()
    server.shutdown()
    thread.join()
    server.server_close()


def carriers(parent: int) -> list[int]:
    """Processes of streams below it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_one = b"kvcached.controller.forwarder" in (path / "cmdline").read_bytes()
            if is_one and int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def is_idle(pid: int) -> bool:
    """Its event loop watches its line, besides what every event loop has: it opens nothing more by itself, and its owner knows of it."""
    try:
        return any(path.read_text().count("tfd:") >= 2 for path in Path(f"/proc/{pid}/fdinfo").iterdir())
    except OSError:  # closed meanwhile
        return False


def has_ended(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()  # it may be for its parent to bury
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_carries_what_is_open_and_ends_with_its_owner(tmp_path: Path, engine: str, number: signal.Signals) -> None:
    file = tmp_path / "models.yaml"
    models = {"chat": {"engine": "remote", "address": engine}}
    file.write_text(json.dumps({"listen": "127.0.0.1:0", "log_dir": str(tmp_path / "logs"), "processes": 2, "models": models}))
    command = [sys.executable, "-u", "-m", "kvcached.cli.main", "serve", str(file)]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    try:
        found = re.search(rb"http://(\S+):(\d+)", gateway.stdout.readline())
        assert found is not None
        until(lambda: bool(carriers(gateway.pid)))
        carrier = carriers(gateway.pid)[0]
        until(lambda: is_idle(carrier))
        client = http.client.HTTPConnection(found[1].decode(), int(found[2]), timeout=WAIT_S)
        before = descriptors(carrier)
        client.request("POST", "/v1/chat/completions", json.dumps({"model": "chat", "stream": True}), {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.read(len(EVENT)) == EVENT
        until(lambda: descriptors(carrier) >= before + 2)
        gateway.send_signal(number)
        if number is signal.SIGTERM:
            Handler.go.set()
            assert answer.read() == EVENT
        else:
            with pytest.raises((OSError, http.client.HTTPException)):
                answer.read()
        client.close()
        assert gateway.wait(WAIT_S) == (0 if number is signal.SIGTERM else -number)
        until(lambda: has_ended(carrier))
    finally:
        gateway.kill()
        gateway.wait()
        gateway.stdout.close()
