# SPDX-License-Identifier: Apache-2.0
"""A real OpenAI server of an engine as its users start it: front end, scheduler and worker in processes of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, ClassVar

from kvcached import processes
from kvcached.controller.ports import free_port, is_refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 180.0
LOG_TAIL_CHARACTERS = 6_000


class Server:
    """Started when it is made, ready when `wait_until_ready` returns; `kill` ends every process of it.

    `command` begins with the interpreter; `log_path` gets what the server says, and its folder is where it runs. Raises
    `AssertionError`, with the end of the log, when it does not become ready.
    """

    always: ClassVar[dict[str, Any]] = {}
    """What the body of each request has besides."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_path: Path, port: int, model: str) -> None:
        self.port = port
        self.model = model
        self.log_path = log_path
        self._command = command
        self._environment = dict(environment)
        self.process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self.log_path.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_until_ready(self) -> Self:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if is_refused(self.port, self.log.splitlines()):
                self._take_another_port()
            if self.process.poll() is not None:
                raise AssertionError(f"{self.model} ended with {self.process.returncode}:\n{self.log[-LOG_TAIL_CHARACTERS:]}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.call("GET", "/health")[0] == 200:
                    return self
            time.sleep(0.5)
        raise AssertionError(f"{self.model} was not ready within {START_TIMEOUT_S} s:\n{self.log[-LOG_TAIL_CHARACTERS:]}")

    def _take_another_port(self) -> None:
        """Nobody can keep a port for a server that binds it a minute later."""
        self.kill()
        old, self.port = str(self.port), free_port()
        self._command = [str(self.port) if part == old else part for part in self._command]
        self.process = self._launch()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = ANSWER_TIMEOUT_S) -> tuple[int, str]:
        """Status and text. Raises `OSError` or `HTTPException` when the server goes away."""
        with contextlib.closing(self._request(method, path, body, timeout_s)) as connection:
            response = connection.getresponse()
            return response.status, response.read().decode()

    def complete(self, prompt: str, max_tokens: int = 24, **more: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of a completion that is exactly `max_tokens` long."""
        status, text = self.call("POST", "/v1/completions", self._body(prompt, max_tokens, more))
        return status, json.loads(text)

    def stream(self, prompt: str, max_tokens: int, pieces: int | None = None) -> list[str]:
        """The text of a streamed answer, piece by piece; after `pieces` of them the client hangs up."""
        found: list[str] = []
        body = self._body(prompt, max_tokens, {"stream": True})
        with contextlib.closing(self._request("POST", "/v1/completions", body, ANSWER_TIMEOUT_S)) as connection:
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:])["choices"][0]["text"])
                if pieces is not None and len(found) >= pieces:
                    break
        return found

    def _body(self, prompt: str, max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return body | self.always | more

    def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        return connection

    def processes(self) -> list[int]:
        """All processes of the server's session that are not dead already."""
        return processes.of_session(self.process.pid)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """SIGTERM, as an operator does. False when a process of it did not end in time (all are killed then)."""
        self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self.processes() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.1)
        gone = not self.processes()
        self.kill()
        return gone

    def kill(self) -> None:
        """SIGKILL to every process at once."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (pids := self.processes()) and time.monotonic() < deadline:  # again for those that one of them had just begun
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()
