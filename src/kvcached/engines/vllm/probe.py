# SPDX-License-Identifier: Apache-2.0
"""Run the installed vLLM once on the CPU, elastic or not, and print what was seen as one JSON value.

    python -m kvcached.engines.vllm.probe MODEL

A program of its own, since an engine takes its settings from the process it is in. `kvcached verify --run` calls it twice.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from kvcached.card.card import Card
from kvcached.config import load_settings

_PROMPTS: Final = 12
_TOKENS: Final = 16
_SETTLE_S: Final = 20.0


def main(model: str) -> None:
    from vllm import LLM

    llm = LLM(
        model=model,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        seed=0,
        disable_log_stats=True,
    )
    core = llm.llm_engine.engine_core.engine_core
    seen: dict[str, Any] = {
        "worker": type(core.model_executor.driver_worker.worker).__name__,
        "runner": type(core.model_executor.driver_worker.worker.model_runner).__name__,
        "scheduler": type(core.scheduler).__name__,
        "tokens": _generate(llm),
    }
    memory = getattr(core.scheduler, "kvcached", None)
    if memory is not None:
        seen |= _look(memory, core.model_executor.driver_worker.worker)
    llm.llm_engine.engine_core.shutdown()
    if memory is not None:
        cards = Card.list_cards(load_settings().run_dir)
        seen["leased_after_shutdown_bytes"] = sum(card.leased_bytes for card in cards)
    sys.stdout.write(f"\n{json.dumps(seen)}\n")


def _generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [(7 * number + 3 * place) % 200 + 1 for place in range(20 + 37 * number)]} for number in range(_PROMPTS)
    ]
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(prompts, sampling, use_tqdm=False)]


def _look(memory: Any, worker: Any) -> dict[str, Any]:
    """Strides of the tensors against the geometry, and whether memory leaves when nobody needs it."""
    geometry = memory.pool.geometry
    memory.operations.evict(geometry.range_bytes)
    deadline = time.monotonic() + _SETTLE_S
    while memory.pool.counts().held_pages > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    return {
        "line": memory.describe(),
        "stride_bytes": max(_stride_bytes(cache) for cache in worker.model_runner.kv_caches),
        "block_stride_bytes": geometry.block_stride_bytes,
        "held_pages": memory.pool.counts().held_pages,
    }


def _stride_bytes(cache: Any) -> int:
    tensor = cache[0] if isinstance(cache, (list, tuple)) else cache
    return int(max(tensor.stride()) * tensor.element_size())


if __name__ == "__main__":
    main(sys.argv[1])
