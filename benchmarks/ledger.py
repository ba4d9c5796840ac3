# SPDX-License-Identifier: Apache-2.0
"""Time of the ledger's warm operations, by blocks per page. Run with `python benchmarks/ledger.py`; goals are printed beside the results.

Each figure is the best of many short rounds, in microseconds: other work on the machine only ever adds to it. `empty` starts from
parked pages alone, so that each take begins a page and each give empties it; `busy` has every page about half full, block by block
at random, so that 16 blocks come as many ranges; `in flight` gives with a marker that is not complete; `decode` is 96 requests that
take block by block.
"""

from __future__ import annotations

import gc
import random
import sys
from time import perf_counter
from typing import TYPE_CHECKING

from kvcached.core.geometry import BlockGeometry
from kvcached.core.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 60
PAGES = 16384
GOALS_US = {"available": 0.3, "take(1)+give": 1.2, "take(16)+give": 2.0}


def ledger(bpp: int, pages: int) -> Ledger:
    geometry = BlockGeometry(2048, 2048, 2048 * bpp, pages, 1, pages * bpp)
    made = Ledger(geometry, limit_pages=pages)
    made.settle_grow(made.plan_grow(pages), mapped=True)
    return made


def scattered(made: Ledger, bpp: int, seed: int = 1) -> None:
    """Own everything, then give back a random half block by block."""
    total = made.available()
    made.take(total)
    blocks = random.Random(seed).sample(range(total), total // 2)
    made.give([(block, 1) for block in blocks], 0)
    made.advance(0)


def best_us(work: Callable[[int], None], times: int) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        gc.disable()
        start = perf_counter()
        work(times)
        best = min(best, (perf_counter() - start) / times)
        gc.enable()
    return best * 1e6


def take_give_us(made: Ledger, blocks: int, times: int = 1000, in_flight: bool = False) -> float:
    marker = 1 << 40 if in_flight else -1

    def work(count: int) -> None:
        take, give = made.take, made.give
        for _ in range(count):
            give(take(blocks), marker)  # type: ignore[arg-type]

    return best_us(work, times)


def available_us(made: Ledger, times: int = 5000) -> float:
    def work(count: int) -> None:
        available = made.available
        for _ in range(count):
            available()

    def loop(count: int) -> None:
        for _ in range(count):
            pass

    return best_us(work, times) - best_us(loop, times)


def decode_us(made: Ledger, requests: int = 96, steps: int = 96) -> float:
    """Per block: many requests take one block each in turn, and one of them ends and is replaced every step."""

    def work(count: int) -> None:
        take, give = made.take, made.give
        held = [take(40) for _ in range(requests)]
        for step in range(count // requests):
            for own in held:
                own += take(1)  # type: ignore[operator,arg-type]
            ending = step % requests
            give(held[ending], step)  # type: ignore[arg-type]
            held[ending] = take(40)
            made.advance(step - 2)
        for own in held:
            give(own, 0)  # type: ignore[arg-type]

    return best_us(work, requests * steps)


def main() -> None:
    print(f"Python {sys.version.split()[0]}, {PAGES} pages (fewer where a page has many blocks); microseconds, goals {GOALS_US}")
    print(
        f"{'blocks/page':>11} {'available':>10} "
        + " ".join(f"{name:>20}" for name in ("1 empty", "1 busy", "16 empty", "16 busy", "16 in flight")),
        end="",
    )
    print(f" {'decode/block':>13} {'start ms':>9} {'grow ms':>8}")
    for bpp in (1, 2, 8, 16, 64, 256, 1024):
        pages = min(PAGES, (1 << 21) // bpp)
        start = perf_counter()
        made = Ledger(BlockGeometry(2048, 2048, 2048 * bpp, pages, 1, pages * bpp), limit_pages=pages)
        start_ms = (perf_counter() - start) * 1e3
        start = perf_counter()
        made.settle_grow(made.plan_grow(512, max_run_pages=16), mapped=True)
        grow_ms = (perf_counter() - start) * 1e3
        made = ledger(bpp, pages)
        figures = [take_give_us(made, 1), 0.0, take_give_us(made, 16), 0.0, take_give_us(made, 16, in_flight=True)]
        decode = decode_us(ledger(bpp, pages))
        busy = ledger(bpp, pages)
        scattered(busy, bpp)
        figures[1], figures[3] = take_give_us(busy, 1), take_give_us(busy, 16)
        print(f"{bpp:>11} {available_us(made):>10.3f} " + " ".join(f"{figure:>20.2f}" for figure in figures), end="")
        print(f" {decode:>13.2f} {start_ms:>9.2f} {grow_ms:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
