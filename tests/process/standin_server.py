# SPDX-License-Identifier: Apache-2.0
"""A server process with the paths of vLLM's that the launcher uses, and no model: what it is asked it writes to a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(os.environ["STANDIN_FOLDER"])
MIB = 1 << 20
memory: list[Memory] = []


def note(text: str) -> None:
    with (FOLDER / "calls").open("a") as file:
        file.write(text + "\n")


class Memory:
    """A real pool on a host card; it has as many blocks of 1 MiB as the file `pool` says, from each request on."""

    def __init__(self) -> None:
        import kvcached

        capacity = {"host_capacity_bytes": 128 * MIB, "host_granularity_bytes": 65536, "budget": "64MiB"}
        self.card = kvcached.open_card("host:0", prealloc_enabled=False, handle_cache_mb=0, large_run_mb=0, **capacity)
        self.pool = self.card.open_pool("standin", block_bytes=MIB, blocks=60)
        self.ranges: list[tuple[int, int]] = []

    def adjust(self) -> None:
        from kvcached.errors import PoolExhausted

        self.pool.give(self.ranges)
        self.ranges = []
        wanted = int((FOLDER / "pool").read_text())
        while wanted and not self.ranges:
            try:
                self.ranges = self.pool.take(wanted)
            except PoolExhausted:  # a card that is new grants less for a while
                time.sleep(0.1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        note(self.path)
        trouble = FOLDER / "trouble"
        while self.path.startswith("/sleep") and (FOLDER / "restless").exists():
            time.sleep(0.02)
        if self.path.startswith("/wake_up") and trouble.exists():
            trouble.unlink()
            self.answer(500, {"error": "CUDA out of memory"})
        elif self.path.startswith("/v1/"):
            for one in memory:
                one.adjust()
            self.generate(json.loads(body))
        else:
            self.answer(200, {})

    def generate(self, given: dict[str, object]) -> None:
        for line in map(str, given.get("say", ())):  # type: ignore[call-overload]
            print(line, flush=True)
        while (FOLDER / "hold").exists():
            time.sleep(0.02)
        if not given.get("stream"):
            self.answer(200, {"pid": os.getpid()})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in self.chat(given) if "messages" in given else map(str, range(int(str(given.get("n", 3))))):
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.02)

    def chat(self, given: dict[str, object]) -> list[str]:
        """It says again what it was told last, word by word."""
        messages = given["messages"]
        assert isinstance(messages, list)
        words = [f"{word} " for word in messages[-1]["content"].split()]
        return [*(json.dumps({"choices": [{"delta": {"content": word}}]}) for word in words), "[DONE]"]

    def answer(self, status: int, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that did not wait is no news, and what is said here is what tests look for."""


def main() -> None:
    note("start")
    if (FOLDER / "die").exists():
        print((FOLDER / "die").read_text() or "it cannot start", flush=True)
        sys.exit(3)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    taken = FOLDER / "taken"
    if taken.exists():
        taken.unlink()
        asked = (FOLDER / "squatter.log").open("ab")
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
        other = subprocess.Popen(command, start_new_session=True, stdout=asked, stderr=asked)
        (FOLDER / "squatter").write_text(str(other.pid))
        while (FOLDER / "silent").exists():  # it has not tried yet
            time.sleep(0.02)
        print(f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use", flush=True)
        time.sleep(600)
    while (FOLDER / "linger").exists():
        time.sleep(0.05)
    if (FOLDER / "say").exists():
        print((FOLDER / "say").read_text(), flush=True)
    if (FOLDER / "pool").exists():
        memory.append(Memory())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (FOLDER / "child").write_text(str(child.pid))
    print(f"ready as {os.environ['KVCACHED_IPC_NAME']}", flush=True)
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
