# SPDX-License-Identifier: Apache-2.0
"""Two processes, one card: what one of them gives back, the other can take; together they never pass the budget. No GPU needed.

Run: python examples/two_pools.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import kvcached
from kvcached.errors import PoolExhausted
from kvcached.units import MIB, format_size

if TYPE_CHECKING:
    from kvcached.card import CardSnapshot

BLOCK_BYTES = MIB
BUDGET = "64MiB"


def main(run_dir: str) -> None:
    """The first process: takes 48 of 64 MiB, starts the second one, and gives back after it has seen it wait."""
    with kvcached.open_card("host:0", run_dir=run_dir, budget=BUDGET) as card:
        with card.open_pool("first", block_bytes=BLOCK_BYTES, blocks=64) as pool:
            taken = pool.take(48)
            print(f"first : took 48 blocks of {format_size(BLOCK_BYTES)}; the card has {BUDGET}", flush=True)
            pipe = subprocess.PIPE
            with subprocess.Popen([sys.executable, __file__, run_dir], stdin=pipe, stdout=pipe, text=True) as other:
                assert other.stdin is not None
                for line in other.stdout or ():
                    print(line, end="", flush=True)
                    if "exhausted" in line:
                        pool.give(taken)  # the pages stay parked here until the second process needs them
                        print("first : gave 48 blocks back", flush=True)
                    if "took" in line:
                        show_leases(card.snapshot())
                        other.stdin.close()  # it may end
            if other.returncode != 0:
                raise SystemExit("the second process failed")


def show_leases(card: CardSnapshot) -> None:
    leases = ", ".join(f"{entry.name} {format_size(entry.record.lease_bytes)}" for entry in card.live)
    print(f"        leases now: {leases}; together {format_size(card.leased_bytes)}", flush=True)


def second(run_dir: str) -> None:
    """The second process: wants 40 MiB, too. A miss is no failure: it asks again."""
    with kvcached.open_card("host:0", run_dir=run_dir, budget=BUDGET) as card:
        with card.open_pool("second", block_bytes=BLOCK_BYTES, blocks=64) as pool:
            told = False
            for _ in range(100):
                try:
                    taken = pool.take(40)
                except PoolExhausted as pressure:
                    if not told:
                        print(f"second: exhausted, {pressure.wanted} blocks wanted, {pressure.available} to be had; waits", flush=True)
                    told = True
                    time.sleep(0.1)
                    continue
                print("second: took 40 blocks", flush=True)
                sys.stdin.read()  # its work: until the first one has looked
                pool.give(taken)
                return
            raise SystemExit("second: no memory within 10 s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        second(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory(prefix="kvcached-") as scratch:
            main(str(Path(scratch) / "run"))
