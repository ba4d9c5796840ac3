# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with several workers, elastic against unhooked: same tokens, throughput ratio, memory of every card idle, at peak and after.

    python benchmarks/ranks_vllm.py --tensor 2 --pairs 3 --json result.json
    python benchmarks/ranks_vllm.py --tensor 2 --pairs 1 --cpu MODEL      # the same on two host cards, to try the program out

Two engines of one 8B-shaped model with random weights live on the same cards at the same time, one unhooked (a static cache) and one
elastic (the same size as its limit), and take turns: each figure is a ratio of neighbours in time. The scheduler of each runs in a
process without a device, its workers in processes of their own.
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
import threading
import time
from pathlib import Path

from kvcached.card import Card

GIB = 1 << 30
BLOCK_TOKENS = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
BLOCK_MIB = 2  # of that shape, over all ranks
LOADS = {"low (8 at a time)": (8, 512, 128), "saturating (256 at a time)": (256, 512, 128)}  # name: (requests, tokens in, tokens out)
TRIAL_LOADS = {"trial (8 at a time)": (8, 64, 16)}
COMMON = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    # Other tenants share the fabric: no multicast, by whatever library.
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}  # fmt: skip
TRIAL = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
TRIAL_CARDS = {"KVCACHED_CARD": "host:0,host:1", "KVCACHED_HOST_GRANULARITY": "128KiB"}


def reinitialise(net: object) -> None:
    """In every worker. Dummy weights are near zero: attention would not matter to the tokens."""
    import torch

    parameters = list(net.parameters())  # type: ignore[attr-defined]
    generator = torch.Generator(device=parameters[0].device)
    generator.manual_seed(0)
    for parameter in parameters:
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.03, generator=generator)


def child(kind: str, arguments: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    start = time.time()
    options = {
        "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 256, "gpu_memory_utilization": 0.45,
        "num_gpu_blocks_override": arguments.blocks if kind == "static" else None, "disable_custom_all_reduce": True,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8, 64, 256]},
    }  # fmt: skip
    if arguments.cpu:
        options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "block_size": 32, "enforce_eager": True}
    llm = LLM(
        model=arguments.model, skip_tokenizer_init=True, seed=0, enable_prefix_caching=False, disable_log_stats=True,
        tensor_parallel_size=arguments.tensor, **options,
    )  # fmt: skip
    llm.apply_model(reinitialise)
    answer(up_s=time.time() - start)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            llm.llm_engine.engine_core.shutdown()
            answer()
            return
        rng = random.Random(command["seed"])
        top = 400 if arguments.cpu else 100_000
        rows = [[rng.randrange(100, top) for _ in range(command["tokens_in"])] for _ in range(command["requests"])]
        parameters = SamplingParams(temperature=0, max_tokens=command["tokens_out"], ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        digest = hashlib.sha1(str(tokens).encode()).hexdigest()[:12]
        answer(seconds=seconds, digest=digest, distinct=len({token for row in tokens for token in row}))


def answer(**values: object) -> None:
    print("RESULT " + json.dumps(values), flush=True)


class Engine:
    """One engine in a process of its own that answers one JSON line per command."""

    def __init__(self, kind: str, arguments: argparse.Namespace, model: str, environment: dict[str, str]) -> None:
        self.kind = kind
        command = [sys.executable, __file__, "--child", kind, "--model", model, "--blocks", str(arguments.blocks)]
        command += ["--tensor", str(arguments.tensor), *(["--cpu", model] if arguments.cpu else [])]
        self.process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
            print(f"  [{self.kind}] {line.rstrip()}", flush=True)
        raise SystemExit(f"the {self.kind} engine ended with {self.process.wait()}")

    def ask(self, **command: object) -> dict[str, object]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read()


class Watch:
    """What every card's record says the elastic engine leases, and what nvidia-smi says is used on every card."""

    def __init__(self, run_dir: Path, cpu: bool) -> None:
        self._run_dir = run_dir
        self._used_gib: dict[str, float] = {}
        self.peak_leases_gib: dict[str, float] = {}
        self.peak_used_gib: dict[str, float] = {}
        self._stop = threading.Event()
        threading.Thread(target=self._follow_leases, daemon=True).start()
        self._smi: subprocess.Popen[str] | None = None
        if not cpu:
            query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
            self._smi = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._follow_devices, daemon=True).start()

    def leases_gib(self) -> dict[str, float]:
        entries = [entry for card in Card.list_cards(self._run_dir) for entry in card.live] if self._run_dir.exists() else []
        return {
            f"{entry.kind.name} of rank {entry.record.rank} on {entry.record.pid}": round(entry.record.lease_bytes / GIB, 4)
            for entry in entries
        }

    def now(self) -> dict[str, object]:
        return {"leases": self.leases_gib(), "used on the cards": dict(self._used_gib)}

    def peak(self) -> dict[str, object]:
        return {"leases": dict(self.peak_leases_gib), "used on the cards": dict(self.peak_used_gib)}

    def forget_peaks(self) -> None:
        self.peak_leases_gib, self.peak_used_gib = {}, {}

    def _follow_leases(self) -> None:
        while not self._stop.wait(0.05):
            for name, lease in self.leases_gib().items():
                self.peak_leases_gib[name] = max(self.peak_leases_gib.get(name, 0.0), lease)

    def _follow_devices(self) -> None:
        assert self._smi is not None
        assert self._smi.stdout is not None
        for line in self._smi.stdout:
            index, used_mib = (part.strip() for part in line.split(","))
            used_gib = round(int(used_mib) / 1024, 2)
            self._used_gib[index] = used_gib
            self.peak_used_gib[index] = max(self.peak_used_gib.get(index, 0.0), used_gib)

    def close(self) -> None:
        self._stop.set()
        if self._smi is not None:
            self._smi.kill()


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    model = arguments.cpu or str(folder / "model")
    if not arguments.cpu:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    size = "64MiB" if arguments.cpu else f"{arguments.blocks * BLOCK_MIB // arguments.tensor}MiB"
    common = COMMON | (TRIAL if arguments.cpu else {})
    ours = {"ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(folder / "run"), "KVCACHED_LIMIT": size, "KVCACHED_VIRTUAL": size}
    watch = Watch(folder / "run", bool(arguments.cpu))
    begin = time.time()
    try:
        static = Engine("static", arguments, model, {**common, "ENABLE_KVCACHED": "false"})
        result: dict[str, object] = {"static start": static.read(), "with the static engine": watch.now()}
        elastic = Engine("elastic", arguments, model, {**common, **ours, **(TRIAL_CARDS if arguments.cpu else {})})
        result["elastic start"] = elastic.read()
        time.sleep(1)
        result["idle"] = watch.now()
        print(json.dumps(result), flush=True)
        loads = TRIAL_LOADS if arguments.cpu else LOADS
        result["loads"] = {name: pair_up(static, elastic, load, name, arguments.pairs, watch) for name, load in loads.items()}
        time.sleep(12)  # longer than the reserve is kept
        result["after"] = watch.now()
        elastic.ask(do="stop")
        static.ask(do="stop")
        result["exit codes"] = [static.process.wait(60), elastic.process.wait(60)]
        result["leases after the stop"] = watch.leases_gib()
    finally:
        watch.close()
    result["seconds in all"] = time.time() - begin
    return result


def pair_up(static: Engine, elastic: Engine, load: tuple[int, int, int], name: str, pairs: int, watch: Watch) -> dict[str, object]:
    watch.forget_peaks()
    requests, tokens_in, tokens_out = load
    ratios, equal, distinct = [], True, 0
    for pair in range(pairs + 1):
        order = (static, elastic) if pair % 2 else (elastic, static)
        command = {"do": "run", "seed": pair, "requests": requests, "tokens_in": tokens_in, "tokens_out": tokens_out}
        answers = {engine.kind: engine.ask(**command) for engine in order}
        equal = equal and answers["static"]["digest"] == answers["elastic"]["digest"]
        distinct = int(str(answers["elastic"]["distinct"]))
        if pair:  # the first one warms up
            ratios.append(float(str(answers["static"]["seconds"])) / float(str(answers["elastic"]["seconds"])))
    print(f"{name}: elastic / static throughput {statistics.median(ratios):.4f} (from {min(ratios):.4f} to {max(ratios):.4f}), "
          f"same tokens: {equal}, distinct {distinct}", flush=True)  # fmt: skip
    return {"ratio": statistics.median(ratios), "ratios": ratios, "same_tokens": equal, "distinct": distinct, "peak": watch.peak()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=2, help="workers, each with a card of its own")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=20_000, help=f"KV blocks of {BLOCK_TOKENS} tokens for each engine")
    parser.add_argument("--cpu", metavar="MODEL", help="try the program out on host cards with this small model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=["static", "elastic"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = compare(arguments, Path(folder))
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
