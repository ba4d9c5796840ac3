# SPDX-License-Identifier: Apache-2.0
"""What mapping beside a decode loop costs the loop: time to launch a step, and the step itself, while pages come and go.

    python benchmarks/launch_latency.py --card cuda:0 --json FILE
    python benchmarks/launch_latency.py --card host:0        no GPU needed: shows only that it runs

A step is a few hundred small kernels, launched one by one or as one captured graph. Three neighbours: none; a thread of the same
process that maps and unmaps pages all the time; another process on the same card that does. Each maps and unmaps `--pages` pages
and more, in batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.units import GIB, MIB
from kvcached.vmm.api import ArenaConfig, Run
from kvcached.vmm.native import open_device

try:
    import torch
except ImportError as error:
    raise SystemExit(f"this benchmark needs torch, as in an engine's environment: {error}") from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KERNELS = 300
PAGE_BYTES = 16 * MIB
BATCHES = (1, 8, 64)
LEAST_STEPS = 200


@dataclass
class Row:
    """Microseconds. `launch`: until the step's last kernel is queued; `step`: until it has run, by the host's clock."""

    steps: str
    neighbour: str
    batch: int
    launch_median: float
    launch_p99: float
    step_median: float
    step_p99: float
    count: int
    pages_a_second: float


def churn(card: str, host_dir: str, batch: int, pages: int, stop: Callable[[], bool]) -> float:
    """Map and unmap `pages` pages, `batch` at a time, again and again until `stop`. Returns pages a second."""
    backend, _, ordinal = card.partition(":")
    Path(host_dir).mkdir(exist_ok=True)
    host = {"host_dir": Path(host_dir), "host_capacity_bytes": 4 * GIB, "host_granularity_bytes": 2 * MIB} if backend == "host" else {}
    device = open_device(backend, int(ordinal), **host)
    arena = device.create_arena(ArenaConfig(PAGE_BYTES, batch))
    runs = [Run(page, 1) for page in range(batch)]
    done, start = 0, time.perf_counter()
    while done < pages or not stop():
        arena.map(runs)
        arena.unmap(runs)
        done += batch
    rate = done / (time.perf_counter() - start)
    arena.close()
    device.close()
    return rate


@contextmanager
def nobody(_card: str, _host_dir: str, _batch: int, _pages: int) -> Iterator[list[float]]:
    yield [0.0]


@contextmanager
def a_thread(card: str, host_dir: str, batch: int, pages: int) -> Iterator[list[float]]:
    stop, rates = threading.Event(), []
    thread = threading.Thread(target=lambda: rates.append(churn(card, host_dir, batch, pages, stop.is_set)))
    thread.start()
    try:
        yield rates
    finally:
        stop.set()
        thread.join()


@contextmanager
def a_process(card: str, host_dir: str, batch: int, pages: int) -> Iterator[list[float]]:
    command = [sys.executable, __file__, "--card", card, "--pages", str(pages), "--churn", str(batch), "--host-dir", host_dir]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()  # it has its device and begins
    rates: list[float] = []
    try:
        yield rates
    finally:
        process.stdin.close()
        rates.append(float(process.stdout.readline() or 0))
        process.wait(30)


NEIGHBOURS = {"nobody": nobody, "a thread": a_thread, "a process": a_process}


def one_by_one(device: torch.device) -> Callable[[], None]:
    state = torch.zeros(4096, device=device)

    def step() -> None:
        for _ in range(KERNELS):
            state.add_(1.0)

    return step


def as_a_graph(device: torch.device) -> Callable[[], None]:
    step = one_by_one(device)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(step: Callable[[], None], wait: Callable[[], None], seconds: float) -> tuple[list[float], list[float]]:
    launches, steps = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(steps) < LEAST_STEPS:
        start = time.perf_counter()
        step()
        launches.append((time.perf_counter() - start) * 1e6)
        wait()
        steps.append((time.perf_counter() - start) * 1e6)
    return launches, steps


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    on_card = arguments.card.startswith("cuda")
    device = torch.device(arguments.card if on_card else "cpu")
    wait = (lambda: torch.cuda.synchronize(device)) if on_card else (lambda: None)
    kinds = {"one by one": one_by_one(device), **({"graph": as_a_graph(device)} if on_card else {})}
    for kind, step in kinds.items():
        measure(step, wait, 0.2)
        for name, neighbour in NEIGHBOURS.items():
            for batch in BATCHES if neighbour is not nobody else (0,):
                with neighbour(arguments.card, arguments.host_dir, batch, arguments.pages) as rates:
                    launches, steps = measure(step, wait, arguments.seconds)
                times = (statistics.median(launches), p99(launches), statistics.median(steps), p99(steps))
                yield Row(kind, name, batch, *times, len(steps), rates[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="cuda:0")
    parser.add_argument("--pages", type=int, default=1000, help="the least number of pages that a neighbour maps and unmaps")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--churn", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host-dir", default=tempfile.gettempdir() + "/kvcached-launch-latency", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.churn:
        stop = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
        print("begin", flush=True)
        print(churn(arguments.card, arguments.host_dir, arguments.churn, arguments.pages, stop.is_set), flush=True)
        return
    found = []
    for row in rows(arguments):
        found.append(row)
        print(
            f"{row.steps:11} beside {row.neighbour:9} batch {row.batch:2}: launch {row.launch_median:8.0f} us (p99 {row.launch_p99:8.0f}), "
            f"step {row.step_median:8.0f} us (p99 {row.step_p99:8.0f}), {row.count} steps, {row.pages_a_second:.0f} pages/s", flush=True
        )  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
