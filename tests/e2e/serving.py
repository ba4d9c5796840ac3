# SPDX-License-Identifier: Apache-2.0
"""Real OpenAI servers on one host card, a watcher of the card, and the load between them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcached.card.card import Card

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
MODEL = ROOT / ".cache" / "models" / "smollm2"
RELEASE = ROOT / ".cache" / "engines" / "vllm-0.32.0"
MIB = 1 << 20
START_TIMEOUT_S = 240
ANSWER_TIMEOUT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class CardOfEngines:
    """A run directory, the engines started in it, and a thread that looks at the card twenty times a second."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.budget_bytes = budget_bytes
        self.engines: list[Server] = []
        self.samples: list[tuple[float, dict[str, int]]] = []
        self.overcommitted: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def start(self, name: str) -> Server:
        server = Server(self, name)
        self.engines.append(server)
        return server

    def leases(self) -> dict[str, int]:
        """Bytes leased now by live pools, by name."""
        cards = Card.list_cards(self.run_dir) if self.run_dir.exists() else []
        return {entry.name: entry.record.lease_bytes for card in cards for entry in card.live}

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            leases = self.leases()
            self.samples.append((time.monotonic(), leases))
            if sum(leases.values()) > self.budget_bytes:
                self.overcommitted.append(str(leases))

    def kvctl(self, *arguments: str) -> dict[str, object]:
        """The real command; fails the test when it exits with an error."""
        done = subprocess.run(
            [sys.executable, "-m", "kvcached.cli.kvctl", *arguments, "--json"],
            env={**os.environ, "KVCACHED_RUN_DIR": str(self.run_dir)}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"kvctl {arguments} exited {done.returncode}: {done.stderr}"
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
        return answer

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()
        self._stop.set()
        self._thread.join(5)


class Server:
    """One `vllm` OpenAI server, unchanged command line, elastic by its environment alone."""

    def __init__(self, card: CardOfEngines, name: str) -> None:
        self.name = name
        self.port = free_port()
        self.log = card.folder / f"{name}-{self.port}.log"
        settings = {
            "RUN_DIR": card.run_dir,
            "HOST_DIR": card.folder / "host",
            "HOST_CAPACITY": card.budget_bytes + 64 * MIB,
            "HOST_GRANULARITY": "64KiB",
            "BUDGET": card.budget_bytes,
            "MIN_RESERVED_PAGES": 1,
            "MAX_RESERVED_PAGES": 2,
            "IPC_NAME": name,
            "NAME": name,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": str(RELEASE),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "ENABLE_KVCACHED": "true",
            **{f"KVCACHED_{key}": str(value) for key, value in settings.items()},
        }
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--host", "127.0.0.1", "--port", str(self.port),
            "--served-model-name", name, "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--block-size", "32",
            "--dtype", "float32", "--seed", "0",
        ]  # fmt: skip
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self) -> Server:
        end = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            assert self.process.poll() is None, f"{self.name} ended:\n{self.log.read_text(errors='replace')[-6000:]}"
            assert time.monotonic() < end, f"{self.name} is not up:\n{self.log.read_text(errors='replace')[-6000:]}"
            time.sleep(0.5)
        return self

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def ask(self, prompt: str, tokens: int = 24) -> str:
        """The completion. Raises `OSError` for anything but an answer."""
        body = json.dumps({"model": self.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            choice = json.load(answer)["choices"][0]
        assert choice["finish_reason"] == "length", choice
        return str(choice["text"])

    def burst(self, prompts: list[str], tokens: int = 24) -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens), prompts))

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(30)
