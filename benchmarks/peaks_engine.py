# SPDX-License-Identifier: Apache-2.0
"""One engine of `peaks.py`: a real vLLM in this process that serves requests at the times it is told, one JSON line per command."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from engine_vllm import answer

SEQUENCES = 256


def make_llm(arguments: argparse.Namespace) -> Any:
    """The same settings elastic and static, but for the size of the KV cache."""
    from vllm import LLM

    on_card = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "gpu_memory_utilization": arguments.utilization,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8, 32, 64, 128, 192, 256]},
    }
    return LLM(
        model=arguments.model, skip_tokenizer_init=True, max_model_len=arguments.longest, max_num_seqs=SEQUENCES, seed=0,
        kv_cache_memory_bytes=arguments.kv_bytes or None, enable_prefix_caching=True, disable_log_stats=False,
        **(on_card if arguments.device == "cuda" else {"enforce_eager": True, "dtype": "float32", "block_size": 32}),
    )  # fmt: skip


class Serving:
    """A schedule of requests, served whether or not the engine keeps up. Times are in seconds."""

    def __init__(self, llm: Any, command: dict[str, Any]) -> None:
        from vllm import SamplingParams

        luck = random.Random(command["seed"])
        vocabulary = command["vocabulary"]
        self._prompts = [[luck.randrange(10, vocabulary) for _ in range(command["tokens_in"])] for _ in command["arrivals"]]
        self._parameters = SamplingParams(temperature=0, max_tokens=command["tokens_out"], ignore_eos=True, detokenize=False)
        self._engine = llm.llm_engine
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._llm = llm
        self._arrivals = command["arrivals"]
        self._name = command["seed"]
        self._first: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._longest_queue = 0
        self._sent = 0

    def run(self, begin_s: float) -> dict[str, Any]:
        """`begin_s` on the clock of `time.time`, the same for all engines of a fleet."""
        before, last_s = self._preemptions(), 0.0
        time.sleep(max(0.0, begin_s - time.time()))
        while self._sent < len(self._arrivals) or self._engine.has_unfinished_requests():
            self._send(time.time() - begin_s)
            if not self._engine.has_unfinished_requests():
                time.sleep(max(0.0, self._arrivals[self._sent] - (time.time() - begin_s)))
                continue
            outputs = self._engine.step()
            last_s = time.time() - begin_s
            for output in outputs:
                number = int(output.request_id.rpartition("-")[2])
                if tokens := len(output.outputs[0].token_ids):
                    self._first.setdefault(number, last_s)
                    self._tokens[number] = tokens
            self._longest_queue = max(self._longest_queue, len(self._scheduler.waiting))
        ttft = [self._first[number] - arrival for number, arrival in enumerate(self._arrivals)]
        return {
            "ttft_s": ttft,
            "tokens": sum(self._tokens.values()),
            "end_s": last_s,
            "preemptions": self._preemptions() - before,
            "longest_queue": self._longest_queue,
        }

    def _send(self, now_s: float) -> None:
        while self._sent < len(self._arrivals) and self._arrivals[self._sent] <= now_s:
            prompt = {"prompt_token_ids": self._prompts[self._sent]}
            self._engine.add_request(f"{self._name}-{self._sent}", prompt, self._parameters)
            self._sent += 1

    def _preemptions(self) -> int:
        return sum(int(metric.value) for metric in self._llm.get_metrics() if metric.name == "vllm:num_preemptions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--kv-bytes", type=int, default=0, help="of a static KV cache")
    parser.add_argument("--longest", type=int, required=True, help="tokens of one request at most")
    parser.add_argument("--utilization", type=float, default=0.2)
    arguments = parser.parse_args()
    begin = time.time()
    llm = make_llm(arguments)
    cache = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    kv_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors)
    answer(up_s=time.time() - begin, blocks=cache.num_blocks, kv_bytes=kv_bytes, tokens=cache.num_blocks * block_tokens(cache))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            llm.llm_engine.engine_core.shutdown()
            answer(stopped=True)
            return
        figures = Serving(llm, command).run(command["begin_s"])
        answer(**figures, mean_ttft_s=statistics.fmean(figures["ttft_s"]))


def block_tokens(cache: Any) -> int:
    return int(cache.kv_cache_groups[0].kv_cache_spec.block_size)


if __name__ == "__main__":
    main()
