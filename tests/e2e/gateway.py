# SPDX-License-Identifier: Apache-2.0
"""`kvcached serve` as a process with real engines on one host card, and what its users ask of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from serving import MIB, MODEL, RELEASES, ROOT

from kvcached import processes
from kvcached.testing.kinds import SGLANG, VLLM, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvcached.testing.kinds import EngineKind

WAIT_S = 900.0
BUDGET_BYTES = 512 * MIB
SHAPE = Shape(8, 1024)
ALPHA, BETA = "alpha", "beta"
SERVING = re.compile(r"^serving .* at http://127\.0\.0\.1:(\d+)/v1", re.MULTILINE)
KINDS = {ALPHA: VLLM, BETA: SGLANG}


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def engine_of(kind: EngineKind, **keys: Any) -> dict[str, Any]:
    """A model of the file: an engine in an environment of its own, told what a CPU needs."""
    return {
        "engine": kind.package,
        "model": str(MODEL),
        "venv": str(ROOT / kind.environment_folder),
        "args": kind.options(SHAPE),
        "env": {**kind.needed, "PYTHONPATH": str(RELEASES[kind])},
        "card": "host:0",
        "preload": True,
        **keys,
    }


class Running:
    """The gateway's process. Its engines run on one thread each, on a card in a folder of their own.

    `models`: as in the file; default: one of each engine. `listen`: the port that it has again after another start; 0: any. `keys`: those
    of the file, of which the first opens all.
    """

    def __init__(
        self,
        folder: Path,
        models: dict[str, dict[str, Any]] | None = None,
        listen: int = 0,
        keys: Sequence[Any] = (),
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.models = {name: engine_of(kind) for name, kind in KINDS.items()} if models is None else models
        self.listen = listen
        self.keys = keys
        self.budget_bytes = budget_bytes
        self.start()

    def start(self) -> None:
        """With the file as `models` says it."""
        self._write()
        settings = {"RUN_DIR": self.run_dir, "HOST_DIR": self.folder / "host", "HOST_CAPACITY": self.budget_bytes + 64 * MIB}
        settings |= {"HOST_GRANULARITY": "64KiB", "BUDGET": self.budget_bytes}
        given = VLLM.variables(RELEASES[VLLM], os.environ).items()
        inherited = {name: value for name, value in given if name not in ("PYTHONPATH", "PYTEST_CURRENT_TEST")}  # which each test has anew
        already = len(self.said())
        with (self.folder / "said").open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvcached.cli.main", "serve", str(self.folder / "models.yaml")],
                env=inherited | {f"KVCACHED_{name}": str(value) for name, value in settings.items()},
                cwd=self.folder,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        wait_for(lambda: self.process.poll() is not None or SERVING.search(self.said()[already:]) is not None)
        found = SERVING.search(self.said()[already:])
        assert found is not None, self.said()
        self.port = int(found[1])

    def said(self) -> str:
        path = self.folder / "said"
        return path.read_text(errors="replace") if path.exists() else ""

    def count(self, words: str) -> int:
        """How often it said so of itself, not of an engine."""
        return sum(words in line for line in self.said().splitlines() if "kvcached.controller" in line)

    def _write(self) -> None:
        given = {"listen": f"127.0.0.1:{self.listen}", "log_dir": str(self.folder / "logs"), "models": self.models}
        given |= {"api_keys": self.keys} if self.keys else {}
        (self.folder / "models.yaml").write_text(json.dumps(given))

    def change(self, name: str, **keys: Any) -> None:
        """Other facts of a model, in the file; returns when they are taken."""
        self.models[name] = {key: value for key, value in {**self.models[name], **keys}.items() if value is not None}
        self._reload()

    def remove(self, name: str) -> None:
        """The same without it."""
        del self.models[name]
        self._reload()

    def _reload(self, said: str = "the file was taken") -> None:
        already = self.count(said)
        self._write()
        self.process.send_signal(signal.SIGHUP)
        wait_for(lambda: self.count(said) > already)

    def mistake(self, name: str, **keys: Any) -> None:
        """A file with a mistake; the next is as it was before."""
        right = self.models[name]
        self.models[name] = {**right, **keys}
        self._reload("the file was not taken")
        self.models[name] = right

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        return call(self.port, method, path, body, self.keys[0] if self.keys else "")

    def facts(self, name: str) -> dict[str, Any]:
        status, body = self.call("GET", f"/health/{name}")
        assert status in (200, 503)
        return dict(json.loads(body))

    def until(self, name: str, state: str) -> None:
        wait_for(lambda: self.process.poll() is not None or self.facts(name)["state"] in (state, "failed"))
        facts = self.facts(name)
        assert facts["state"] == state, f"{facts}\n{self.said()[-6_000:]}"

    def server_of(self, name: str) -> tuple[int, int]:
        """Port and process id of its engine."""
        (server,) = self.facts(name)["servers"]
        return int(server["address"].rpartition(":")[2]), int(server["pid"])

    def close(self) -> list[int]:
        """As an operator ends it. Returns processes of its engines that are left."""
        leaders = [int(server["pid"]) for name in self.models for server in self.facts(name)["servers"]]
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(WAIT_S) == 0, self.said()[-6_000:]
        return [pid for leader in leaders for pid in processes.of_session(leader)]

    def kill(self) -> None:
        """Whatever is left, by the sessions that it started."""
        leaders = [int(pid) for pid in re.findall(r"started as process (\d+)", self.said())]
        self.process.kill()
        self.process.wait()
        for pid in (pid for leader in leaders for pid in processes.of_session(leader)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def call(port: int, method: str, path: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers_of(key))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def lines_of(port: int, path: str, body: dict[str, Any], key: str = "") -> Iterator[bytes]:
    """The lines of an event stream as they come."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("POST", path, json.dumps(body), headers_of(key))
        yield from connection.getresponse()
    finally:
        connection.close()


def headers_of(key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
