# SPDX-License-Identifier: Apache-2.0
"""What `kvtop` costs: processor time of sampling and of drawing, in percent of one core.

    python benchmarks/kvtop.py                  64 pools on 8 cards, 20 s
    python benchmarks/kvtop.py --pools 16 --cards 2 --seconds 5 --json FILE
    python benchmarks/kvtop.py --before FOLDER    FOLDER has sampler.py and history.py of a former version: a ratio, sampled in turn

The cards are real card files; another process holds the entries and writes into them through the Card API, one look in two or all the
time (`--writes-per-s` a pool), so that every sample finds changed rows. Sampling is the work of one sample and its place in the
history. Drawing is the whole screen, headless, with keys pressed by nobody: what the process uses with sampling and drawing on, less
the sampling alone. The terminal's own work is not in it. Times are the process's processor time (user + system), which other work on
the machine raises a little but does not multiply.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import platform
import random
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.card import Card, CardIdentity, EntrySpec, Kind, Usage
from kvcached.cli.top.app import DRAWS_PER_S, SAMPLES_PER_S, THOROUGH_EVERY, Options, TopApp
from kvcached.cli.top.history import History
from kvcached.cli.top.rows import View
from kvcached.cli.top.sampler import Sampler
from kvcached.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

BUDGET_BYTES = 130 * GIB
SIZES = ((80, 24), (120, 40), (200, 80))


def hold_pools(run_dir: Path, cards: int, pools: int, writes_per_s: float, connection: Connection) -> None:
    """The other process: holds all entries and writes each of them `writes_per_s` times a second until the connection closes."""
    opened = [
        Card.open(run_dir, CardIdentity(f"GPU-{number:08x}", "NVIDIA H200", 141 * GIB), budget_bytes=BUDGET_BYTES, settle_s=0)
        for number in range(cards)
    ]
    entries = []
    for number in range(pools):
        card = opened[number % cards]
        instance = f"engine-{number:02d}"
        card.register(EntrySpec(Kind.OTHER, instance, "some-model-8B")).lease(2 * GIB, owned=True)
        entry = card.register(EntrySpec(Kind.KV, instance, "some-model-8B", limit_bytes=40 * GIB, floor_bytes=GIB))
        entry.lease(8 * GIB, owned=True)
        entries.append(entry)
    connection.send("ready")
    chance = random.Random(0)
    while not connection.poll(1 / writes_per_s if writes_per_s else None):
        for entry in entries:
            owned, cached = chance.randrange(3 * 1024) * MIB, chance.randrange(3 * 1024) * MIB
            parked = chance.randrange(1024) * MIB
            entry.publish(Usage(mapped_bytes=owned + cached + parked, owned_bytes=owned, cached_bytes=cached, parked_bytes=parked))


def sampling_ms(run_dir: Path, seconds: float, kinds: Sequence[Callable[[Path], tuple[Sampler, History]]]) -> list[float]:
    """Processor milliseconds of one sample of each kind. All sample in each round, each first in turn, at the live screen's rate."""
    pairs = [kind(run_dir) for kind in kinds]
    used_s = [0.0] * len(pairs)
    rounds = max(1, round(seconds * SAMPLES_PER_S))
    for number in range(rounds):
        for at in [*range(number % len(pairs), len(pairs)), *range(number % len(pairs))]:
            sampler, history = pairs[at]
            before = time.process_time()
            history.add(sampler.sample())
            used_s[at] += time.process_time() - before
        time.sleep(1 / SAMPLES_PER_S)
    return [1000 * used / rounds for used in used_s]


def live(run_dir: Path) -> tuple[Sampler, History]:
    """As the live screen has them."""
    return Sampler(run_dir, thorough_every=THOROUGH_EVERY), History()


def former(folder: Path) -> Callable[[Path], tuple[Sampler, History]]:
    """Sampler and history of another version, on this version's card records."""
    modules = []
    for name in ("sampler", "history"):
        spec = importlib.util.spec_from_file_location(f"former_{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    return lambda run_dir: (modules[0].Sampler(run_dir), modules[1].History())


def screen_percent(run_dir: Path, size: tuple[int, int], seconds: float) -> float:
    """Processor time of the whole live screen, sampling and all, in percent of a core."""

    async def run() -> float:
        app = TopApp(Options(run_dir, 5.0, View(sort="used"), inquiries=False), live(run_dir)[0])
        async with app.run_test(size=size):
            await asyncio.sleep(1)
            used, began = time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            return 100 * (time.process_time() - used) / (time.monotonic() - began)

    return asyncio.run(run())


def measure(run_dir: Path, seconds: float, before: Path | None) -> dict[str, float]:
    alone_ms = sampling_ms(run_dir, seconds, [live])[0]
    sampling = alone_ms * SAMPLES_PER_S / 10
    figures = {"one sample, ms": alone_ms, f"sampling at {SAMPLES_PER_S:g} Hz, % of a core (goal 2)": sampling}
    if before is not None:
        after_ms, before_ms = sampling_ms(run_dir, seconds, [live, former(before)])
        figures |= {"in turn with the former one, ms": after_ms, "the former one, ms": before_ms, "ratio": after_ms / before_ms}
    for width, height in SIZES:
        drawing = screen_percent(run_dir, (width, height), seconds) - sampling
        figures[f"drawing {width}x{height} at {DRAWS_PER_S:g} Hz, % of a core (goal 15)"] = drawing
    return figures


def run(arguments: argparse.Namespace, writes_per_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        ours, theirs = multiprocessing.Pipe()
        holder = multiprocessing.get_context("spawn").Process(
            target=hold_pools, args=(run_dir, arguments.cards, arguments.pools, writes_per_s, theirs), daemon=True
        )
        holder.start()
        assert ours.recv() == "ready"
        try:
            return measure(run_dir, arguments.seconds, arguments.before)
        finally:
            ours.send("end")
            holder.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, default=64)
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--writes-per-s", type=float, default=10)
    parser.add_argument("--before", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    where = f"{platform.machine()}, Python {platform.python_version()}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    print(f"{arguments.pools} pools with weights beside them on {arguments.cards} cards; {where}")
    results = {}
    for name, rate in (("all change", arguments.writes_per_s), ("none change", 0.0)):
        results[name] = run(arguments, rate)
        for figure, value in results[name].items():
            print(f"{name:<12} {figure:<52} {value:8.2f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"argv": sys.argv[1:], "where": where, "results": results}, indent=1))


if __name__ == "__main__":
    main()
