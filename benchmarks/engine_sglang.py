# SPDX-License-Identifier: Apache-2.0
"""A real SGLang, elastic against unhooked: same tokens, throughput ratio, memory idle, at peak and after, release step.

    python benchmarks/engine_sglang.py --json result.json            a GPU with 90 GiB free; an 8B-shaped model with random weights
    python benchmarks/engine_sglang.py --cpu --json result.json      the same steps on SGLang's CPU route: its figures mean nothing

Two engines live on the card at the same time, one unhooked (its KV cache is static) and one elastic, and take turns: each figure is a
ratio of neighbours in time. Both get the same number of slots, the same prompts and the same settings (Triton attention, overlap
scheduling). What is worth most is measured first, and written as soon as it is known: a run that is cut short still says something.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from engine_vllm import COMMON, MODELS, Watch
from sglang_child import Child, EngineFailed, write_plugin

START_S = 200.0
FIRST_S = 200.0  # the first batch compiles kernels
ROOM_S = 25.0  # what the steps after the last load may take


class Load(NamedTuple):
    name: str
    requests: int
    tokens_in: int
    tokens_out: int
    rate: float = 0.0  # requests a second; 0: all at once


class Setup(NamedTuple):
    """What differs between a GPU and the CPU."""

    model: dict[str, object]
    arguments: dict[str, object]
    environment: dict[str, str]
    card: dict[str, str]  # for the elastic engine
    slot_bytes: int
    slots: int
    spread: float
    loads: tuple[Load, ...]


COMMON_ARGUMENTS = {
    "load_format": "dummy", "skip_tokenizer_init": True, "random_seed": 0, "sampling_backend": "pytorch", "grammar_backend": "none",
    "disable_cuda_graph": True,
}  # fmt: skip
GPU = Setup(
    model=COMMON | MODELS["llama"],
    # Two engines share the card, so what SGLang may take for itself is bounded by the number of slots alone.
    arguments={"attention_backend": "triton", "dtype": "bfloat16", "context_length": 4096, "mem_fraction_static": 0.75,
               "max_running_requests": 320},
    environment={"SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
    card={},
    slot_bytes=128 << 10,
    slots=180_000,
    spread=0.03,
    loads=(
        Load("saturating (256 at a time)", 256, 512, 128),
        Load("low (8 at a time)", 8, 512, 128),
        Load("over-full (400 at a time, more than fits)", 400, 512, 128),
        Load("saturating rate (300 a second)", 600, 512, 128, 300.0),
        Load("low rate (4 a second)", 40, 512, 128, 4.0),
    ),
)  # fmt: skip
CPU = Setup(
    model={**COMMON, **MODELS["llama"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096, "bos_token_id": 256,
           "eos_token_id": 257, "torch_dtype": "float32"},
    arguments={"attention_backend": "torch_native", "dtype": "float32", "context_length": 1024, "mem_fraction_static": 0.2,
               "max_running_requests": 16, "device": "cpu"},
    environment={"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"},
    card={"KVCACHED_HOST_CAPACITY": "64MiB", "KVCACHED_HOST_GRANULARITY": "4096", "KVCACHED_ZERO_BACKING": "never"},
    slot_bytes=2 << 10,
    slots=1024,
    spread=0.12,
    loads=(
        Load("saturating", 12, 48, 16),
        Load("low", 2, 48, 16),
        Load("over-full", 24, 64, 16),
        Load("saturating rate", 12, 48, 16, 50.0),
        Load("low rate", 4, 48, 16, 2.0),
    ),
)  # fmt: skip


class Comparison:
    """Both engines, what has been found, and the file that it is written to after each step."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.setup = CPU if arguments.cpu else GPU
        self.folder = folder
        self.pairs: int = arguments.pairs
        self.chosen = bool(arguments.load)
        self.output: Path | None = arguments.json
        self.deadline = time.monotonic() + arguments.deadline_s
        self.settings = {"page_size": arguments.page_size, "disable_radix_cache": not arguments.radix, "log_level": arguments.log_level}
        self.loads = [load for load in self.setup.loads if not arguments.load or any(word in load.name for word in arguments.load)]
        self.logs: Path = arguments.logs or (self.output.parent if self.output else folder)
        self.found: dict[str, object] = {"settings": self.settings, "loads": {}}
        self.engines: list[Child] = []
        self.watch: Watch | None = None
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(self.setup.model))
        write_plugin(folder / "plugin")

    def note(self, **values: object) -> None:
        """Say it and write it."""
        self.found.update(values)
        for name, value in values.items():
            print(f"{name.replace('_', ' ')}: {json.dumps(value)}", flush=True)
        self.write()

    def write(self) -> None:
        if self.output:
            self.output.write_text(json.dumps(self.found, indent=1))

    def left_s(self) -> float:
        return self.deadline - time.monotonic() - ROOM_S

    # ------------------------------------------------------------------ steps

    def start(self, kind: str) -> Child:
        setup = self.setup
        limit = f"{(setup.slots + 4096) * setup.slot_bytes >> 20}MiB"
        elastic = {
            "ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(self.folder / "run"), "KVCACHED_LIMIT": limit, "KVCACHED_VIRTUAL": limit,
            **setup.card,
        }  # fmt: skip
        path = [str(self.folder / "plugin"), os.environ.get("PYTHONPATH", "")]
        environment = {
            "HF_HUB_OFFLINE": "1", "SPREAD": str(setup.spread), "PYTHONPATH": os.pathsep.join(path), **setup.environment,
            **(elastic if kind == "elastic" else {"ENABLE_KVCACHED": "false"}),
        }  # fmt: skip
        model = str(self.folder / "model")
        arguments = {"model_path": model, "max_total_tokens": setup.slots, **COMMON_ARGUMENTS, **setup.arguments, **self.settings}
        engine = Child(kind, arguments, environment, self.folder, self.logs / f"sglang_{kind}.log")
        self.engines.append(engine)
        self.note(**{f"{kind}_start": engine.read(START_S)})
        return engine

    def start_both(self) -> None:
        """One after the other: what the card has left in between is each one's share."""
        self.start("static")
        elastic = self.start("elastic")
        said = elastic.lines("elastic: on")
        self.watch = Watch(self.folder / "run")
        self.note(adapter="".join(said[:1]).partition("elastic: ")[2], leases_gib_idle=self.watch.leases_gib())
        if not said:
            raise EngineFailed("the elastic engine is not elastic: its log has no line with `elastic: on`")

    def warm_up(self) -> None:
        """Kernels are compiled. The unhooked engine runs it twice, which shows how far two runs of one schedule agree at all."""
        static, elastic = self.engines
        command = self.command(self.setup.loads[0], 0)
        first, other = static.ask(FIRST_S, **command), elastic.ask(FIRST_S, **command)
        again = static.ask(FIRST_S, **command)
        seconds = [round(float(answer["seconds"]), 2) for answer in (first, other, again)]
        self.note(
            warm_up_seconds=seconds,
            distinct_tokens=first["distinct"],
            same_tokens_static_twice=alike(first, again),
            same_tokens_elastic=alike(first, other),
        )

    def command(self, load: Load, seed: int) -> dict[str, object]:
        return {"do": "run", "seed": seed, "vocabulary": self.setup.model["vocab_size"], **load._asdict()}

    def compare(self, load: Load) -> None:
        """Pairs of runs, as many as the time allows."""
        assert self.watch is not None
        static, elastic = self.engines
        self.watch.peak_gib = 0.0
        rows: list[dict[str, dict[str, object]]] = []
        took_s = 0.0
        for pair in range(2 if load.rate else self.pairs):
            begun = time.monotonic()
            if self.left_s() < took_s * 1.1:
                break
            order = (static, elastic) if pair % 2 else (elastic, static)
            rows.append({engine.kind: engine.ask(max(30.0, self.left_s()), **self.command(load, pair + 1)) for engine in order})
            took_s = time.monotonic() - begun
            self.found["loads"][load.name] = summary_of(load, rows, self.watch.peak_gib)  # type: ignore[index]
            self.write()
        if not rows:
            print(f"{load.name}: no time left", flush=True)
            return
        time.sleep(1)
        result = {**summary_of(load, rows, self.watch.peak_gib), "leases_gib_a_second_later": self.watch.leases_gib()}
        self.found["loads"][load.name] = result  # type: ignore[index]
        self.write()
        print(f"{load.name}: {json.dumps({key: value for key, value in result.items() if key != 'rows'})}", flush=True)

    def flush(self) -> None:
        assert self.watch is not None
        answer = self.engines[1].ask(ROOM_S, do="flush")
        time.sleep(1)
        self.note(elastic_flushed=answer, leases_gib_flushed=self.watch.leases_gib(), elastic_idle=self.engines[1].ask(ROOM_S, do="memory"))

    def profile(self) -> None:
        """Where the schedulers' threads are in the load that was asked for last, else in the one whose ratio is asked for most."""
        command = self.command(self.loads[-1 if self.chosen else 0], 1)
        shares = {}
        for engine in self.engines:
            if self.left_s() < 10:
                return
            switch = engine.samples / "on"
            switch.touch()
            engine.ask(max(30.0, self.left_s()), **command)
            switch.unlink()
            counts = engine.sampled()
            shares[engine.kind] = {
                "samples": sum(counts.values()),
                "kvcached_samples": sum(count for name, count in counts.items() if name.startswith("kvcached")),
                "most": dict(list(counts.items())[:25]),
                "kvcached": {name: count for name, count in counts.items() if name.startswith("kvcached")},
            }
        self.note(profile=shares)

    def stop(self) -> None:
        assert self.watch is not None
        static, elastic = self.engines
        self.note(elastic_stopped=elastic.ask(ROOM_S, do="stop"))
        static.ask(ROOM_S, do="stop")
        codes = [engine.process.wait(ROOM_S) for engine in self.engines]
        self.note(leases_gib_stopped=self.watch.leases_gib(), exit_codes=codes)

    def run(self) -> None:
        self.start_both()
        self.warm_up()
        first, *rest = self.loads
        self.compare(first)
        self.flush()
        for load in rest:
            self.compare(load)
        self.flush()
        self.profile()
        self.stop()


def alike(one: dict[str, object], other: dict[str, object]) -> str:
    pairs = list(zip(one["digests"], other["digests"], strict=True))  # type: ignore[call-overload]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def summary_of(load: Load, rows: list[dict[str, dict[str, object]]], peak_gib: float) -> dict[str, object]:
    def ratios(key: str) -> list[float]:
        return [float(row["static"][key]) / float(row["elastic"][key]) for row in rows]  # type: ignore[arg-type]

    throughput = ratios("seconds")
    result: dict[str, object] = {
        "ratio": round(statistics.median(throughput), 4),
        "ratios": [round(ratio, 4) for ratio in throughput],
        "elastic_peak_kv_gib": peak_gib,
        "rows": [{kind: {key: value for key, value in answer.items() if key != "digests"} for kind, answer in row.items()} for row in rows],
    }
    for kind in ("static", "elastic"):
        seconds = statistics.median(float(row[kind]["seconds"]) for row in rows)  # type: ignore[arg-type]
        result[f"{kind}_tokens_a_second"] = round(load.requests * load.tokens_out / seconds, 1)
    if load.rate:  # which requests share a batch differs between any two runs, and with it the rounding
        result["latency_ratios"] = [round(ratio, 4) for ratio in ratios("latency_s")]
    else:
        result["same_tokens"] = [alike(row["static"], row["elastic"]) for row in rows]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--radix", action="store_true", help="with the prefix cache")
    parser.add_argument(
        "--load", action="append", metavar="WORD", help="only loads with this word in their names; may be given several times"
    )
    parser.add_argument("--log-level", default="warning", help="of the engines; info shows each batch")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--deadline-s", type=float, default=500.0, help="measure no longer than this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs; default: beside the JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.ExitStack() as undo:
        comparison = Comparison(arguments, Path(folder))
        undo.callback(lambda: [engine.kill() for engine in comparison.engines])
        undo.callback(comparison.write)
        try:
            comparison.run()
        except EngineFailed as error:
            comparison.found["failed"] = str(error)
            sys.exit(str(error))


if __name__ == "__main__":
    main()
