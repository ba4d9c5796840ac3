# SPDX-License-Identifier: Apache-2.0
"""Two workers on two nodes of a Ray cluster on this machine: tokens and memory as one line of JSON. A program of its own.

    python -m harness.ray_cluster MODEL

Ray places workers by accelerators, which vLLM's CPU platform does not name; here each node has one, in name only.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from harness.cases import BASE_OPTIONS, load_prompts
from harness.ranks import by_rank, device_files, wait_for

PROMPTS = 64
NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20}


def name_the_accelerator() -> None:
    """In every process of the cluster."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def main(model: str) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, runtime_env={"worker_process_setup_hook": "harness.ray_cluster.name_the_accelerator"})
    try:
        seen = serve(model)
        seen["nodes"] = len({actor["NodeID"] for actor in _actors()})
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write(f"\n{json.dumps(seen)}\n")


def _actors() -> list[dict[str, Any]]:
    from ray._private.state import actors

    return [{"NodeID": actor["Address"]["NodeID"]} for actor in actors().values()]


def serve(model: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    name_the_accelerator()
    llm = LLM(model=model, disable_log_stats=True, tensor_parallel_size=2, distributed_executor_backend="ray", **BASE_OPTIONS)
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = llm.generate(load_prompts()[:PROMPTS], sampling, use_tqdm=False)
    found: list[int] = []

    def agree() -> bool:
        """Each rank shows what it has mapped at moments of its own."""
        found[:] = [rank["mapped"] for rank in by_rank().values()]
        return len(set(found)) == 1

    wait_for(agree)
    seen = {
        "executor": type(llm.llm_engine.engine_core.engine_core.model_executor).__name__,
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "mapped": found,
        "device_files": device_files(),
    }
    llm.llm_engine.engine_core.shutdown()
    return seen | {"nothing_left": wait_for(lambda: not by_rank())}


if __name__ == "__main__":
    main(sys.argv[1])
