# SPDX-License-Identifier: Apache-2.0
"""A real SGLang on a GPU, elastic against unhooked: same tokens, throughput ratio, start-up, memory idle, at peak and after.

    python benchmarks/engine_sglang.py --pairs 4 --json result.json

Two engines of one 8B-shaped model with random weights live on the card at the same time, one unhooked (its KV cache is static) and one
elastic, and take turns: each figure is a ratio of neighbours in time. Both get the same number of slots, the same prompts and the same
settings (Triton attention, overlap scheduling).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine_vllm import MODEL, Watch, answer, memory

SLOT_BYTES = 128 << 10
TOKENS = 160_000
LOADS = {  # name: (requests, tokens in, tokens out)
    "low (8 at a time)": (8, 512, 128),
    "saturating (256 at a time)": (256, 512, 128),
    "full (400 at a time, more than fits)": (400, 512, 128),
}
RATES = {  # name: (requests, tokens in, tokens out, requests a second)
    "low rate (4 a second)": (40, 512, 128, 4.0),
    "saturating rate (300 a second)": (600, 512, 128, 300.0),
}
SPREAD = '''"""Dummy weights are near zero: attention would not matter to the tokens."""


def spread(result, model, *args, **kwargs):
    import torch

    generator = torch.Generator(device="cuda")
    generator.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() >= 2 and parameter.is_floating_point():
            parameter.data.normal_(0, 0.03, generator=generator)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", spread, HookType.AFTER)
'''


class Child:
    """One engine in a process of its own that answers one JSON line per command."""

    def __init__(self, kind: str, model: Path, arguments: dict[str, object], environment: dict[str, str]) -> None:
        self.kind = kind
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(arguments), "--model", str(model)],
            env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
            if "Ignore import" not in line:
                print(f"  [{self.kind}] {line.rstrip()}", flush=True)
        raise SystemExit(f"the {self.kind} engine ended with {self.process.wait()}")

    def ask(self, **command: object) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()


def child(model: str, arguments: dict[str, object]) -> None:
    import sglang

    start = time.time()
    engine = sglang.Engine(
        model_path=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", context_length=4096, random_seed=0,
        attention_backend="triton", sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True, mem_fraction_static=0.4,
        max_running_requests=256, max_total_tokens=TOKENS, log_level="warning", **arguments,
    )  # fmt: skip
    answer(up_s=time.time() - start, **memory())
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            engine.shutdown()
            answer(**memory())
            return
        if command["do"] == "flush":
            engine.flush_cache()
            time.sleep(1)
            answer(**memory())
            continue
        rng = random.Random(command["seed"])
        rows = [[rng.randrange(1000, 100000) for _ in range(command["tokens_in"])] for _ in range(command["requests"])]
        sampling = {"temperature": 0, "max_new_tokens": command["tokens_out"], "ignore_eos": True}
        if command["rate"]:
            answer(**serve_at(engine, rows, sampling, command["rate"]), **memory())
            continue
        start = time.perf_counter()
        outputs = engine.generate(input_ids=rows, sampling_params=sampling)
        seconds = time.perf_counter() - start
        tokens = [list(output["output_ids"]) for output in outputs]
        digest = hashlib.sha1(str(tokens).encode()).hexdigest()[:12]
        answer(seconds=seconds, digest=digest, distinct=len({token for row in tokens for token in row}), **memory())


def serve_at(engine: object, rows: list[list[int]], sampling: dict[str, object], rate: float) -> dict[str, float]:
    """Requests arrive `rate` times a second, whether or not the engine keeps up. Seconds until the last is served, and of each."""
    import asyncio

    async def one(number: int) -> float:
        await asyncio.sleep(number / rate)
        await engine.async_generate(input_ids=rows[number], sampling_params=sampling)
        return time.perf_counter() - start - number / rate

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(number) for number in range(len(rows))))

    start = time.perf_counter()
    latencies = engine.loop.run_until_complete(all_of_them())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "latency_s": statistics.median(latencies), "slowest_s": max(latencies)}


def compare(arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        model, plugin = Path(folder) / "model", Path(folder) / "plugin"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        (plugin / "spread-0.dist-info").mkdir(parents=True)
        (plugin / "spread_weights.py").write_text(SPREAD)
        (plugin / "spread-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: spread\nVersion: 0\n")
        (plugin / "spread-0.dist-info" / "entry_points.txt").write_text("[sglang.srt.plugins]\nspread = spread_weights:register\n")
        engine = {"page_size": arguments.page_size, "disable_radix_cache": not arguments.radix}
        common = {
            "HF_HUB_OFFLINE": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            "PYTHONPATH": os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        limit_mib = (TOKENS + 4096) * SLOT_BYTES >> 20
        elastic_only = {
            "ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(Path(folder) / "run"), "KVCACHED_LIMIT": f"{limit_mib}MiB",
            "KVCACHED_VIRTUAL": f"{limit_mib}MiB",
        }  # fmt: skip
        static = Child("static", model, engine, {**common, "ENABLE_KVCACHED": "false"})
        result: dict[str, object] = {"settings": engine, "static start": static.read()}
        elastic = Child("elastic", model, engine, {**common, **elastic_only})
        result["elastic start"] = elastic.read()
        watch = Watch(Path(folder) / "run")
        result["leases after the start"] = watch.leases_gib()
        print("static up", result["static start"], "elastic up", result["elastic start"], flush=True)
        result["loads"] = {name: pair_up(static, elastic, (*load, 0.0), name, arguments.pairs, watch) for name, load in LOADS.items()}
        result["rates"] = {name: pair_up(static, elastic, load, name, 2, watch) for name, load in RATES.items()}
        result["elastic flushed"] = elastic.ask(do="flush")
        result["leases after the flush"] = watch.leases_gib()
        result["elastic stopped"] = elastic.ask(do="stop")
        static.ask(do="stop")
        result["leases after the stop"] = watch.leases_gib()
        result["exit codes"] = [static.process.wait(60), elastic.process.wait(60)]
    return result


def pair_up(static: Child, elastic: Child, load: tuple[int, int, int, float], name: str, pairs: int, watch: Watch) -> dict[str, object]:
    watch.peak_gib = 0.0
    requests, tokens_in, tokens_out, rate = load
    ratios, rows = [], []
    for pair in range(pairs + 1):
        order = (static, elastic) if pair % 2 else (elastic, static)
        command = {"do": "run", "seed": pair, "requests": requests, "tokens_in": tokens_in, "tokens_out": tokens_out, "rate": rate}
        answers = {engine.kind: engine.ask(**command) for engine in order}
        if pair:  # the first one compiles kernels
            ratios.append(float(answers["static"]["seconds"]) / float(answers["elastic"]["seconds"]))
            rows.append(answers)
    equal = [row["static"].get("digest") == row["elastic"].get("digest") for row in rows]
    print(f"{name}: elastic / static throughput {statistics.median(ratios):.4f} (from {min(ratios):.4f} to {max(ratios):.4f}), "
          f"same tokens in {sum(equal)} of {len(equal)}, rows {rows[-1]}", flush=True)  # fmt: skip
    return {"ratio": statistics.median(ratios), "ratios": ratios, "same_tokens": equal, "rows": rows, "elastic_peak_kv_gib": watch.peak_gib}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--radix", action="store_true", help="with the prefix cache")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.model, json.loads(arguments.child))
        return
    result = compare(arguments)
    print(json.dumps({key: value for key, value in result.items() if key not in ("loads", "rates")}, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
