# SPDX-License-Identifier: Apache-2.0
"""Which cases run on which release. The newest runs all; the older ones what differs there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_harness import pipelines, replicas
from sglang_harness.cases import MODELS, Batch, Case

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEWEST = "0.5.23"
OLDER = ("0.5.21", "0.5.17", "0.5.11")
VERSIONS = (NEWEST, *OLDER)
INTERPRETED = {"TRITON_INTERPRET": "1"}  # SGLang's Triton kernels on CPU tensors; older releases allocate pages by one

# A page is 128 KiB here: 64 slots of the two layers of the tiny Llama, side by side.
SQUEEZE_PAGES = 8
SQUEEZE = {"limits": [[8, SQUEEZE_PAGES], [60, 60]], "new_tokens": 64}
INTERPRETER_SIZES = {"prompts": 2, "step": 60, "new_tokens": 3}
EXPERTS = {"expert_biases": True}


def product_of(page_size: int) -> tuple[Case, ...]:
    """One of each kind of model, with this page size."""
    arguments = {"page_size": page_size}
    interpreted = {"attention_backend": "triton", "max_total_tokens": 1024}
    return (
        Case(f"llama-{page_size}", arguments=arguments),
        Case(f"qwen3-{page_size}", model="qwen3", arguments=arguments),
        Case(f"mla-{page_size}", model="deepseek", arguments=arguments, also={"absorbed_mla": True}),
        Case(
            f"windows-{page_size}",
            model="gptoss",
            arguments=arguments | interpreted,
            also=INTERPRETER_SIZES | EXPERTS,
            environment=INTERPRETED,
        ),
    )


LLAMA_1, QWEN_1, MLA_1, WINDOWS_1 = product_of(1)
LLAMA_16, QWEN_16, MLA_16, WINDOWS_16 = product_of(16)
PRODUCT = (*product_of(1), *product_of(16))
TRITON_16 = Case(
    "triton-16", arguments={"attention_backend": "triton", "max_total_tokens": 1024}, also=INTERPRETER_SIZES, environment=INTERPRETED
)
# With another that the stock engine has to match: (case, the case whose stock tokens it must give).
VARIANTS: dict[str, tuple[Case, Case]] = {
    "no-radix": (Case("no-radix", arguments={"disable_radix_cache": True}), LLAMA_16),
    "no-overlap": (Case("no-overlap", arguments={"disable_overlap_schedule": True}), LLAMA_16),
    "per-layer": (Case("per-layer", environment={"KVCACHED_CONTIGUOUS_LAYOUT": "false"}), LLAMA_16),
    "no-chunks": (Case("no-chunks", arguments={"chunked_prefill_size": -1}), LLAMA_16),
    "test-retract": (Case("test-retract", environment={"SGLANG_TEST_RETRACT": "1"}), LLAMA_16),
}
HYBRID_1 = Case(
    "hybrid-1",
    model="qwen3next",
    arguments={"page_size": 1, "mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    also={"gated_norm": True, "prompts": 4, "new_tokens": 12},
)
# Each with the stock engine. The rest of the product is run with --full.
QUICK: dict[str, tuple[Case, ...]] = {
    NEWEST: (LLAMA_1, LLAMA_16, QWEN_16, MLA_16, TRITON_16, WINDOWS_1, HYBRID_1),
    "0.5.21": (LLAMA_16, MLA_1),
    "0.5.17": (LLAMA_16, QWEN_1),
    "0.5.11": (LLAMA_16, QWEN_16, MLA_16),
}
WITH_STATES = (NEWEST, "0.5.21", "0.5.17")
COMPARED: dict[str, tuple[Case, ...]] = {
    version: (*quick, *(case for case in (*PRODUCT, HYBRID_1) if case not in quick and (case is not HYBRID_1 or version in WITH_STATES)))
    for version, quick in QUICK.items()
}
SQUEEZED = (Case("squeeze-1", "squeeze", arguments={"page_size": 1}, also=SQUEEZE), Case("squeeze-16", "squeeze", also=SQUEEZE))
FEW_STATES = Case(
    "few-states",
    "states",
    HYBRID_1.model,
    arguments=HYBRID_1.arguments | {"max_mamba_cache_size": 32},
    environment={"KVCACHED_LIMIT": "320KiB"},
    also=HYBRID_1.also,
)
LONG = Case("long", "hopeless", environment={"KVCACHED_LIMIT": "1MiB"}, also={"long": 700, "longest": 480})
LOWERED = Case("lowered", "lowered", arguments={"max_running_requests": 1}, also={"pages": 10})
PARKED = Case("parked", "parked", also={"pages": 4})
CROWDED = Case(
    "crowded",
    "crowded",
    arguments={"chunked_prefill_size": 512},
    environment={"KVCACHED_PAGE_PREALLOC_ENABLED": "false", "KVCACHED_FLOOR": "0"},
    also={"turns": 30},
)
CAPPED = Case("capped", "cached", environment={"KVCACHED_MAX_CACHED_TOKENS": "400"})
UNCAPPED = Case("uncapped", "cached")
ASKED = Case("asked", "asked")
OCCUPATION = Case("occupation", "occupation")
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3}
# Each with what SGLang's own check of the arguments wants to see beside it.
REFUSED: dict[str, dict[str, Any]] = {
    "enable_memory_saver=True": {"enable_memory_saver": True},
    "disaggregation_mode=prefill": {"disaggregation_mode": "prefill"},
    "enable_hierarchical_cache=True": {"enable_hierarchical_cache": True},
    "speculative_algorithm=NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, "page_size": 1},
    "speculative_algorithm=EAGLE": EAGLE | {"speculative_draft_model_path": str(MODELS / "llama")},
}
REFUSALS = tuple(Case(f"refused-{name.replace('=', '.')}", "refused", arguments=asked) for name, asked in REFUSED.items())
EIGHT_BITS = Case("eight-bits", "storage:eight_bits")
BOOKS = Case("books", "books")
LATE = tuple(  # without a tree, where only what ends comes back, and with one, which has to be evicted
    Case(
        f"late-{page_size}",
        "late",
        arguments={"page_size": page_size, "disable_radix_cache": page_size == 1},
        environment={"KVCACHED_LIMIT": "1152KiB"},
        also={"turns": 3},
    )
    for page_size in (1, 16)
)
PAGES_OF_ONE = LLAMA_1  # on the older releases, against the tokens of pages of 16
LIMITS: dict[str, tuple[Case, ...]] = {
    NEWEST: (*SQUEEZED, LONG, LOWERED, PARKED, CROWDED, CAPPED, UNCAPPED, ASKED, OCCUPATION),
    **dict.fromkeys(OLDER, (SQUEEZED[1], LONG, LOWERED, PARKED, CROWDED, CAPPED)),
}


def cases_of(version: str, *, full: bool) -> list[Case]:
    compared = COMPARED[version] if full else QUICK[version]
    cases = [side for case in compared for side in (case.static(), case)]
    cases += LIMITS[version]
    if version != NEWEST and PAGES_OF_ONE not in cases:
        cases.append(PAGES_OF_ONE)
    if version == NEWEST:
        cases += [*(case for case, _ in VARIANTS.values()), *REFUSALS, BOOKS, EIGHT_BITS, *LATE, FEW_STATES]
    return cases + ranked_of(version, full=full)


def ranked_of(version: str, *, full: bool) -> list[Case]:
    if version == NEWEST:
        return [*pipelines.QUICK, *replicas.QUICK, *((*pipelines.MORE, *replicas.MORE) if full else ())]
    return [*pipelines.OLDER, *(replicas.OLDER if version in replicas.OLDER_VERSIONS else ())] if full else []


def batches(folder_of: Callable[[str], Path], *, full: bool) -> dict[str, Batch]:
    return {version: Batch(version, cases_of(version, full=full), folder_of(version), INTERPRETED) for version in VERSIONS}
