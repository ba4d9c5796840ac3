# SPDX-License-Identifier: Apache-2.0
"""Two engine cores of a model with experts: a core without requests takes part in the other's steps, on its own pool's null block."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from harness.cases import load_prompts
from harness.engines import MODELS
from harness.matrix import NEWEST, NO_RESERVE
from harness.server import Server

from kvcached.card.card import Card
from kvcached.testing.models import ensure_model
from kvcached.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

TWO_CORES = ("--data-parallel-size", "2", "--api-server-count", "1", "--worker-cls", "harness.ranks_worker.NotingWorker")
SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "KVCACHED_HOST_GRANULARITY": "256KiB",
    "KVCACHED_VIRTUAL": "128MiB",
    "KVCACHED_IPC_NAME": "tiny",
    "KVCACHED_IDLE_TRIM_S": "600",  # what a core got stays to be looked at
    **NO_RESERVE,
}
INSTANCES = ("tiny-dp0", "tiny-dp1")
PAGE_BYTES = 2 * MIB  # 16 blocks of 32 tokens, of which the null block is one
PROMPTS = [prompt for prompt in load_prompts() if 600 < len(prompt) < 1200][:4]  # a byte is a token: each takes a page more


class Cores:
    """A server of two cores: what it said to one prompt and then to the others at once, and what each core held after it."""

    def __init__(self, version: str, folder: Path, elastic: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.server = Server(version, folder, *TWO_CORES, model="mixtral", **SETTINGS | {"ENABLE_KVCACHED": elastic})
        self.tokens: list[list[int]] = []
        try:
            self.server.wait_until_ready()
            first, *others = PROMPTS
            self.tokens.append(self.ask(first))
            self.after_first = self.leases()
            with ThreadPoolExecutor(len(others)) as clients:
                self.tokens += clients.map(self.ask, others)
            self.after_all = self.leases()
            self.stopped = self.server.stop()
        finally:
            if self.server.process.poll() is None:
                self.server.kill()

    def ask(self, prompt: str) -> list[int]:
        status, body = self.server.complete(prompt)
        assert status == 200, body
        tokens: list[int] = body["choices"][0]["token_ids"]
        return tokens

    def leases(self) -> dict[str, int]:
        cards = Card.list_cards(self.server.run_dir)
        return {entry.instance: entry.record.lease_bytes for card in cards for entry in card.live}

    def steps_without_requests(self) -> list[int]:
        return [path.stat().st_size for path in sorted(self.folder.glob("dummies-*"))]


@pytest.fixture(scope="module", params=NEWEST)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cores, Cores]:
    """Unhooked and elastic, one after the other."""
    ensure_model("mixtral", MODELS / "mixtral")
    folder = tmp_path_factory.mktemp("x")
    return Cores(request.param, folder / "stock", "false"), Cores(request.param, folder / "elastic", "true")


def test_tokens_are_those_of_the_unhooked_cores(both: tuple[Cores, Cores]) -> None:
    stock, elastic = both
    assert elastic.tokens == stock.tokens
    assert len(elastic.tokens) == len(PROMPTS) == 4


def test_each_core_took_part_in_the_others_steps(both: tuple[Cores, Cores]) -> None:
    for cores in both:
        steps = cores.steps_without_requests()
        assert len(steps) == 2
        assert min(steps) > 0


def test_each_core_has_memory_of_its_own_and_maps_nothing_for_the_others_steps(both: tuple[Cores, Cores]) -> None:
    """After the first prompt only the core that had it holds its blocks; after all of them both do."""
    stock, elastic = both
    assert stock.after_first == stock.after_all == {}
    first, last = elastic.after_first, elastic.after_all
    assert set(first) == set(last) == set(INSTANCES)
    assert min(first.values()) == PAGE_BYTES  # the null block's
    assert max(first.values()) > PAGE_BYTES
    assert min(last.values()) > PAGE_BYTES


def test_they_stop_in_good_order(both: tuple[Cores, Cores]) -> None:
    for cores in both:
        assert cores.stopped, cores.server.log[-6000:]
    assert both[1].leases() == {}
