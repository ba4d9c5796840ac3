# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on a GPU, elastic against unhooked: same tokens, throughput ratio, start-up, memory idle, at peak and after.

    python benchmarks/engine_vllm.py --pairs 5 --json result.json

    python benchmarks/engine_vllm.py --shape latents       like DeepSeek-V2 (MLA); `windows`: Gemma 3; `states`: Falcon-H1 (Mamba-2)

Two engines of one model with random weights live on the card at the same time, one unhooked (a static half of the card) and one elastic
(as much memory as its limit), and take turns: each figure is a ratio of neighbours in time. Both get the same number of blocks, the same
prompts and the same settings (full CUDA graphs; async scheduling where the version has it).
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
COMMON = {
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
MODELS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 500000.0,
    },
    "latents": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000.0, "first_k_dense_replace": 27,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 1408, "n_group": 1,
        "topk_group": 1,
    },
    "windows": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
        "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "layer_types": ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(34)],
    },
    "states": {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 2048, "intermediate_size": 4096,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 1e11,
        "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4,
        "mamba_chunk_size": 256, "mamba_expand": 2,
    },
}  # fmt: skip
BLOCKS = {"llama": 20_000, "latents": 20_000, "windows": 100_000, "states": 700}  # for both engines alike, enough for every load
RATES = {  # name: (requests, tokens in, tokens out, requests a second); the arrivals are the same for both engines
    "low rate (4 a second)": (40, 512, 128, 4.0),
    "saturating rate (300 a second)": (900, 512, 128, 300.0),
}
RATE_PAIRS = 2
LOADS = {  # name: (requests, tokens in, tokens out)
    "low (8 at a time)": (8, 512, 128),
    "saturating (256 at a time)": (256, 512, 128),
    "long (64 at a time)": (64, 2048, 128),
}


class Child:
    """One engine in a process of its own that answers one JSON line per command."""

    def __init__(self, kind: str, command: list[str], environment: dict[str, str]) -> None:
        self.kind = kind
        self.process = subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, object]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[7:])
            print(f"  [{self.kind}] {line.rstrip()}", flush=True)
        raise SystemExit(f"the {self.kind} engine ended with {self.process.wait()}")

    def tell(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: object) -> dict[str, object]:
        self.tell(**command)
        return self.read()


def child(kind: str, model: str, blocks: int) -> None:
    import torch
    from vllm import LLM, SamplingParams

    start = time.time()
    llm = LLM(
        model=model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096, seed=0, max_num_seqs=256,
        gpu_memory_utilization=0.45, num_gpu_blocks_override=blocks if kind == "static" else None, enable_prefix_caching=False,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8, 64, 256]}, disable_log_stats=True,
    )  # fmt: skip
    generator = torch.Generator(device="cuda")
    generator.manual_seed(0)

    def reinitialise(net: torch.nn.Module) -> None:
        """Dummy weights are near zero: attention would not matter to the tokens."""
        for parameter in net.parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0, 0.03, generator=generator)

    llm.apply_model(reinitialise)
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    answer(up_s=time.time() - start, blocks=cache.num_blocks, kv_bytes=sum(tensor.size for tensor in cache.kv_cache_tensors), **memory())
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            llm.llm_engine.engine_core.shutdown()
            answer(**memory())
            return
        if command["do"] == "memory":
            time.sleep(command.get("after_s", 0))
            answer(**memory())
            continue
        rng = random.Random(command["seed"])
        rows = [[rng.randrange(1000, 100000) for _ in range(command["tokens_in"])] for _ in range(command["requests"])]
        prompts = [{"prompt_token_ids": row} for row in rows]
        parameters = SamplingParams(temperature=0, max_tokens=command["tokens_out"], ignore_eos=True, detokenize=False)
        if command["rate"]:
            answer(**serve_at(llm.llm_engine, prompts, parameters, command["rate"], str(command["seed"])), **memory())
            continue
        start = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        digest = hashlib.sha1(str(tokens).encode()).hexdigest()[:12]
        answer(seconds=seconds, digest=digest, distinct=len({token for row in tokens for token in row}), **memory())


def serve_at(engine: object, prompts: list[dict[str, object]], parameters: object, rate: float, name: str) -> dict[str, float]:
    """Requests arrive `rate` times a second, whether or not the engine keeps up. Seconds until the last is served, and of each."""
    start = time.perf_counter()
    arrivals = [number / rate for number in range(len(prompts))]
    latencies: list[float] = []
    sent = 0
    while len(latencies) < len(prompts):
        now = time.perf_counter() - start
        while sent < len(prompts) and arrivals[sent] <= now:
            engine.add_request(f"{name}-{sent}", prompts[sent], parameters)
            sent += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[sent] - now))
            continue
        finished = [output.request_id for output in engine.step() if output.finished]
        now = time.perf_counter() - start
        latencies += [now - arrivals[int(request_id.split("-")[1])] for request_id in finished]
    return {"seconds": now, "latency_s": statistics.median(latencies), "slowest_s": max(latencies)}


class Watch:
    """The elastic engine's leases on the card's record, twenty times a second."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.peak_gib = 0.0
        self._stop = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def leases_gib(self) -> dict[str, float]:
        entries = [entry for card in Card.list_cards(self._run_dir) for entry in card.live] if self._run_dir.exists() else []
        return {entry.kind.name: round(entry.record.lease_bytes / GIB, 2) for entry in entries}

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            self.peak_gib = max(self.peak_gib, self.leases_gib().get("KV", 0.0))


def answer(**values: object) -> None:
    print("RESULT " + json.dumps(values), flush=True)


def memory() -> dict[str, float]:
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"card_free_gib": round(free / GIB, 2), "card_total_gib": round(total / GIB, 2)}


def compare(arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(COMMON | MODELS[arguments.shape]))
        common = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }  # fmt: skip
        elastic_only = {
            "ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(Path(folder) / "run"), **arguments.setting,
        }  # fmt: skip
        command = [__file__, "--model", str(model), "--blocks", str(arguments.blocks), "--child"]
        static = Child("static", [*command, "static"], {**common, "ENABLE_KVCACHED": "false"})
        result: dict[str, object] = {"shape": arguments.shape, "static start": (up := static.read())}
        elastic_only["KVCACHED_VIRTUAL"] = str(up["kv_bytes"])
        elastic = Child("elastic", [*command, "elastic"], {**common, **elastic_only})
        result["elastic start"] = elastic.read()
        watch = Watch(Path(folder) / "run")
        result["leases after the start"] = watch.leases_gib()
        print("static up", result["static start"], "elastic up", result["elastic start"], flush=True)
        result["loads"] = {name: pair_up(static, elastic, load, name, arguments.pairs, watch) for name, load in LOADS.items()}
        rates = RATES if arguments.rates else {}
        result["rates"] = {name: pair_at_rate(static, elastic, load, name) for name, load in rates.items()}
        time.sleep(1)
        result["leases a second after the last request"] = watch.leases_gib()
        result["elastic idle again"] = elastic.ask(do="memory", after_s=4)
        result["leases when idle"] = watch.leases_gib()
        result["elastic stopped"] = elastic.ask(do="stop")
        result["leases after the stop"] = watch.leases_gib()
        static.ask(do="stop")
        result["exit codes"] = [static.process.wait(60), elastic.process.wait(60)]
    return result


def pair_up(static: Child, elastic: Child, load: tuple[int, int, int], name: str, pairs: int, watch: Watch) -> dict[str, object]:
    watch.peak_gib = 0.0
    requests, tokens_in, tokens_out = load
    ratios, rows, equal = [], [], True
    for pair in range(pairs + 1):
        order = (static, elastic) if pair % 2 else (elastic, static)
        command = {"do": "run", "seed": pair, "requests": requests, "tokens_in": tokens_in, "tokens_out": tokens_out, "rate": 0}
        answers = {engine.kind: engine.ask(**command) for engine in order}
        equal = equal and answers["static"]["digest"] == answers["elastic"]["digest"]
        if pair:  # the first one warms up
            ratios.append(float(answers["static"]["seconds"]) / float(answers["elastic"]["seconds"]))
            rows.append(answers)
    print(f"{name}: elastic / static throughput {statistics.median(ratios):.4f} (from {min(ratios):.4f} to {max(ratios):.4f}), "
          f"same tokens: {equal}, distinct {rows[-1]['elastic']['distinct']}", flush=True)  # fmt: skip
    seconds = {kind: statistics.median(float(row[kind]["seconds"]) for row in rows) for kind in ("static", "elastic")}
    ratio = statistics.median(ratios)
    return {"ratio": ratio, "ratios": ratios, "same_tokens": equal, "seconds": seconds, "elastic_peak_kv_gib": watch.peak_gib}


def pair_at_rate(static: Child, elastic: Child, load: tuple[int, int, int, float], name: str) -> dict[str, object]:
    """No comparison of tokens: when requests join a batch differs between any two runs, and with it the rounding."""
    requests, tokens_in, tokens_out, rate = load
    rows = []
    for pair in range(RATE_PAIRS + 1):
        order = (static, elastic) if pair % 2 else (elastic, static)
        command = {"do": "run", "seed": 100 + pair, "requests": requests, "tokens_in": tokens_in, "tokens_out": tokens_out, "rate": rate}
        rows.append({engine.kind: engine.ask(**command) for engine in order})
    ratios = {
        key: statistics.median(float(row["static"][key]) / float(row["elastic"][key]) for row in rows[1:])
        for key in ("seconds", "latency_s")
    }
    print(f"{name}: elastic / static throughput {ratios['seconds']:.4f}, static / elastic latency {ratios['latency_s']:.4f}", flush=True)
    return {"throughput_ratio": ratios["seconds"], "latency_ratio": ratios["latency_s"], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--shape", choices=sorted(MODELS), default="llama")
    parser.add_argument("--rates", action=argparse.BooleanOptionalAction, default=True, help="requests that arrive at a rate, too")
    parser.add_argument("--setting", action="append", default=[], help="for the elastic engine: NAME=VALUE")
    parser.add_argument("--blocks", type=int, help="KV blocks for each engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=["static", "elastic"], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.model, arguments.blocks)
        return
    arguments.setting = dict(setting.split("=", 1) for setting in arguments.setting)
    arguments.blocks = arguments.blocks or BLOCKS[arguments.shape]
    result = compare(arguments)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
