# SPDX-License-Identifier: Apache-2.0
"""Run the installed SGLang once on the CPU, elastic or not, and print what was seen as one JSON value.

    python -m kvcached.engines.sglang.probe MODEL

A program of its own, since an engine takes its settings from the process it is in. `kvcached verify --engine sglang --run` calls it twice.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Final

from kvcached.card.card import Card
from kvcached.config import elastic_is_asked_for, load_settings

_PROMPTS: Final = 8
_TOKENS: Final = 16
_SETTLE_S: Final = 20.0


def main(model: str) -> None:
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        dtype="float32",
        skip_tokenizer_init=True,
        mem_fraction_static=0.2,
        max_total_tokens=4096,
        max_running_requests=4,
        chunked_prefill_size=128,
        context_length=1024,
        disable_cuda_graph=True,
        page_size=16,
        random_seed=1,
    )
    prompts = [[(7 * number + 3 * place) % 200 + 1 for place in range(20 + 37 * number)] for number in range(_PROMPTS)]
    sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
    seen: dict[str, Any] = {"tokens": [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=sampling)]}
    if elastic_is_asked_for():
        seen["busy_bytes"] = _leased_bytes()
        engine.flush_cache()
        seen["idle_bytes"] = _settled(lambda: _leased_bytes() < seen["busy_bytes"])
    engine.shutdown()
    if elastic_is_asked_for():
        seen["leased_after_shutdown_bytes"] = _settled(lambda: _leased_bytes() == 0)
    sys.stdout.write(f"\n{json.dumps(seen)}\n")


def _leased_bytes() -> int:
    return sum(card.leased_bytes for card in Card.list_cards(load_settings().run_dir))


def _settled(is_settled: Any) -> int:
    """What is leased when that is so, or was last."""
    deadline = time.monotonic() + _SETTLE_S
    while not is_settled() and time.monotonic() < deadline:
        time.sleep(0.05)
    return _leased_bytes()


if __name__ == "__main__":
    main(sys.argv[1])
