# SPDX-License-Identifier: Apache-2.0
"""What is left of a process, and servers whose port somebody else has."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached import processes
from kvcached.controller.ports import free_port
from kvcached.testing.servers import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 60.0
EXIT_OF_ONE_THREAD = {"x86_64": 60, "aarch64": 93}[platform.machine()]
HALF_DEAD = f"""
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("begun", flush=True)
ctypes.CDLL(None).syscall({EXIT_OF_ONE_THREAD}, 0)
"""
SHY = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
port = int(sys.argv[sys.argv.index("--port") + 1])
with Path("starts").open("a") as starts:
    starts.write(f"{port} ")
if len(Path("starts").read_text().split()) == 1:
    print(f"[Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use", flush=True)
    time.sleep(600)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.said = process.stdout.readline()  # type: ignore[attr-defined]
            yield process
        finally:
            process.kill()


def test_a_process_is_there_until_its_last_thread_has_ended() -> None:
    with running(HALF_DEAD) as process:
        first = Path(f"/proc/{process.pid}/stat")
        assert wait_for(lambda: first.read_text().rpartition(")")[2].split()[0] == "Z")
        assert processes.is_there(process.pid)
        assert processes.of_group(process.pid) == processes.of_session(process.pid) == [process.pid]
        assert processes.start_of(process.pid) is not None

        os.kill(process.pid, signal.SIGKILL)
        assert wait_for(lambda: not processes.is_there(process.pid))
        assert process.returncode is None  # nobody has asked for it: the kernel keeps its number, and nothing else
        assert processes.start_of(process.pid) is not None
        assert processes.of_group(process.pid) == processes.of_session(process.pid) == []


def test_who_listens_on_a_port() -> None:
    program = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(600)"
    with running(program) as process, running("import time; print(flush=True); time.sleep(600)") as bystander:
        port = int(process.said)  # type: ignore[attr-defined]
        assert processes.listens_in(process.pid, port)
        assert not processes.listens_in(bystander.pid, port)
        with socket.create_server(("127.0.0.1", 0)) as other:
            assert not processes.listens_in(process.pid, other.getsockname()[1])
    assert not processes.listens_in(process.pid, port)


def test_of_what_never_was_nothing_is_there() -> None:
    never = 1 << 22  # the highest number that the kernel can be set to give, plus one
    assert not processes.is_there(never)
    assert processes.start_of(never) is None


def test_a_server_whose_port_somebody_else_has_gets_another(tmp_path: Path) -> None:
    port = free_port()
    server = Server([sys.executable, "-c", SHY, "--port", str(port)], os.environ, tmp_path / "log", port, "none")
    try:
        assert server.wait_until_ready().port != port
        assert (tmp_path / "starts").read_text().split() == [str(port), str(server.port)]
    finally:
        server.kill()
    assert server.processes() == []
