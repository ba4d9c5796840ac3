# SPDX-License-Identifier: Apache-2.0
"""What an engine holds once it is idle, against the prefix cache that it keeps, and whether the hot prompts are still found.

    PYTHONPATH=<a vLLM> python benchmarks/idle_footprint.py                       on the CPU: a tiny model, 1,024 tokens to a page
    PYTHONPATH=<a vLLM> python benchmarks/idle_footprint.py --requests 100        a short run; the figures mean little
    python benchmarks/idle_footprint.py --shape llama                             on a GPU: like Llama-3.1-8B, random weights

Three real engines, one after the other, serve the same requests, 96 at a time: with the cache capped, with the same cap in plain order of
use (what is dropped is the coldest, wherever it lies), and without a cap. Half of the requests begin with one of a few hot prompts. Once an
engine is idle and has given back its reserve, what it leases is compared with the bytes of the blocks it kept; then the hot prompts are
asked once more. Counts and bytes are exact; seconds are those of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_vllm import COMMON, GIB, MODELS

from kvcached.card import Card
from kvcached.card.record import Kind
from kvcached.units import MIB

RATIO_GOAL = 1.15
HIT_GOAL = 0.005
AT_ONCE = 96
DECODE = (16, 256)
REPEAT_TAIL = 8  # tokens behind a hot prompt when it is asked again, so that none of its own is computed anew
IDLE_TIMEOUT_S = 60.0
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 10000.0,
    "vocab_size": 2048, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """`range_bytes`: what the KV cache may hold; it and the model decide how many blocks are on a page."""

    config: dict[str, Any]
    range_bytes: int
    block_tokens: int
    options: dict[str, Any]
    environment: dict[str, str]


SHAPES = {
    "tiny": Shape(COMMON | TINY, 256 * MIB, 32, {"dtype": "float32", "enforce_eager": True}, {"VLLM_CPU_KVCACHE_SPACE": "1"}),
    "llama": Shape(
        COMMON | MODELS["llama"],
        24 * GIB,
        16,
        {"dtype": "bfloat16", "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8, 64, 96]}},
        {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    ),
}
ENGINES = {  # name: (capped, in plain order of use)
    "capped": (True, False),
    "capped, by use": (True, True),
    "no cap": (False, False),
}


@dataclass(frozen=True)
class Load:
    """What is asked. Lengths are in tokens; prompts are drawn evenly from 1 to `longest`."""

    requests: int
    cached_tokens: int
    hot: int
    hot_tokens: int
    longest: int
    vocabulary: int
    seed: int

    def hot_prompts(self) -> list[list[int]]:
        choose = random.Random(self.seed)
        return [self._tokens(choose, self.hot_tokens) for _ in range(self.hot)]

    def prompts(self) -> list[tuple[list[int], int, bool]]:
        """(tokens, tokens to decode, whether it begins with a hot prompt) of each request, in order of arrival."""
        choose, hot = random.Random(self.seed + 1), self.hot_prompts()
        rows = []
        for _ in range(self.requests):
            begins_hot = choose.random() < 0.5
            head = choose.choice(hot) if begins_hot else []
            tail = self._tokens(choose, choose.randint(1, self.longest - len(head)))
            rows.append((head + tail, choose.randint(*DECODE), begins_hot))
        return rows

    def repeats(self) -> list[list[int]]:
        choose = random.Random(self.seed + 2)
        return [prompt + self._tokens(choose, REPEAT_TAIL) for prompt in self.hot_prompts()]

    def _tokens(self, choose: random.Random, tokens: int) -> list[int]:
        return [choose.randrange(2, self.vocabulary) for _ in range(tokens)]


def child(folder: Path, shape: Shape, load: Load, *, by_use: bool) -> dict[str, Any]:
    """One engine, in its own process: serve, rest, be asked again."""
    from vllm import LLM, SamplingParams

    from kvcached.core.victims import CacheIndex

    if by_use:
        CacheIndex.least_worth = coldest
    llm = LLM(
        model=str(folder / "model"), load_format="dummy", skip_tokenizer_init=True, seed=0, block_size=shape.block_tokens,
        max_model_len=4096, max_num_seqs=AT_ONCE, enable_prefix_caching=True, disable_log_stats=True, **shape.options,
    )  # fmt: skip

    def serve(prompts: list[list[int]], decode: list[int]) -> list[int]:
        """How many tokens of each prompt were found in the cache."""
        sampling = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False) for tokens in decode]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        short = [output for output, tokens in zip(outputs, decode, strict=True) if len(output.outputs[0].token_ids) != tokens]
        if short:
            raise SystemExit(f"{len(short)} requests ended early")
        return [output.num_cached_tokens or 0 for output in outputs]

    rows = load.prompts()
    begun = time.monotonic()
    found = serve([tokens for tokens, _, _ in rows], [decode for _, decode, _ in rows])
    seconds = time.monotonic() - begun
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kvcached.pool
    idle = at_rest(pool, folder / "run")
    asked_hot = sum(begins_hot for _, _, begins_hot in rows) * load.hot_tokens
    found_hot = sum(min(tokens, load.hot_tokens) for tokens, (_, _, begins_hot) in zip(found, rows, strict=True) if begins_hot)
    again = serve(load.repeats(), [1] * load.hot)
    return {
        **idle,
        "block_tokens": shape.block_tokens,
        "seconds": round(seconds, 1),
        "decoded_tokens": sum(decode for _, decode, _ in rows),
        "evicted": {why.value: blocks for why, blocks in pool.tally.evicted_blocks.items() if blocks},
        "hot_found_in_run": found_hot / asked_hot if asked_hot else 0.0,
        "hot_found_again": sum(min(tokens, load.hot_tokens) for tokens in again) / (load.hot * load.hot_tokens),
    }


def coldest(cache: Any, blocks: int) -> list[int]:
    """Those of all pages that were used longest ago: the order of engines that know no pages."""
    return cache._must_go([entry[3] for entry in sorted(cache.blocks.values())[:blocks]])


def at_rest(pool: Any, run_dir: Path) -> dict[str, Any]:
    """What the pool holds once nothing empty is mapped any more and its lease says so."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    step_bytes = pool.geometry.release_step_bytes
    while True:
        counts, leased = pool.counts(), leased_bytes(run_dir)
        if counts.held_pages == counts.used_pages and leased == counts.held_pages * step_bytes:
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"not at rest after {IDLE_TIMEOUT_S:g} s: {leased} bytes leased, {counts}")
        time.sleep(0.1)
    geometry = pool.geometry
    kept_bytes = counts.cached_blocks * geometry.block_bytes * geometry.planes
    return {
        "block_bytes": geometry.block_bytes * geometry.planes,
        "blocks_per_page": geometry.max_blocks_per_page,
        "kept_blocks": counts.cached_blocks,
        "kept_bytes": kept_bytes,
        "held_pages": counts.held_pages,
        "held_bytes": leased,
        "least_pages": -(-(counts.cached_blocks + counts.owned_blocks) // geometry.max_blocks_per_page),
        "ratio": leased / kept_bytes if kept_bytes else float("inf"),
    }


def leased_bytes(run_dir: Path) -> int:
    return sum(entry.record.lease_bytes for card in Card.list_cards(run_dir) for entry in card.live if entry.kind is Kind.KV)


def run(name: str, arguments: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Start the engine `name` in a process of its own and read its result."""
    shape, (capped, by_use) = SHAPES[arguments.shape], ENGINES[name]
    with tempfile.TemporaryDirectory(prefix="idle-") as scratch:
        folder = Path(scratch)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(shape.config))
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(folder / "run"),
            "KVCACHED_VIRTUAL": str(arguments.range_mib * MIB), "KVCACHED_MAX_CACHED_TOKENS": str(load.cached_tokens if capped else -1),
            **shape.environment, **dict(setting.split("=", 1) for setting in arguments.setting),
        }  # fmt: skip
        words = ["--child", scratch, "--shape", arguments.shape, "--load", json.dumps(asdict(load)), *(["--by-use"] if by_use else [])]
        result = folder / "result.json"
        done = subprocess.run([sys.executable, __file__, *words], env=environment, check=False)
        if done.returncode or not result.exists():
            raise SystemExit(f"the engine {name!r} ended with {done.returncode} and no result")
        return json.loads(result.read_text())


def report(results: dict[str, dict[str, Any]], load: Load) -> list[str]:
    heads = ["", *results]
    rows = [
        ["blocks kept", *(str(result["kept_blocks"]) for result in results.values())],
        ["pages held when idle, least possible", *(f"{result['held_pages']}, {result['least_pages']}" for result in results.values())],
        ["bytes held / bytes of the kept blocks", *(f"{result['ratio']:.3f}" for result in results.values())],
        ["hot prompts found when asked again", *(percent(result["hot_found_again"]) for result in results.values())],
        ["hot prompts found during the run", *(percent(result["hot_found_in_run"]) for result in results.values())],
        [
            "blocks dropped",
            *(", ".join(f"{blocks} ({why})" for why, blocks in result["evicted"].items()) or "0" for result in results.values()),
        ],
        ["seconds for the requests", *(f"{result['seconds']:.0f}" for result in results.values())],
    ]
    first = next(iter(results.values()))
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f} in the last 15 minutes"
    return [
        f"{load.requests} requests, {AT_ONCE} at a time, {first['decoded_tokens']} tokens decoded; cap {load.cached_tokens} tokens; "
        f"{load.hot} hot prompts of {load.hot_tokens} tokens; blocks of {first['block_tokens']} tokens, {first['block_bytes'] >> 10} KiB, "
        f"{first['blocks_per_page']} to a page; {machine}",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)),
        "",
        *(verdicts(results) if set(results) == set(ENGINES) else []),
    ]


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    """The goals, and whether they were met."""
    ratio, hits = results["capped"]["ratio"], {name: result["hot_found_again"] for name, result in results.items()}
    return [
        f"bytes held / bytes kept at most {RATIO_GOAL}: {'met' if ratio <= RATIO_GOAL else 'MISSED'}",
        *(
            f"hit rate at most half a point below that of {other!r}: {'met' if hits['capped'] >= hits[other] - HIT_GOAL else 'MISSED'}"
            for other in ("capped, by use", "no cap")
        ),
    ]


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--cached-tokens", type=int, default=16_000, help="the cap on the prefix cache")
    parser.add_argument("--hot", type=int, default=8, help="prompts that half of the requests begin with")
    parser.add_argument("--hot-tokens", type=int, default=384)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--range-mib", type=int, help="address range of the KV cache; on the CPU it decides the size of a page")
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help="only this one; may be given again")
    parser.add_argument("--setting", action="append", default=[], help="for the engines: NAME=VALUE")
    parser.add_argument("--json", type=Path)
    for hidden, more in (("--child", {"type": Path}), ("--load", {}), ("--by-use", {"action": "store_true"})):
        parser.add_argument(hidden, help=argparse.SUPPRESS, **more)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.child:
        result = child(arguments.child, shape, Load(**json.loads(arguments.load)), by_use=arguments.by_use)
        (arguments.child / "result.json").write_text(json.dumps(result))
        return
    arguments.range_mib = arguments.range_mib or shape.range_bytes // MIB
    names = ("requests", "cached_tokens", "hot", "hot_tokens", "longest", "seed")
    load = Load(**{name: getattr(arguments, name) for name in names}, vocabulary=int(shape.config["vocab_size"]))
    results = {name: run(name, arguments, load) for name in arguments.engine or ENGINES}
    print("\n".join(report(results, load)))
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": asdict(load), "results": results}, indent=1))


if __name__ == "__main__":
    main()
