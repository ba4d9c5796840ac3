# SPDX-License-Identifier: Apache-2.0
"""`examples/ray_serve.py` on a Ray cluster of two nodes: real vLLM engines behind Ray Serve, on one card, and the gateway before them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gateway import SERVING, SHAPE, call, lines_of, wait_for
from serving import MIB, MODEL, RELEASES, ROOT, missing

from kvcached import processes
from kvcached.card.card import Card
from kvcached.controller.ports import free_port
from kvcached.testing.kinds import VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.card.view import EntryView

RAY = ROOT / ".cache" / "ray"
PYTHON = str(VLLM.python(ROOT))
TIMEOUT_S = 1_800
QUESTIONS = [f"Write one sentence about the number {number}." for number in range(8)]
NO_RAY = "" if RAY.is_dir() else "no Ray beside the engine environment; make engines sets it up"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(3 * TIMEOUT_S),
    pytest.mark.skipif(bool(missing(VLLM) or NO_RAY), reason=missing(VLLM) or NO_RAY),
]


class Cluster:
    """Two Ray nodes, and what is deployed on them by the example, as its user does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.port = free_port()
        card = {"RUN_DIR": self.run_dir, "HOST_DIR": folder / "host", "HOST_CAPACITY": 512 * MIB, "HOST_GRANULARITY": "64KiB"}
        self._variables = VLLM.variables(RELEASES[VLLM], os.environ) | {f"KVCACHED_{name}": str(value) for name, value in card.items()}
        self._variables |= {"PYTHONPATH": f"{RELEASES[VLLM]}:{RAY}", "RAY_USAGE_STATS_ENABLED": "0"}
        self._variables["VLLM_CPU_KVCACHE_SPACE"] = "1"  # without KVCacheD vLLM takes nearly all memory, and refuses what is in use
        with (folder / "nodes.log").open("wb") as log:
            command = [PYTHON, str(Path(__file__).with_name("ray_nodes.py"))]
            self.nodes = subprocess.Popen(
                command, env=self._variables, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
        assert self.nodes.stdout is not None
        self._variables["RAY_ADDRESS"] = self.nodes.stdout.readline().strip()
        assert self._variables["RAY_ADDRESS"], (folder / "nodes.log").read_text()

    def deploy(self, name: str, *options: str) -> list[str]:
        """Run the example for one model. Returns the lines for the gateway's file."""
        command = [PYTHON, str(ROOT / "examples" / "ray_serve.py"), f"{name}={MODEL}", "--gpus", "0.5", "--port", str(self.port), *options]
        command += ["--", *VLLM.options(SHAPE)]
        done = subprocess.run(command, env=self._variables, cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-8_000:]
        lines = done.stdout.splitlines()
        return lines[lines.index("models:") + 1 :]

    def replicas_by_node(self) -> dict[str, int]:
        assert self.nodes.stdin is not None
        assert self.nodes.stdout is not None
        print(file=self.nodes.stdin, flush=True)
        return dict(json.loads(self.nodes.stdout.readline()))

    def pools(self) -> list[EntryView]:
        """On the card, of live processes."""
        return [entry for card in Card.list_cards(self.run_dir) for entry in card.live] if self.run_dir.exists() else []

    def end(self) -> None:
        assert self.nodes.stdin is not None
        assert self.nodes.stdout is not None
        self.nodes.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.nodes.wait(300)
        for pid in processes.of_session(self.nodes.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.wait()
        self.nodes.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("ray"))
    try:
        yield cluster
    finally:
        cluster.end()


@contextlib.contextmanager
def gateway(folder: Path, models: list[str]) -> Iterator[int]:
    """The port of `kvcached serve` with these models."""
    (folder / "models.yaml").write_text("\n".join(["listen: 127.0.0.1:0", "models:", *models, ""]))
    said = folder / "said"
    with said.open("wb") as log:
        command = [sys.executable, "-m", "kvcached.cli.main", "serve", "models.yaml"]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or SERVING.search(said.read_text()))
        found = SERVING.search(said.read_text())
        assert found is not None, said.read_text()
        yield int(found[1])
    finally:
        process.terminate()
        process.wait(60)


def question(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0, **more}


def answers(port: int, name: str) -> list[str]:
    """To all questions at once, so that every replica is asked."""

    def ask(text: str) -> str:
        status, body = call(port, "POST", "/v1/chat/completions", question(name, text))
        assert status == 200, body
        return str(json.loads(body)["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        return list(threads.map(ask, QUESTIONS))


def streamed(port: int, name: str, text: str) -> str:
    lines = [line[6:] for line in lines_of(port, "/v1/chat/completions", question(name, text, stream=True)) if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


def test_engines_behind_ray_serve_share_a_card_and_answer_as_unhooked_ones(cluster: Cluster, tmp_path: Path) -> None:
    lines = cluster.deploy("chat", "--replicas", "2")
    assert sorted(cluster.replicas_by_node().values()) == [1, 1], "one on each node"
    lines += cluster.deploy("plain", "--not-elastic")
    assert sum(cluster.replicas_by_node().values()) == 3
    with gateway(tmp_path, lines) as port:
        expected = answers(port, "plain")
        assert answers(port, "chat") == expected
        assert streamed(port, "chat", QUESTIONS[0]) == streamed(port, "plain", QUESTIONS[0]) == expected[0]
    assert len(set(expected)) > 1
    pools = cluster.pools()
    assert len({pool.instance for pool in pools}) == len(pools) == 2
    assert all(pool.name == "chat" and pool.record.lease_bytes > 0 for pool in pools), pools
    cluster.end()
    wait_for(lambda: not cluster.pools())
