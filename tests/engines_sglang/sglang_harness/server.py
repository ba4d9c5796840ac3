# SPDX-License-Identifier: Apache-2.0
"""A real `python -m sglang.launch_server` as its users start it: front end, scheduler and detokenizer in processes of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from sglang_harness.cases import ROOT, environment

PROC = Path("/proc")
START_S = 400
STOP_S = 40


class Server:
    """Started when it is made, ready when `wait_until_ready` returns; `kill` ends every process of it."""

    def __init__(self, version: str, folder: Path, *options: str, **settings: str) -> None:
        self.port = free_port()
        self.run_dir = folder / "run"
        self.log_path = folder / "server.log"
        command = ["-m", "sglang.launch_server", "--model-path", str(ROOT / ".cache" / "models" / "llama"), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--grammar-backend", "none", "--dtype", "float32", "--context-length", "2048"]
        command += ["--page-size", "16", "--max-running-requests", "8", "--max-total-tokens", "16384", "--chunked-prefill-size", "256"]
        command += ["--mem-fraction-static", "0.2", "--disable-cuda-graph", "--random-seed", "1", "--sleep-on-idle", *options]
        ours = {"ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(self.run_dir), "KVCACHED_IDLE_TRIM_S": "0.3"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [str(ROOT / ".venv-sglang" / "bin" / "python"), *command],
                env=environment(version, ours | settings),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_ready(self) -> Server:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log[-6000:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.call("GET", "/health")[0] == 200:
                    return self
            time.sleep(0.5)
        raise AssertionError(f"the server was not ready within {START_S} s:\n{self.log[-6000:]}")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 120) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def complete(self, prompt: str, max_tokens: int = 24) -> tuple[int, dict[str, Any]]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, text = self.call("POST", "/v1/completions", body)
        return status, json.loads(text)

    def stream(self, prompt: str, max_tokens: int, pieces: int | None = None) -> list[str]:
        """The text of a streamed answer, piece by piece; after `pieces` of them the client hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        found: list[str] = []
        for line in response:
            if line.startswith(b"data: {"):
                found.append(json.loads(line[6:])["choices"][0]["text"])
            if pieces is not None and len(found) >= pieces:
                break
        connection.close()
        return found

    def processes(self) -> list[int]:
        """All processes of the server's session that are not dead already."""
        found = []
        for stat in (path / "stat" for path in PROC.iterdir() if path.name.isdigit()):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    def stop(self) -> bool:
        """SIGTERM, as an operator does. False when it did not end in time (it is killed then)."""
        self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while self.processes() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.1)
        gone = not self.processes()
        self.kill()
        return gone

    def kill(self) -> None:
        """SIGKILL to every process at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
