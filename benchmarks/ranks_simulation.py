# SPDX-License-Identifier: Apache-2.0
"""How fast the protocol of owner and ranks is simulated. Run with `python benchmarks/ranks_simulation.py [seconds per size]`.

The real state machines, on a virtual clock, with drawn faults; every event is checked. Two processes; the last two figures are the
checked events of both in a minute as it passed, and in a minute of processor time on each of two cores, which other work on the machine
does not lessen as much. A seed that fails stops it and is named.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from time import perf_counter, process_time

from kvcached.testing.ranksim.simulation import Simulation

PROCESSES = 2
GOAL = 1_000_000
SIZES = [(ranks, stages) for ranks in (1, 2, 4, 8) for stages in (1, 2, 4)]


def worker(first_seed: int, ranks: int, stages: int, seconds: float) -> tuple[int, int, int, float]:
    """(seeds, events checked, transactions settled, seconds of processor time) in that time."""
    start, end, seeds, events, settled = process_time(), perf_counter() + seconds, 0, 0, 0
    while perf_counter() < end:
        seed = first_seed + seeds * PROCESSES
        simulation = Simulation(seed, ranks, stages)
        try:
            events += simulation.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {ranks} ranks x {stages} stages: {error}") from error
        seeds, settled = seeds + 1, settled + simulation.cluster.settled
    return seeds, events, settled, process_time() - start


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    machine = f"Python {sys.version.split()[0]}, {PROCESSES} processes on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{machine}; goal {GOAL:,} a minute")
    print(
        f"{'ranks x stages':>14} {'mappers':>8} {'seeds':>7} {'events':>11} {'transactions':>13} {'in a minute':>12} {'of two cores':>13}"
    )
    with ProcessPoolExecutor(PROCESSES) as pool:
        list(pool.map(worker, range(PROCESSES), *zip(*[(1, 1, 0.1)] * PROCESSES, strict=True)))  # started and warm
        for ranks, stages in SIZES:
            start = perf_counter()
            runs = [pool.submit(worker, first, ranks, stages, seconds) for first in range(PROCESSES)]
            seeds, events, settled, busy_s = (sum(column) for column in zip(*(run.result() for run in runs), strict=True))
            passed, processor = events / (perf_counter() - start) * 60, events / busy_s * 60 * PROCESSES
            size = f"{f'{ranks} x {stages}':>14} {ranks * stages:>8} {seeds:>7} {events:>11,} {settled:>13,}"
            print(f"{size} {passed:>12,.0f} {processor:>13,.0f}", flush=True)


if __name__ == "__main__":
    main()
