# SPDX-License-Identifier: Apache-2.0
"""Engines with several workers: what each rank holds, as the cards' records say, and what becomes of it when a process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cases import load_prompts
from kvcached.card.card import Card
from kvcached.errors import PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from harness.scenarios import Engine
    from kvcached.core.report import PoolCounts

WAIT_S = 120.0
ANSWER_S = 10.0
PROC = Path("/proc")
STOCK_WORKER = "harness.ranks_worker.ProfiledWorker"
NEIGHBOUR = """
import sys, kvcached
blocks = int(sys.argv[1]) >> 16
with kvcached.open_card("host:1") as card, card.open_pool("neighbour", block_bytes=65536, blocks=blocks) as pool:
    pool.take(blocks)
    print("holds", flush=True)
    sys.stdin.read()
"""


def run_dir() -> Path:
    return Path(os.environ["KVCACHED_RUN_DIR"])


def by_rank() -> dict[int, dict[str, int]]:
    """Each rank's entry: lease, mapped bytes, kept handles, pid."""
    entries = [entry.record for card in Card.list_cards(run_dir()) for entry in card.live if entry.instance.startswith("llama")]
    return {
        record.rank: {"lease": record.lease_bytes, "mapped": record.mapped_bytes, "handles": record.handles_bytes, "pid": record.pid}
        for record in sorted(entries, key=lambda record: record.rank)
    }


def wait_for(condition: Callable[[], Any]) -> bool:
    """Whether it came to hold in time."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def at_rest(engine: Engine, condition: Callable[[PoolCounts], bool] = lambda counts: True) -> dict[int, dict[str, int]]:
    """Each rank's entry as soon as the condition holds, nothing is empty or on its way in or out, and all ranks show what they lease, which
    each does in its own time. Empty where that did not come to be."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        counts = engine.memory.pool.counts()
        entries = by_rank()
        rests = counts.parked_pages == counts.mapping_pages == counts.unmapping_pages == 0 and condition(counts)
        if rests and all(entry["lease"] == entry["mapped"] for entry in entries.values()):
            return entries
        time.sleep(0.02)
    return {}


class PeakByRank:
    """The most bytes that each rank mapped while the block runs. A lease may be higher for a moment: what one rank gets and another
    does not is given back. All ranks are asked at the same time: what they show by themselves they show at moments of their own, and a
    page may come and go between two of these."""

    def __init__(self, engine: Engine) -> None:
        self._group = None if engine.memory is None else engine.memory._group
        self._peaks: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakByRank:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._group is not None and not self._stop.wait(0.02):
            with contextlib.suppress(PeerTimeout):
                for rank, status in enumerate(self._group.status_by_rank(ANSWER_S)):
                    self._peaks[rank] = max(self._peaks.get(rank, 0), status.mapped_bytes)

    @property
    def bytes(self) -> list[int]:
        return [mapped for _, mapped in sorted(self._peaks.items())]


@contextlib.contextmanager
def neighbour_on_the_second_card(size_bytes: int) -> Iterator[None]:
    """Another process that holds so much of `host:1`, for good."""
    command = [sys.executable, "-c", NEIGHBOUR, str(size_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        said = process.stdout.readline()
        assert said == "holds\n", said
        yield
    finally:
        process.stdin.close()
        process.wait(WAIT_S)


def device_files(pid: int | str = "self") -> list[str]:
    """Open files of a process that belong to a card's device: a process without any has no device context."""
    links = []
    for link in (PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return [link for link in links if "kvcached-host" in link]


def served(engine: Engine) -> dict[str, Any]:
    """All prompts; then all of them again under a limit so low that requests are preempted. Each rank's memory at every stage."""
    prompts = load_prompts()[: engine.case.prompts]
    with PeakByRank(engine) as peak:
        tokens = engine.tokens(prompts)
    result: dict[str, Any] = {"tokens": tokens, "hits": engine.metric("vllm:prefix_cache_hits")}
    if engine.memory is None:
        return result
    after = [entry["lease"] for entry in at_rest(engine).values()]
    look = {"peak": peak.bytes, "after": after, "line": engine.memory.describe()}
    engine.limit(engine.case.limit_bytes)
    engine.wait_for(lambda look: look["held_pages"] * look["step_bytes"] <= engine.case.limit_bytes)
    with PeakByRank(engine) as peak:
        tight = engine.tokens(prompts)
    look |= {"tight_peak": peak.bytes, "preemptions": engine.metric("vllm:num_preemptions"), "tight_tokens": tight}
    look["counted"] = engine.memory.pool.tally.preemptions
    engine.limit(1 << 60)
    engine.llm.reset_prefix_cache()
    engine.tokens(["?"], max_tokens=1)  # in this process nobody processes the last step in flight until there is a next request
    engine.llm.reset_prefix_cache()
    empty = at_rest(engine, lambda counts: counts.held_pages == 1)
    look |= {
        "empty": empty,
        "step_bytes": engine.memory.pool.geometry.release_step_bytes,
        "device_files": device_files(),
        "pids": [entry["pid"] for entry in by_rank().values()],
    }
    return result | look | {"worker_files": [len(device_files(pid)) for pid in look["pids"]]}


def served_until_a_worker_dies(engine: Engine) -> dict[str, Any]:
    """Then again with less memory on the second card than on the first; then a worker is killed in mid-work."""
    result = served(engine)
    prompts = load_prompts()[: engine.case.prompts]
    with neighbour_on_the_second_card(engine.case.neighbour_bytes), PeakByRank(engine) as peak:
        result |= {"uneven_tokens": engine.tokens(prompts), "uneven_peak": peak.bytes}
    result["uneven_preemptions"] = engine.metric("vllm:num_preemptions") - result["preemptions"]
    return result | kill_worker(engine, prompts)


def kill_worker(engine: Engine, prompts: list[str]) -> dict[str, Any]:
    pid = by_rank()[1]["pid"]
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + WAIT_S:
            engine.llm.reset_prefix_cache()
            engine.tokens(prompts)
        said = "the engine went on"
    except Exception as error:  # noqa: BLE001  # vLLM raises several kinds; what is judged is that it ends, and what was logged
        said = f"{type(error).__name__}: {error}"
    ended_s = time.monotonic() - begin
    engine.llm.llm_engine.engine_core.shutdown()
    nothing_left = wait_for(lambda: not by_rank())
    return {"said": said, "ended_s": ended_s, "nothing_left": nothing_left, "left": by_rank(), "failed": str(engine.memory.pool.failed)}


def core_killed(engine: Engine) -> dict[str, Any]:
    """The engine core runs in a process of its own and is killed in mid-work."""
    prompts = load_prompts()[: engine.case.prompts]
    tokens = engine.tokens(prompts)
    workers = [entry["pid"] for entry in by_rank().values()]
    core = parent_of(workers[0])
    files = {"core_files": device_files(core), "worker_files": [len(device_files(pid)) for pid in workers]}
    # vLLM's offline client waits for ever for a core that was killed, elastic or not.
    threading.Thread(target=engine.tokens, args=(prompts,), daemon=True).start()
    time.sleep(0.5)
    os.kill(core, signal.SIGKILL)
    nothing_left = wait_for(lambda: not by_rank())
    return files | {"tokens": tokens, "nothing_left": nothing_left, "left": json.dumps(by_rank())}


def parent_of(pid: int) -> int:
    return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
