# SPDX-License-Identifier: Apache-2.0
"""How fast the protocol of owner and ranks is simulated. Run with `python benchmarks/ranks_simulation.py [seconds per size]`.

The real state machines, on a virtual clock, with drawn faults; every event is checked. One process per core; a figure is the checked
events of all of them in a minute. A seed that fails stops it and is named.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter

from kvcached.testing.ranksim.simulation import Simulation

PROCESSES = 2
GOAL = 1_000_000
SIZES = [(ranks, stages) for ranks in (1, 2, 4, 8) for stages in (1, 2, 4)]


def worker(first_seed: int, ranks: int, stages: int, seconds: float) -> tuple[int, int, int]:
    """(seeds, events checked, transactions settled) in that time."""
    end, seeds, events, settled = perf_counter() + seconds, 0, 0, 0
    while perf_counter() < end:
        seed = first_seed + seeds * PROCESSES
        simulation = Simulation(seed, ranks, stages)
        try:
            events += simulation.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {ranks} ranks x {stages} stages: {error}") from error
        seeds, settled = seeds + 1, settled + simulation.cluster.settled
    return seeds, events, settled


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    machine = f"Python {sys.version.split()[0]}, {PROCESSES} processes on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}; goal {GOAL:,} a minute")
    print(f"{'ranks x stages':>14} {'mappers':>8} {'seeds':>7} {'events checked':>15} {'transactions':>13} {'events a minute':>16}")
    with ProcessPoolExecutor(PROCESSES) as pool:
        list(pool.map(worker, range(PROCESSES), *zip(*[(1, 1, 0.1)] * PROCESSES, strict=True)))  # started and warm
        for ranks, stages in SIZES:
            start = perf_counter()
            runs = [pool.submit(worker, first, ranks, stages, seconds) for first in range(PROCESSES)]
            seeds, events, settled = (sum(column) for column in zip(*(run.result() for run in runs), strict=True))
            rate = events / (perf_counter() - start) * 60
            print(f"{f'{ranks} x {stages}':>14} {ranks * stages:>8} {seeds:>7} {events:>15,} {settled:>13,} {rate:>16,.0f}", flush=True)


if __name__ == "__main__":
    main()
