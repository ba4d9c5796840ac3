# SPDX-License-Identifier: Apache-2.0
"""The pool: warm and cold take and give, start-up, and how many driver calls each needs.

    python benchmarks/pool.py                    the host card
    python benchmarks/pool.py --card cuda:0      a GPU; 8 GiB and more of it must be free

Prints one line per figure with its goal on an H200, and writes JSON with --json FILE. Times are medians of --rounds rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import kvcached
from kvcached.units import GIB, MIB, format_size
from kvcached.vmm.api import Call

BLOCK_BYTES = 2 * MIB  # 16 tokens of an 8B-shaped model: 32 layers x 64 KiB


@contextmanager
def quiet_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def median_us(action, rounds: int, inner: int) -> float:
    """Median over `rounds` of the mean time of `inner` calls, in microseconds."""
    times = []
    with quiet_collector():
        for _ in range(rounds):
            start = time.perf_counter_ns()
            for _ in range(inner):
                action()
            times.append((time.perf_counter_ns() - start) / inner / 1000)
    return statistics.median(times)


class Bench:
    def __init__(self, card_name: str, rounds: int, run_dir: Path, quick: bool) -> None:
        self.card_name = card_name
        self.rounds = rounds
        self.run_dir = run_dir
        self.host = card_name.startswith("host")
        self.range_bytes = 4 * GIB if quick else 128 * GIB
        self.cold_bytes = 256 * MIB if quick else 8 * GIB
        self.rows: list[dict[str, object]] = []

    def open(self, **changes: object) -> kvcached.ElasticCard:
        host = {"host_capacity_bytes": self.cold_bytes * 2, "host_dir": self.run_dir / "host"} if self.host else {}
        return kvcached.open_card(self.card_name, run_dir=self.run_dir, **host, **changes)

    def add(self, name: str, value: float, unit: str, goal: str = "", note: str = "") -> None:
        self.rows.append({"name": name, "value": value, "unit": unit, "goal": goal, "note": note})
        print(f"{name:<46} {value:10.2f} {unit:<5} {('goal ' + goal) if goal else '':<18} {note}", flush=True)

    def warm(self) -> None:
        with self.open() as card, card.open_pool("warm", block_bytes=BLOCK_BYTES, blocks=self.range_bytes // BLOCK_BYTES) as pool:
            keep = pool.take(64)
            spare = pool.take(64)
            pool.give(spare)
            calls = sum(card._card.device.calls().values())

            def churn(blocks: int):
                def action() -> None:
                    pool.give(pool.take(blocks))

                return action

            for blocks, goal in ((1, "<= 2"), (16, "<= 3"), (64, "")):
                self.add(f"warm take + give, {blocks} blocks", median_us(churn(blocks), self.rounds, 2000), "us", goal)
            self.add("available()", median_us(pool.available, self.rounds, 20000), "us", "<= 0.3")
            extra = sum(card._card.device.calls().values()) - calls
            self.add("driver calls during the above", extra, "calls", "", "the keeper's reserve may add a few")
            pool.give(keep)

    def start_up(self) -> None:
        with self.open() as card:
            times = []
            for _ in range(self.rounds):
                start = time.perf_counter()
                pool = card.open_pool("start", block_bytes=BLOCK_BYTES, blocks=self.range_bytes // BLOCK_BYTES)
                times.append((time.perf_counter() - start) * 1e3)
                pool.close()
            self.add(f"open a pool over {format_size(self.range_bytes)}", statistics.median(times), "ms", "<= 5")

    def cold(self, large_run_mb: int, goal: str) -> None:
        label = f"runs of {large_run_mb} MiB" if large_run_mb else "single pages"
        blocks = self.cold_bytes // BLOCK_BYTES
        with self.open(large_run_mb=large_run_mb, prealloc_enabled=False, handle_cache_mb=0, idle_trim_s=3600) as card:
            with card.open_pool("cold", block_bytes=BLOCK_BYTES, blocks=self.range_bytes // BLOCK_BYTES) as pool:
                device, grows, shrinks = card._card.device, [], []
                for _ in range(self.rounds):
                    before = device.calls()
                    start = time.perf_counter()
                    ranges = pool.take(blocks)
                    grows.append((time.perf_counter() - start) * 1e3)
                    calls = {call.name.lower(): count - before[call] for call, count in device.calls().items() if count != before[call]}
                    pool.give(ranges)
                    start = time.perf_counter()
                    pool.trim()
                    shrinks.append((time.perf_counter() - start) * 1e3)
                step = max(large_run_mb * MIB, pool.geometry.release_step_bytes)
                note = f"driver calls {calls}, release step {format_size(step)}"
                size = format_size(self.cold_bytes)
                self.add(f"cold take of {size}, {label}", statistics.median(grows), "ms", goal, note)
                self.add(f"trim of {size}, {label}", statistics.median(shrinks), "ms")

    def decode(self) -> None:
        """1,000 steps of a decode-like churn that stays within the reserve: driver calls made while inside a step."""
        with self.open(min_reserved_pages=4, max_reserved_pages=8) as card:
            with card.open_pool("decode", block_bytes=BLOCK_BYTES, blocks=self.range_bytes // BLOCK_BYTES) as pool:
                device, held, inside = card._card.device, [pool.take(8) for _ in range(16)], 0
                pool.give(pool.take(64))
                worst_us = 0.0
                for step in range(1000):
                    before = device.calls()[Call.MAP]
                    start = time.perf_counter_ns()
                    held.append(pool.take(8))
                    pool.give(held.pop(0))
                    worst_us = max(worst_us, (time.perf_counter_ns() - start) / 1000)
                    inside += device.calls()[Call.MAP] - before
                    if step % 100 == 0:
                        time.sleep(0.01)
                self.add("maps inside 1,000 decode steps", inside, "calls", "0", f"slowest step {worst_us:.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="host:0")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small sizes, for a machine with little memory")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as run_dir:
        bench = Bench(arguments.card, arguments.rounds, Path(run_dir), arguments.quick)
        bench.open().close()
        time.sleep(2.2)  # a new card grants only unused memory at first
        print(f"card {arguments.card}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
        bench.start_up()
        bench.warm()
        bench.cold(0, "<= 20")
        bench.cold(128, "<= 4")
        bench.cold(256, "<= 4")
        bench.decode()
    if arguments.json:
        arguments.json.write_text(json.dumps({"card": arguments.card, "python": sys.version, "rows": bench.rows}, indent=1))


if __name__ == "__main__":
    main()
