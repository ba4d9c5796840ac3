# SPDX-License-Identifier: Apache-2.0
"""Real OpenAI servers on one host card, a watcher of the card, and the load between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.card.card import Card
from kvcached.controller.ports import free_port
from kvcached.testing import servers
from kvcached.testing.kinds import SGLANG, VLLM, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.testing.kinds import EngineKind

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "smollm2"
RELEASES = {VLLM: ROOT / ".cache" / "engines" / "vllm-0.32.0", SGLANG: ROOT / ".cache" / "engines" / "sglang-0.5.23"}
MIB = 1 << 20
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4  # SmolLM2: layers, K and V, heads, head size, float32
SHAPE = Shape(8, 512)
FULL_BYTES = SHAPE.sequences * SHAPE.sequence_tokens * TOKEN_BYTES  # what one engine would reserve for its sequences


def missing(*kinds: EngineKind) -> str:
    """What has to be set up for these engines; empty when all is there."""
    absent = [kind for kind in kinds if not (kind.python(ROOT).exists() and RELEASES[kind].exists() and MODEL.exists())]
    return ", ".join(f"no environment with {kind.title}; {kind.make_target} sets it up" for kind in absent)


class CardOfEngines:
    """A run directory, the engines started in it, and a thread that looks at the card twenty times a second."""

    def __init__(self, folder: Path, budget_bytes: int, model: Path = MODEL) -> None:
        self.folder = folder
        self.model = model
        self.run_dir = folder / "run"
        self.budget_bytes = budget_bytes
        self.engines: list[Server] = []
        self.samples: list[tuple[float, dict[str, int]]] = []
        self.overcommitted: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def start(self, name: str, kind: EngineKind = VLLM, shape: Shape = SHAPE, options: Sequence[str] = (), **settings: object) -> Server:
        """`settings` are of KVCacheD, in addition to those of the card."""
        server = Server(self, name, kind, shape, options, settings)
        self.engines.append(server)
        return server

    def leases(self) -> dict[str, int]:
        """Bytes leased now by live pools, by name, all at one moment."""
        while True:
            cards = Card.list_cards(self.run_dir) if self.run_dir.exists() else []
            if all(card.consistent or card.problem for card in cards):
                return {entry.name: entry.record.lease_bytes for card in cards for entry in card.live}

    def peak_bytes(self, name: str) -> int:
        return max(leases.get(name, 0) for _, leases in self.samples)

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
            env={**os.environ, "KVCACHED_RUN_DIR": str(self.run_dir)}, capture_output=True, text=True, timeout=600, check=False,
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


class Server(servers.Server):
    """An engine on a card, unchanged command line, elastic by its environment alone."""

    def __init__(
        self, card: CardOfEngines, name: str, kind: EngineKind, shape: Shape, options: Sequence[str], settings: dict[str, object]
    ) -> None:
        self.name = name
        self.kind = kind
        port = free_port()
        of_card = {
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
            **kind.variables(RELEASES[kind], os.environ),
            **(STRICT if kind is SGLANG else {}),
            "ENABLE_KVCACHED": "true",
            **{f"KVCACHED_{key}": str(value) for key, value in {**of_card, **settings}.items()},
        }
        command = [str(kind.python(ROOT)), *kind.arguments(card.model, name, port, shape), *options]
        super().__init__(command, environment, card.folder / f"{name}-{port}.log", port, name)

    def ask(self, prompt: str, tokens: int = 24) -> str:
        """The completion. Raises `OSError` or `HTTPException` for anything but an answer."""
        status, answer = self.complete(prompt, tokens)
        if status != 200:
            raise ConnectionError(f"{self.name} said {status}: {answer}")
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "length", choice
        return str(choice["text"])

    def burst(self, prompts: list[str], tokens: int = 24) -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, tokens), prompts))


STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}
"""SGLang's own checks for slots that leak; one that finds something ends the scheduler."""

TOPICS = [
    "the lighthouse keeper",
    "a river that forgot its name",
    "the last train of the evening",
    "an orchard under snow",
    "two clockmakers",
    "the library beneath the harbour",
    "a letter that arrived late",
    "the gardener and the storm",
    "a map with one road",
    "the quiet parade",
    "a bridge of glass",
    "the winter market",
]
SEASONS = ["in spring", "in high summer", "in autumn", "in the long winter"]


def prompts(turn: int) -> list[str]:
    """Eight long prompts; half of them come again in the next turn, so that prefixes are worth keeping."""
    subjects = [f"{TOPICS[(turn * 4 + index) % len(TOPICS)]} {SEASONS[(turn * 4 + index) // len(TOPICS) % 4]}" for index in range(8)]
    return [f"Here are notes about {subject}. " * 30 + f"Tell the story of {subject} in a few calm sentences:" for subject in subjects]


class Load:
    """Bursts to engines; engines of one kind must always answer the same prompt in the same words."""

    def __init__(self) -> None:
        self.turn = 0
        self.asked: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self._said: dict[tuple[str, str], str] = {}
        self._differed: list[str] = []

    def burst(self, engine: Server, turn: int | None = None) -> None:
        questions = prompts(self.turn if turn is None else turn)
        self.asked[engine.name] += len(questions)
        for question, text in zip(questions, engine.burst(questions), strict=True):
            if self._said.setdefault((engine.kind.package, question), text) != text:
                self._differed.append(f"{engine.name}: {question[-80:]!r}")
            self.served[engine.name] += 1

    def take_turns(self, engines: list[Server], seconds: float) -> None:
        """One engine after the other, every third burst to all of them at once; two such rounds at least."""
        end = time.monotonic() + seconds
        first = self.turn
        while time.monotonic() < end or self.turn < first + 6:
            busy = engines if self.turn % 3 == 2 else [engines[self.turn % len(engines)]]
            threads = [threading.Thread(target=self.burst, args=(engine,)) for engine in busy]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.turn += 1
        self.check()

    def check(self) -> None:
        assert self.served == self.asked, "a request failed"
        assert self._differed == [], "the same prompt was answered differently"
