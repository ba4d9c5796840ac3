# SPDX-License-Identifier: Apache-2.0
"""Load that moves from one engine of a card to the next, and everything that is seen of the card meanwhile."""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING

from examples.demo.watch import read_sample
from serving import CardOfEngines
from shares import Look

from kvcached.cli.metrics.inquiry import Inquiry
from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from examples.demo.series import Sample
    from serving import Server

    from kvcached.runtime.control import PoolMetrics

SAMPLE_S, LOOK_S = 0.02, 0.2
WORDS = "the a some every that old young quiet river lamp stone train orchard winter letter clock harbour runs keeps finds loses".split()


@dataclass(frozen=True, slots=True)
class Reply:
    """`cached_tokens` of the prompt were found in the prefix cache. `error` is empty when the answer came whole."""

    engine: str
    prompt: str
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


class WatchedCard(CardOfEngines):
    """Looks at the card's record fifty times a second, and at the pools' counters five times, on one clock that begins at 0."""

    def __init__(self, folder: Path, budget_bytes: int, model: Path) -> None:
        self.begun_s = time.monotonic()
        self.seen: list[Sample] = []
        self.looks: list[Look] = []
        super().__init__(folder, budget_bytes, model)
        self._counting = threading.Thread(target=self._count, daemon=True)
        self._counting.start()

    def now_s(self) -> float:
        return time.monotonic() - self.begun_s

    def pool(self, name: str, timeout_s: float = 5.0) -> ControlClient:
        return ControlClient(endpoint_path(self.run_dir, name), timeout_s)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            sample = read_sample(self.run_dir, self.now_s()) if self.run_dir.exists() else None
            if sample is not None:
                self.seen.append(sample)
                if sample.lease_bytes > self.budget_bytes:
                    self.overcommitted.append(str(sample))

    def _count(self) -> None:
        inquiry = Inquiry(1.0)
        while not self._stop.wait(LOOK_S):
            asked_s = self.now_s()
            answers = inquiry.ask({engine.name: endpoint_path(self.run_dir, engine.name) for engine in self.engines})
            self.looks += [Look(asked_s, self.now_s(), name, numbers_of(answer)) for name, answer in answers.items()]
        inquiry.close()

    def close(self) -> None:
        super().close()
        self._counting.join(5)


def numbers_of(metrics: PoolMetrics) -> dict[str, int]:
    """Each counter by its name; evicted blocks by their reason."""
    found = {name: value for name, value in metrics.model_dump().items() if type(value) is int}
    return found | {f"evicted for {why}": blocks for why, blocks in metrics.evicted_blocks.items()}


class Client:
    """Asks one engine, and keeps all replies. Prompts are letters; with a byte tokenizer each of them is a token."""

    def __init__(self, engine: Server, replies: list[Reply], seed: int) -> None:
        self.engine = engine
        self._replies = replies
        self._random = random.Random(seed)

    def prompt(self, tokens: int) -> str:
        """One that was never asked before."""
        words = self._random.choices(WORDS, k=tokens // 2)
        return f"{self._random.random():.12f} {' '.join(words)}"[:tokens]

    def ask(self, prompt: str, tokens: int) -> Reply:
        reply = self._ask(prompt, tokens)
        self._replies.append(reply)
        return reply

    def _ask(self, prompt: str, tokens: int) -> Reply:
        name = self.engine.name
        try:
            status, answer = self.engine.complete(prompt, tokens)
        except (OSError, HTTPException, ValueError) as error:
            return Reply(name, prompt, error=f"{type(error).__name__}: {error}")
        if status != 200 or answer["choices"][0]["finish_reason"] != "length":
            return Reply(name, prompt, error=f"{status}: {answer}")
        usage = answer["usage"]
        cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Reply(name, prompt, answer["choices"][0]["text"], usage["prompt_tokens"], cached_tokens)

    def ask_all(self, prompts: list[str], tokens: int) -> list[Reply]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.ask(prompt, tokens), prompts))

    def step_times(self) -> tuple[float, float]:
        """The sum and the number of the times between two tokens of a request so far: one step, while requests only decode."""
        status, text = self.engine.call("GET", "/metrics")
        assert status == 200, text
        found = {
            word: re.search(rf"^vllm:inter_token_latency_seconds_{word}{{.*}} (\S+)$", text, re.MULTILINE) for word in ("sum", "count")
        }
        numbers = {word: float(match[1]) for word, match in found.items() if match}
        return numbers["sum"], numbers["count"]


class Pressure:
    """So many requests in flight at a time, each followed by the next, until `stop`; use it as a context manager, or `finish` later."""

    def __init__(self, client: Client, in_flight: int, next_request: Callable[[], tuple[str, int]]) -> None:
        self._client = client
        self._next = next_request
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(in_flight)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                prompt, tokens = self._next()
            self._client.ask(prompt, tokens)

    def stop(self) -> None:
        """Start no request any more; those in flight go on."""
        self._stopping.set()

    def finish(self) -> None:
        """Wait until the last one is answered."""
        self.stop()
        for thread in self._threads:
            thread.join()


def core_seconds(engine: Server, title: str = "EngineCore") -> float:
    """Processor time that the engine's scheduler has used so far, or the process that has another title."""
    ticks = [_ticks(pid) for pid in engine.processes() if title in _title(pid)]
    assert len(ticks) == 1, f"{len(ticks)} processes of {engine.name} call themselves {title}"
    return ticks[0] / 100


def _title(pid: int) -> str:
    return _read(pid, "cmdline")


def _ticks(pid: int) -> int:
    user, system = _read(pid, "stat").rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


def _read(pid: int, what: str) -> str:
    with open(f"/proc/{pid}/{what}", encoding="utf-8", errors="replace") as file:
        return file.read()
