# SPDX-License-Identifier: Apache-2.0
"""Three real vLLM engines on one card under the most churn that can be had, with a stamp behind every block in use: 0 wrong bytes.

    python tests/gpu/canary_engines.py --seconds 300 --json result.json

They share one budget. Each sends itself waves of requests of any size, many with a common beginning, so
that they press each other, preempt, cache, evict and move pages all the time. Half-way one of them is killed with `kill -9` and started
again. A stamp that is not what was written ends an engine, and this program with 1. Between waves each asks the same few prompts, one at
a time and without the prefix cache: the answers may not change either.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING", "ENABLE_KVCACHED": "true", "KVCACHED_CANARY": "true", "KVCACHED_VIRTUAL": "6GiB",
    "KVCACHED_BUDGET": "20GiB",
}  # fmt: skip
NAMES = ("a", "b", "c")


class Engine:
    """In this process; sends itself requests."""

    def __init__(self, model: str, seed: int) -> None:
        import torch
        from vllm import LLM

        self.llm = LLM(
            model=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, seed=0, max_num_seqs=128,
            gpu_memory_utilization=0.25, enable_prefix_caching=True, disable_log_stats=True,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8, 64, 128]},
        )  # fmt: skip
        generator = torch.Generator(device="cuda")
        generator.manual_seed(0)

        def reinitialise(net: torch.nn.Module) -> None:
            for parameter in net.parameters():
                if parameter.dim() >= 2:
                    parameter.data.normal_(0, 0.03, generator=generator)

        self.llm.apply_model(reinitialise)
        self.luck = random.Random(seed)
        self.shared = [self.row(random.Random(number), 700) for number in range(6)]
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.counts = {"waves": 0, "requests": 0, "tokens": 0, "changed_answers": 0}

    def row(self, luck: random.Random, tokens: int) -> list[int]:
        return [luck.randrange(10, 31_000) for _ in range(tokens)]

    def ask(self, rows: list[list[int]], tokens: list[int], salt: str = "") -> list[list[int]]:
        from vllm import SamplingParams

        sampling = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False) for most in tokens]
        outputs = self.llm.generate(
            [{"prompt_token_ids": row, **({"cache_salt": salt} if salt else {})} for row in rows], sampling, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def alone(self) -> list[list[int]]:
        fixed = random.Random(99)
        return [self.ask([self.row(fixed, 300)], [24], salt=str(time.time()))[0] for _ in range(3)]

    def wave(self) -> None:
        rows, tokens = [], []
        for _ in range(self.luck.choice((4, 20, 60))):
            common = self.luck.choice(self.shared)[: self.luck.randrange(0, 700)] if self.luck.random() < 0.6 else []
            rows.append(common + self.row(self.luck, self.luck.randrange(8, 800)))
            tokens.append(self.luck.randrange(4, 48))
        answers = self.ask(rows, tokens)
        self.counts["waves"] += 1
        self.counts["requests"] += len(rows)
        self.counts["tokens"] += sum(map(len, answers))

    def run(self, end_s: float) -> dict[str, object]:
        first = self.alone()
        while time.time() < end_s:
            self.wave()
            if self.counts["waves"] % 4 == 0:
                self.counts["changed_answers"] += sum(was != now for was, now in zip(first, self.alone(), strict=True))
        worker = self.core.model_executor.driver_worker.worker
        tally = self.core.scheduler.kvcached.pool.tally
        return {
            **self.counts,
            "stamps_read": worker.kvcached_memory._canary.checks,
            "preemptions": tally.preemptions,
            "avoidable_preemptions": tally.avoidable_preemptions,
            "presses": tally.presses,
            "taken_mib": tally.taken_bytes >> 20,
            "given_mib": tally.given_bytes >> 20,
            "evicted_blocks": {why.value: blocks for why, blocks in tally.evicted_blocks.items() if blocks},
        }


def start(name: str, seed: int, model: Path, run_dir: Path, end_s: float) -> subprocess.Popen[str]:
    environment = {**os.environ, **ENVIRONMENT, "KVCACHED_RUN_DIR": str(run_dir), "KVCACHED_IPC_NAME": f"{name}{seed}"}
    command = [sys.executable, __file__, "--child", str(seed), "--model", str(model), "--end", str(end_s)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def results_of(name: str, process: subprocess.Popen[str]) -> dict[str, object]:
    output = process.communicate()[0]
    lines = [line[7:] for line in output.splitlines() if line.startswith("RESULT ")]
    found: dict[str, object] = {"name": name, "code": process.returncode, **(json.loads(lines[-1]) if lines else {})}
    if process.returncode not in (0, -signal.SIGKILL):
        found["said"] = output[-3000:]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    for hidden in ("--child", "--model", "--end"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        engine = Engine(arguments.model, int(arguments.child))
        print("RESULT " + json.dumps(engine.run(float(arguments.end))), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        end_s = time.time() + arguments.seconds
        running = {name: start(name, seed, model, Path(folder) / "run", end_s) for seed, name in enumerate(NAMES, 1)}
        time.sleep(arguments.seconds / 2)
        killed = running["b"]
        killed.kill()
        running["b again"] = start("b", 20, model, Path(folder) / "run", end_s)
        results = [results_of(name, process) for name, process in running.items()]
    for result in results:
        print(result, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    lived = [result for result in results if result["name"] != "b"]
    bad = [result["name"] for result in lived if result["code"] or result["changed_answers"] or not result["stamps_read"]]
    pressed = any(result.get("presses") for result in lived)
    print(f"wrong: {bad}" if bad else "0 wrong bytes" if pressed else "nothing was shown: no engine pressed another")
    return bool(bad) or not pressed


if __name__ == "__main__":
    raise SystemExit(main())
