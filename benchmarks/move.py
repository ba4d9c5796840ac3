# SPDX-License-Identifier: Apache-2.0
"""Memory that moves from one engine to another: how long it takes, and what the steps of all engines on the card feel of it.

    python benchmarks/move.py --card cuda:0 --gib 10        three processes with pools of an 8B-shaped model; torch needed
    python benchmarks/move.py --gib 0.25 --rounds 3         the host card, with steps that only wait

Each process steps without a pause: one block taken, one given, then 5 ms of work on the device, waited for. Two of them move `--gib` to and
fro: one holds it as cached prefixes, the other takes it in one call, and the first is pressed for it. The third only steps. Pages go one by
one, then in runs of 128 MiB. Then the same amount moves 16 MiB a step, as prompts that come in do. Prints medians of `--rounds`;
`--json FILE`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import kvcached
from kvcached.errors import PoolExhausted
from kvcached.units import GIB, MIB

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BLOCK_BYTES = 2 * MIB  # 16 tokens of an 8B-shaped model: 32 layers x 64 KiB
STEP_S = 0.005
SETTLE_S = 1.0


class Steps:
    """An engine's loop. `longest` of the steps since `reset`: all of one, what it took and gave included."""

    def __init__(self, pool: kvcached.ElasticPool, on_gpu: bool) -> None:
        self._pool = pool
        self._on_gpu = on_gpu
        self._stop = threading.Event()
        self.each_ms: list[float] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _work(self):
        if not self._on_gpu:
            return lambda: time.sleep(STEP_S)
        import torch

        stream = torch.cuda.Stream()

        def spin(cycles: int) -> float:
            begun = time.perf_counter()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
            stream.synchronize()
            return time.perf_counter() - begun

        spin(1_000_000)
        cycles = int(10_000_000 / spin(10_000_000) * STEP_S)
        return lambda: spin(cycles)

    def _run(self) -> None:
        work, held, number = self._work(), self._pool.take(1), 0
        while not self._stop.is_set():
            start = time.perf_counter()
            number += 1
            with contextlib.suppress(PoolExhausted):  # this step's request waits for the next
                taken = self._pool.take(1)
                self._pool.give(held, number)
                held = taken
            work()
            self._pool.advance(number)
            self.each_ms.append((time.perf_counter() - start) * 1e3)

    def reset(self) -> dict[str, float]:
        """Median and longest since the last call."""
        seen, self.each_ms = self.each_ms, []
        return {"median_ms": statistics.median(seen or [0]), "longest_ms": max(seen, default=0.0), "steps": len(seen)}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Engine:
    """In a process of its own; obeys one command after the other."""

    def __init__(self, name: str, card: str, run_dir: str, options: dict[str, object]) -> None:
        self.card = kvcached.open_card(card, run_dir=run_dir, idle_trim_s=3600, **options)
        blocks = int(self.card.budget_bytes // BLOCK_BYTES)
        self.pool = self.card.open_pool(name, block_bytes=BLOCK_BYTES, blocks=blocks, floor=0)
        self.steps = Steps(self.pool, card.startswith("cuda"))
        self.ids: list[int] = []

    def take(self, blocks: int) -> dict[str, float]:
        start = time.perf_counter()
        tries = self._until_taken(blocks)
        return {"ms": (time.perf_counter() - start) * 1e3, "tries": tries, **self.driver()}

    def _until_taken(self, blocks: int) -> int:
        """As a scheduler does: whoever is refused asks again at its next step. Returns how often it asked."""
        for tries in itertools.count(1):
            with contextlib.suppress(PoolExhausted):
                ranges = self.pool.take(blocks)
                self.ids += [block for first, count in ranges for block in range(first, first + count)]
                return tries
            time.sleep(STEP_S)
        raise AssertionError("unreachable")

    def take_in_steps(self, blocks: int) -> dict[str, float]:
        """Eight blocks in each step. What a step waits is what its take took."""
        waits_ms, tries, start = [], 0, time.perf_counter()
        for _ in range(blocks // 8):
            begun = time.perf_counter()
            tries += self._until_taken(8)
            waits_ms.append((time.perf_counter() - begun) * 1e3)
            time.sleep(STEP_S)
        return {
            "ms": (time.perf_counter() - start) * 1e3,
            "refusals": tries - blocks // 8,
            "wait_median_ms": statistics.median(waits_ms),
            "wait_longest_ms": max(waits_ms),
        }

    def driver(self) -> dict[str, float]:
        """Milliseconds in driver calls since the last look, of maps and unmaps."""
        (rank,) = self.pool._owner.operations.metrics().ranks
        now = {"map": rank.map[0] / 1e6, "unmap": rank.unmap[0] / 1e6}
        before, self._driver = getattr(self, "_driver", now), now
        return {f"{name}_ms": now[name] - before[name] for name in now}

    def cache(self) -> None:
        self.pool._pool.give_cached(self.ids, 0, 1)
        self.ids = []

    def drop(self) -> None:
        self.pool.give([(block, 1) for block in self.ids])
        self.ids = []

    def close(self) -> None:
        self.steps.stop()
        self.pool.close()
        self.card.close()


def run_engine(link: Connection, name: str, card: str, run_dir: str, options: dict[str, object]) -> None:
    engine = Engine(name, card, run_dir, options)
    link.send("up")
    while True:
        command, *arguments = link.recv()
        target = engine.steps if command == "reset" else engine
        link.send(getattr(target, command)(*arguments))
        if command == "close":
            return


class Remote:
    def __init__(self, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=run_engine, args=(theirs, *arguments), daemon=True)
        self._process.start()

    def up(self) -> None:
        self._link.recv()

    def ask(self, *command: object):
        self._link.send(command)
        return self._link.recv()


def move(names: list[str], engines: dict[str, Remote], blocks: int, rounds: int, order: str) -> list[dict[str, object]]:
    """From the first engine to the second, and back, and so on."""
    rows = []
    holder, taker, third = names
    engines[holder].ask("take", blocks)
    for _ in range(rounds):
        engines[holder].ask("cache")
        time.sleep(SETTLE_S)
        quiet = {name: engine.ask("reset") for name, engine in engines.items()}
        for engine in engines.values():
            engine.ask("driver")
        taken = engines[taker].ask(order, blocks)
        felt = {name: engine.ask("reset") for name, engine in engines.items()}
        given = engines[holder].ask("driver")
        rows.append({"taken": taken, "given": given, "steps": {"holder": felt[holder], "taker": felt[taker], "third": felt[third]},
                     "quiet": {"holder": quiet[holder], "taker": quiet[taker], "third": quiet[third]}})  # fmt: skip
        holder, taker = taker, holder
    engines[holder].ask("drop")
    return rows


def middle(rows: list[dict[str, object]], *path: str) -> float:
    def value(row):
        for key in path:
            row = row[key]
        return float(row)

    return statistics.median(value(row) for row in rows)


def tell(title: str, rows: list[dict[str, object]]) -> None:
    print(f"{title}: {middle(rows, 'taken', 'ms'):.1f} ms until usable")
    for key in sorted(set(rows[0]["taken"]) - {"ms"}):
        print(f"    taker {key} {middle(rows, 'taken', key):.2f}")
    print(f"    holder unmap_ms {middle(rows, 'given', 'unmap_ms'):.2f}")
    for who in ("holder", "taker", "third"):
        felt_ms = middle(rows, "steps", who, "longest_ms")
        quiet_ms = [middle(rows, "quiet", who, key) for key in ("median_ms", "longest_ms")]
        print(f"    steps of the {who}: longest {felt_ms:.1f} ms; quiet median {quiet_ms[0]:.1f}, longest {quiet_ms[1]:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="host:0")
    parser.add_argument("--gib", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--reserve", action="store_true", help="keep what engines keep ready by default, and ask ahead")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    blocks = int(arguments.gib * GIB) // BLOCK_BYTES
    budget_bytes = (int(arguments.gib * 1.3 * 1024) + 96) * MIB
    result: dict[str, object] = {"gib": arguments.gib, "card": arguments.card}
    for title, order, large_run_mb in (
        ("single pages, one call", "take", 0),
        ("runs of 128 MiB, one call", "take", 128),
        ("16 MiB a step", "take_in_steps", 0),
    ):
        with tempfile.TemporaryDirectory() as run_dir:
            options: dict[str, object] = {"budget": budget_bytes, "large_run_mb": large_run_mb, "prealloc_enabled": arguments.reserve}
            if arguments.card.startswith("host"):
                options |= {"host_capacity_bytes": budget_bytes + 64 * MIB, "host_dir": str(Path(run_dir) / "host")}
            names = ["a", "b", "c"]
            engines = {name: Remote(name, arguments.card, str(Path(run_dir) / "run"), options) for name in names}
            for engine in engines.values():
                engine.up()
            time.sleep(2.5)  # a new card grants only unused memory at first
            rows = move(names, engines, blocks, arguments.rounds, order)
            for engine in engines.values():
                engine.ask("close")
        result[title] = rows
        tell(title, rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
