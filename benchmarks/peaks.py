# SPDX-License-Identifier: Apache-2.0
"""Three real vLLM engines whose peaks follow each other: one KV budget that moves with the load, against a static third for each.

    python benchmarks/peaks.py --rates 10,20,30 --pairs 5 --json result.json             a card; 8B-shaped models with random weights
    python benchmarks/peaks.py --shape long --budget-gib 36 --in-turn --pairs 3          2,048 tokens in and 512 out; one fleet at a time
    python benchmarks/peaks.py --device cpu --model .cache/models/llama --rates 2,4      a small model on the CPU

Each engine's load ramps up to the rate, stays there and ramps down, each for `--ramp` seconds, and begins 2.25 ramps after the one
before. Both fleets live on the card at the same time and take turns, so that each figure is a ratio of neighbours in time; with `--in-
turn` only one does, and is started anew for each turn. The elastic fleet's KV cache may be as large as the static thirds together, and no
more: what the card has beyond that is taken off by an entry of this program. Arrivals, prompts and settings are the same for both. TTFT
counts from the time at which a request was due.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_vllm import COMMON, GIB, MODELS, Child, Watch

from kvcached.card import Card
from kvcached.card.record import EntrySpec, Kind

NAMES = ("north", "east", "south")
FOLLOWS = 2.25
"""ramps from the beginning of one engine's load to the next one's"""
SHAPES = {"short": (256, 256), "long": (2048, 512)}
HERE = Path(__file__).parent
QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def arrivals(rate: float, ramp_s: float, luck: random.Random) -> list[float]:
    """Seconds at which requests arrive: a Poisson process whose rate is a trapezoid, by thinning (Lewis and Shedler, 1979)."""
    found, at_s = [], 0.0
    while (at_s := at_s + luck.expovariate(rate)) < 3 * ramp_s:
        share = min(1.0, at_s / ramp_s, (3 * ramp_s - at_s) / ramp_s)
        if luck.random() < share:
            found.append(at_s)
    return found


def schedule(rate: float, ramp_s: float, seed: int) -> list[list[float]]:
    """Of each engine, on one clock."""
    luck = random.Random(seed)
    return [[FOLLOWS * ramp_s * place + at_s for at_s in arrivals(rate, ramp_s, luck)] for place in range(len(NAMES))]


def summary(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Of all engines of a fleet together. Tokens a second count until the last request has its last token."""
    ttft = sorted(value for answer in answers for value in answer["ttft_s"])
    return {
        "requests": len(ttft),
        "ttft_mean_s": statistics.fmean(ttft),
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p99_s": ttft[int(0.99 * (len(ttft) - 1))],
        "tokens_per_s": sum(answer["tokens"] for answer in answers) / max(answer["end_s"] for answer in answers),
        "preemptions": sum(answer["preemptions"] for answer in answers),
        "longest_queue": max(answer["longest_queue"] for answer in answers),
    }


class Fleet:
    """Three engines of one kind."""

    def __init__(self, kind: str, options: argparse.Namespace, model: Path, folder: Path) -> None:
        self.kind = kind
        self.ups: list[dict[str, Any]] = []
        self._options = options
        self._run_dir = folder / "run"
        self._rest: Card | None = None
        self.engines = [self._start(kind, name, model, folder) for name in NAMES]
        self.ups = [engine.read() for engine in self.engines]
        print(f"{kind}: up in {max(up['up_s'] for up in self.ups):.0f} s, {self.ups[0]['tokens']} tokens of KV cache each", flush=True)
        if kind == "elastic":
            self._bound()
        self.run([[0.0] * 4] * len(NAMES), -1)  # warm up

    def _start(self, kind: str, name: str, model: Path, folder: Path) -> Child:
        options = self._options
        command = [str(HERE / "peaks_engine.py"), "--model", str(model), "--device", options.device, "--longest", str(options.longest)]
        command += ["--utilization", str(options.utilization)]
        if kind == "static":
            environment = {"ENABLE_KVCACHED": "false"}
            command += ["--kv-bytes", str(options.budget_bytes // len(NAMES))]
        else:
            environment = {
                "ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(self._run_dir), "KVCACHED_VIRTUAL": str(options.budget_bytes),
                "KVCACHED_IPC_NAME": name, "KVCACHED_BUDGET": options.card_budget, **options.setting,
            }  # fmt: skip
        if options.device == "cpu":
            host = {"KVCACHED_HOST_DIR": str(folder / "host"), "KVCACHED_HOST_CAPACITY": str(options.budget_bytes + GIB)}
            environment |= {"OMP_NUM_THREADS": "1", **({"VLLM_CPU_KVCACHE_SPACE": "1", **host} if kind == "elastic" else {})}
        return Child(f"{kind} {name}", command, {**QUIET, **environment})

    def _bound(self) -> None:
        """Leave as much of the card to the three KV caches as the static thirds have."""
        snapshot = Card.list_cards(self._run_dir)[0]
        others = sum(entry.record.lease_bytes for entry in snapshot.live if entry.kind is not Kind.KV)
        surplus = snapshot.budget_bytes - others - self._options.budget_bytes
        if surplus < 0:
            raise SystemExit(
                f"the card's budget leaves {surplus + self._options.budget_bytes} bytes to KV caches; give a larger --card-budget"
            )
        self._rest = Card.open(self._run_dir, snapshot.identity, budget_bytes=0)
        self._rest.register(EntrySpec(Kind.OTHER, "beyond-the-thirds"), adopt_lease_bytes=surplus)

    def run(self, times: list[list[float]], seed: int) -> list[dict[str, Any]]:
        begin_s = time.time() + 1.0
        for place, (engine, due) in enumerate(zip(self.engines, times, strict=True)):
            engine.tell(
                do="run", seed=f"{seed}.{place}", arrivals=due, begin_s=begin_s, vocabulary=self._options.vocabulary,
                tokens_in=self._options.tokens_in, tokens_out=self._options.tokens_out,
            )  # fmt: skip
        return [engine.read() for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.ask(do="stop")
        for engine in self.engines:
            engine.process.wait(120)
        if self._rest is not None:
            self._rest.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        if all(engine.process.poll() is None for engine in self.engines):
            self.close()
        for engine in self.engines:
            engine.process.kill()


def pairs_of(options: argparse.Namespace, model: Path, folder: Path) -> dict[float, list[dict[str, Any]]]:
    """Of each rate, what both fleets did in each pair; what begins alternates."""
    rows: dict[float, list[dict[str, Any]]] = {rate: [] for rate in options.rates}
    with ExitStack() as stack:
        together = (
            {} if options.in_turn else {kind: stack.enter_context(Fleet(kind, options, model, folder)) for kind in ("static", "elastic")}
        )
        watch = Watch(folder / "run")
        for pair in range(options.pairs):
            order = ("static", "elastic")[:: 1 if pair % 2 else -1]
            found: dict[float, dict[str, Any]] = {rate: {} for rate in options.rates}
            if options.in_turn:
                for kind in order:
                    with Fleet(kind, options, model, folder) as fleet:
                        for rate in options.rates:
                            found[rate][kind] = one(fleet, options, rate, pair)
            else:
                for rate in options.rates:
                    for kind in order:
                        found[rate][kind] = one(together[kind], options, rate, pair)
            for rate, both in found.items():
                rows[rate].append(both)
        print(f"most that an elastic KV cache held: {watch.peak_gib:.2f} GiB", flush=True)
    return rows


def one(fleet: Fleet, options: argparse.Namespace, rate: float, pair: int) -> dict[str, Any]:
    answers = fleet.run(schedule(rate, options.ramp, pair), pair)
    figures = summary(answers)
    told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    print(f"  pair {pair}, {rate:g} requests/s, {fleet.kind}: {told}", flush=True)
    return figures


def ratios(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Above 1: elastic is better."""
    return {
        "TTFT, mean": [row["static"]["ttft_mean_s"] / row["elastic"]["ttft_mean_s"] for row in rows],
        "TTFT, p99": [row["static"]["ttft_p99_s"] / row["elastic"]["ttft_p99_s"] for row in rows],
        "throughput": [row["elastic"]["tokens_per_s"] / row["static"]["tokens_per_s"] for row in rows],
    }


def report(rows: dict[float, list[dict[str, Any]]]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for rate, found in rows.items():
        print(f"{rate:g} requests a second at the peak, {found[0]['static']['requests']} requests; static against elastic, medians")
        for name in found[0]["static"]:
            values = {kind: statistics.median(row[kind][name] for row in found) for kind in ("static", "elastic")}
            print(f"  {name:<14} {values['static']:10.4g} {values['elastic']:10.4g}")
        for name, values in ratios(found).items():
            print(f"  {name}: {statistics.median(values):.3f} times as good ({min(values):.3f} to {max(values):.3f})", flush=True)
        kept[f"{rate:g}"] = {"pairs": found, "ratios": ratios(found)}
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", type=Path, help="with weights; without it an 8B-shaped one with random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="short", help="256 tokens in and out, or 2,048 and 512 (%(default)s)")
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[10.0, 20.0, 30.0])
    parser.add_argument("--ramp", type=float, default=5.0, help="seconds (%(default)s)")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--in-turn", action="store_true", help="one fleet at a time")
    parser.add_argument("--budget-gib", type=float, default=12.0, help="of all three KV caches together (%(default)s)")
    parser.add_argument("--card-budget", default="95%", help="of the elastic fleet's card, weights included (%(default)s)")
    parser.add_argument("--utilization", type=float, default=0.2, help="gpu_memory_utilization of each engine (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="ids in prompts are below it (%(default)s)")
    parser.add_argument("--setting", action="append", default=[], help="for the elastic engines: NAME=VALUE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.setting = dict(setting.split("=", 1) for setting in options.setting)
    options.tokens_in, options.tokens_out = SHAPES[options.shape]
    options.longest = options.tokens_in + options.tokens_out + 16
    options.budget_bytes = int(options.budget_gib * GIB)
    print(f"{len(NAMES)} engines, {options.tokens_in} tokens in and {options.tokens_out} out, ramps of {options.ramp:g} s")
    print(f"{options.budget_gib:g} GiB of KV cache in all; Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model.absolute() if options.model else Path(folder) / "model"
        if not options.model:
            model.mkdir()
            (model / "config.json").write_text(json.dumps(COMMON | MODELS["llama"]))
        kept = report(pairs_of(options, model, Path(folder)))
    if options.json:
        said = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": said, "rates": kept}, indent=1))


if __name__ == "__main__":
    main()
