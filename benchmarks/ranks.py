# SPDX-License-Identifier: Apache-2.0
"""What several ranks cost and whether they stay the same: latency of maps and unmaps, kills, crossed pools. Real processes.

python benchmarks/ranks.py                                        host card: 1, 2 and 4 ranks
python benchmarks/ranks.py --card cuda:0 --card cuda:1            one rank for each card named
python benchmarks/ranks.py --rounds 0 --requests 400              how often a step waits for credit, without and with credit ahead
python benchmarks/ranks.py --kill-rounds 1000 --crossed-rounds 10000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached.core.limits import Limits
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.group import RankGroup
from kvcached.runtime.cards import OpenCard, rank_socket
from kvcached.runtime.keeper import Keeper, KeeperOptions
from kvcached.runtime.pool import Pool, PoolOptions
from kvcached.testing.rank_kills import KillRounds
from kvcached.testing.rank_processes import Child, Nursery, Place, hello
from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

PAGE_COUNTS = (1, 8, 64)
SETTLED_S = 2.2  # a new card file grants only what is unused until then
WAIT_S = 60.0


class Bench:
    def __init__(self, place: Place, nursery: Nursery, rounds: int) -> None:
        self.place = place
        self.nursery = nursery
        self.rounds = rounds
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, times_s: list[float]) -> None:
        ordered = sorted(times_s)
        row = {
            "name": name,
            "median_us": round(statistics.median(ordered) * 1e6, 1),
            "p99_us": round(ordered[int(len(ordered) * 0.99)] * 1e6, 1),
            "rounds": len(ordered),
        }
        self.rows.append(row)
        print(f"{name:58} median {row['median_us']:10.1f} us   p99 {row['p99_us']:10.1f} us", flush=True)

    @contextmanager
    def group(self, cards: list[str], ahead_pages: int = 0) -> Iterator[tuple[RankGroup, list[Child]]]:
        instance = f"bench{len(self.rows)}"
        children = [self.nursery.rank(instance, rank, card) for rank, card in enumerate(cards)]
        run_dir = self.place.settings().run_dir
        group = RankGroup(
            [rank_socket(run_dir, instance, rank) for rank in range(len(cards))], hello(instance), WAIT_S, ahead_pages=ahead_pages
        )
        try:
            yield group, children
        finally:
            group.close()
            for child in children:
                child.ask("close")

    def latency(self, cards: list[str]) -> None:
        for pages in PAGE_COUNTS:
            with self.group(cards) as (group, children):
                self._out_of_band(group, pages, len(cards))
                group.begin_steps()
                self._from_credit(group, children, pages, len(cards))

    def _out_of_band(self, group: RankGroup, pages: int, ranks: int) -> None:
        """All ranks map or unmap while no step runs: what a cold take and an idle shrink wait for."""
        runs = [(page, 1) for page in range(pages)]
        maps, unmaps = [], []
        for _ in range(self.rounds):
            maps.append(_timed(lambda: group.map(runs, urgent=True)))
            unmaps.append(_timed(lambda: group.unmap(runs, 0)))
        self.add(f"map of {pages:2} pages on {ranks} ranks", maps)
        self.add(f"unmap of {pages:2} pages on {ranks} ranks (prepare, commit)", unmaps)

    def _from_credit(self, group: RankGroup, children: list[Child], pages: int, ranks: int) -> None:
        """Credit is taken, promised, mapped with the next step, recalled with the one after, and given back."""
        runs = [(page, 1) for page in range(pages)]
        grows, promises, steps, leaves = [], [], [], []
        for number in range(self.rounds):
            grows.append(_timed(lambda: group.map(runs, urgent=True)))
            start = time.perf_counter()
            ops = group.step_ops()
            promises.append(time.perf_counter() - start)
            steps.append(max(child.ask("timed_step", 2 * number + 1, ops) for child in children))
            start = time.perf_counter()
            left = group.unmap(runs, 2 * number + 1)
            ops = group.step_ops()
            for child in children:
                child.ask("step", 2 * number + 2, ops)
            _done(left)
            leaves.append(time.perf_counter() - start)
        self.add(f"credit for {pages:2} pages on {ranks} ranks", grows)
        self.add(f"operations for a step message, {pages:2} pages", promises)
        self.add(f"maps of {pages:2} pages in a step, slowest of {ranks} ranks", steps)
        self.add(f"recall of {pages:2} pages with a step, and release, {ranks} ranks", leaves)

    def waits(self, requests: int, ahead_pages: int, ranks: int = 2) -> None:
        """A scheduler admits `requests` requests, four in each step, and gives each back after 16 steps; a keeper holds the reserve. How
        often did a step that was being made have to wait for credit, and how long for memory?"""
        with self.group(["host:0"] * ranks, ahead_pages) as (group, children):
            waited = _CountsWaits(group)
            pool = Pool(
                self.place.geometry(), waited, Limits(self.place.pages * self.place.page_bytes), PoolOptions(grow_deadline_s=WAIT_S)
            )
            group.begin_steps()
            keeper = Keeper(pool, KeeperOptions(1, 16, idle_trim_s=30.0))
            keeper.start()
            running, made_s, mapped_s, step = deque[tuple[int, Any]](), 0.0, [], 0
            while requests or running:
                waited.step = step = step + 1
                start = time.perf_counter()
                with pool.lock:
                    while running and running[0][0] + 16 <= step:
                        pool.give(running.popleft()[1], step - 1)
                    for _ in range(min(4, requests)):
                        running.append((step, pool.take(2)))
                        requests -= 1
                    ops = group.step_ops()
                made_s += time.perf_counter() - start
                mapped_s.append(max(child.ask("timed_step", step, ops) for child in children))
                pool.advance(step)
            keeper.stop()
        last = max(waited.waits, default=0)
        asked = f"{waited.urgent} maps that a step needed, credit for {ahead_pages} pages ahead"
        text = f"waits for credit, {ranks} ranks, {step} steps, {asked}: {len(waited.waits)}, the last at step {last}"
        slowest_us = round(statistics.median(mapped_s) * 1e6, 1)
        print(f"{text}; making the steps took {made_s * 1e3:.1f} ms in all, their maps {slowest_us} us on the slowest rank (median)")
        row = {"waits": len(waited.waits), "last_at_step": last, "made_ms": round(made_s * 1e3, 1), "maps_us": slowest_us}
        self.rows.append({"name": text, **row})

    def kills(self, rounds: int) -> None:
        card = OpenCard.open(self.place.settings(), "host:0")
        kills = KillRounds(self.place, self.nursery, card, random.Random(), ranks=4)
        start = time.perf_counter()
        for number in range(rounds):
            kills.play(number)
            if (number + 1) % 100 == 0:
                print(f"  {number + 1} rounds", flush=True)
        took_s = time.perf_counter() - start
        text = f"{rounds} kills of one of 4 ranks: no leak, no difference, {kills.maps} maps, {kills.killed_at_work} during an operation"
        print(f"{text}, {took_s:.0f} s")
        self.rows.append({"name": text, "seconds": round(took_s)})
        card.close()

    def crossed(self, rounds: int) -> None:
        """Two pools of two ranks, their ranks on the two cards in opposite order, each wanting 60 % of both."""
        names = ("here", "there")
        mappers = [self.nursery.rank(name, rank, f"host:{rank ^ flip}") for flip, name in enumerate(names) for rank in range(2)]
        owners = [self.nursery.owner(name, 2) for name in names]
        cards = [OpenCard.open(self.place.settings(), f"host:{number}") for number in range(2)]
        over, stop = 0, threading.Event()

        def watch() -> None:
            nonlocal over
            while not stop.wait(0.005):
                over += sum(card.record.snapshot().leased_bytes > card.budget_bytes for card in cards)

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        for owner in owners:
            owner.begin("play", self.place.pages, os.path.join(self.place.folder, "rounds"), rounds, 0.001)
        results = [owner.end(3600) for owner in owners]
        took_s = time.perf_counter() - start
        stop.set()
        watcher.join()
        for child in (*owners, *mappers):
            child.ask("close")
        for card in cards:
            card.close()
        print(f"crossed pools, {rounds} rounds in {took_s:.0f} s, times over budget {over}: {results}")
        self.rows.append({"name": "crossed pools", "rounds": rounds, "seconds": round(took_s), "over_budget": over, "results": results})


class _CountsWaits:
    """The group as its pool sees it. `urgent`: maps that a step needed; `waits`: the steps, by number, at which one of these had to wait
    for the ranks."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.urgent = 0
        self.waits: list[int] = []
        self.step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def map(self, runs: Any, *, urgent: bool) -> Future[Outcome]:
        future = self._group.map(runs, urgent=urgent)
        self.urgent += urgent
        if urgent and not future.done():
            self.waits.append(self.step)
        return future


def _timed(call: Any) -> float:
    start = time.perf_counter()
    _done(call())
    return time.perf_counter() - start


def _done(future: Future[Outcome]) -> None:
    outcome = future.result(WAIT_S)
    if outcome.verdict is not Verdict.DONE:
        raise RuntimeError(outcome)


@contextmanager
def world(page_bytes: int, *, pages: int, card_pages: int, rounds: int = 0, host: bool = True) -> Iterator[Bench]:
    """A run directory of its own; its host cards are held open and old enough."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(folder, page_bytes, pages, card_pages)
        nursery = Nursery(place)
        keep = [OpenCard.open(place.settings(), f"host:{number}") for number in range(2)] if host else []
        time.sleep(SETTLED_S)
        try:
            yield Bench(place, nursery, rounds)
        finally:
            for card in keep:
                card.close()
            nursery.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", action="append", help="one rank on this card; may be given several times")
    parser.add_argument("--page-mib", type=float, help="bytes of a page (host: 1/16, CUDA: 16)")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--requests", type=int, default=0, help="how often a scheduler that admits so many waits for credit")
    parser.add_argument("--kill-rounds", type=int, default=0)
    parser.add_argument("--crossed-rounds", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    page_bytes = int((arguments.page_mib or (16 if arguments.card else 1 / 16)) * MIB)
    cards = arguments.card or ["host:0"] * 4
    print(f"cards {arguments.card or 'host:0'}, {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}")
    rows = []
    if arguments.rounds:
        with world(page_bytes, pages=64, card_pages=300, rounds=arguments.rounds, host=not arguments.card) as bench:
            for ranks in [count for count in (1, 2, 4, 8) if count <= len(cards)]:
                bench.latency(cards[:ranks])
            rows += bench.rows
    if arguments.requests:
        with world(page_bytes, pages=256, card_pages=600) as bench:
            for ahead_pages in (0, 10) * 3:
                bench.waits(arguments.requests, ahead_pages)
            rows += bench.rows
    if arguments.kill_rounds:
        with world(page_bytes, pages=64, card_pages=100) as bench:
            bench.kills(arguments.kill_rounds)
            rows += bench.rows
    if arguments.crossed_rounds:
        with world(page_bytes, pages=60, card_pages=100) as bench:
            bench.crossed(arguments.crossed_rounds)
            rows += bench.rows
    if arguments.json:
        arguments.json.write_text(json.dumps({"cards": arguments.card or ["host:0"], "cores": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
