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


def note(text: str) -> None:
    with (FOLDER / "calls").open("a") as file:
        file.write(text + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        note(self.path)
        trouble = FOLDER / "trouble"
        if self.path.startswith("/wake_up") and trouble.exists():
            trouble.unlink()
            self.answer(500, {"error": "CUDA out of memory"})
        elif self.path.startswith("/v1/"):
            self.generate(json.loads(body))
        else:
            self.answer(200, {})

    def generate(self, given: dict[str, object]) -> None:
        while (FOLDER / "hold").exists():
            time.sleep(0.02)
        if not given.get("stream"):
            self.answer(200, {"pid": os.getpid()})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number in range(int(str(given.get("n", 3)))):
            self.wfile.write(f"data: {number}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.02)

    def answer(self, status: int, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    note("start")
    if (FOLDER / "die").exists():
        print((FOLDER / "die").read_text() or "it cannot start", flush=True)
        sys.exit(3)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    taken = FOLDER / "taken"
    if taken.exists():
        taken.unlink()
        print(f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {port}): address already in use", flush=True)
        time.sleep(600)
    while (FOLDER / "linger").exists():
        time.sleep(0.05)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (FOLDER / "child").write_text(str(child.pid))
    print(f"ready as {os.environ['KVCACHED_IPC_NAME']}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
