# SPDX-License-Identifier: Apache-2.0
"""Which cases run on which release: two processes for each, one unhooked and one elastic, run them one after another.

The newest release gets all of them, the others those that touch what differs between releases.
"""

from __future__ import annotations

from harness.cases import Case
from harness.engines import versions
from harness.ranks import STOCK_WORKER
from kvcached.units import MIB

NO_CACHE = {"enable_prefix_caching": False}
NO_RESERVE = {"KVCACHED_MIN_RESERVED_PAGES": "0", "KVCACHED_MAX_RESERVED_PAGES": "0"}
SMALL_PAGES = {"KVCACHED_HOST_GRANULARITY": "256KiB", "KVCACHED_VIRTUAL": "128MiB"}  # pages of 2 MiB: 16 blocks of 32 tokens
TIGHT = SMALL_PAGES | NO_RESERVE | {"KVCACHED_LIMIT": "14MiB"}
REAL_MODEL = {"model": "smollm2", "prompts": 64, "max_tokens": 12}

STOCK = (Case("cached"),)
MORE_STOCK = (Case("uncached", options=NO_CACHE), Case("real model", **REAL_MODEL))
TOKENS = (
    Case("cached", settings=SMALL_PAGES),
    Case("tight uncached async", options=NO_CACHE, settings=TIGHT, async_scheduling=True),
    Case("per layer", settings=SMALL_PAGES | {"KVCACHED_CONTIGUOUS_LAYOUT": "false"}),
)
MORE_TOKENS = (
    Case("uncached", options=NO_CACHE, settings=SMALL_PAGES),
    Case("async", settings=SMALL_PAGES, async_scheduling=True),
    Case("tight", settings=TIGHT),
    Case("capped cache", settings=SMALL_PAGES | {"KVCACHED_MAX_CACHED_TOKENS": "2048"}),
    Case("tight canary", settings=TIGHT | {"KVCACHED_CANARY": "true"}, async_scheduling=True),
    Case("zero backing", settings=SMALL_PAGES | {"KVCACHED_ZERO_BACKING": "used"}, async_scheduling=True),
)
MEMORY = (
    Case("hopeless", "hopeless", settings=SMALL_PAGES | NO_RESERVE | {"KVCACHED_LIMIT": "4MiB"}),
    Case("reset", "reset", settings=SMALL_PAGES, prompts=24),
)
MORE_MEMORY = (
    Case("idle limit", "idle_limit", settings=SMALL_PAGES, prompts=48),
    Case("stray write", "stray_write", settings=SMALL_PAGES | {"KVCACHED_CANARY": "true"}),
    Case("virtual", settings=SMALL_PAGES | {"KVCACHED_VIRTUAL": "48GiB"}, prompts=8),
    Case("real model", **REAL_MODEL),
)
# Several workers on two cores: one thread each, bound to nothing. Two host cards; pages of 16 blocks on every rank.
WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
TWO_CARDS = {
    "KVCACHED_CARD": "host:0,host:1",
    "KVCACHED_HOST_GRANULARITY": "128KiB",
    "KVCACHED_HOST_CAPACITY": "32MiB",
    "KVCACHED_GPU_UTILIZATION": "1",
}
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
UNEVEN_STAGES = WORKERS | {"VLLM_PP_LAYER_PARTITION": "3,1"}
RANKS_STOCK = (
    Case("tensor", "served", options=TENSOR, settings=WORKERS, prompts=64),
    Case("pipeline", "served", options=PIPELINE | {"worker_cls": STOCK_WORKER}, settings=UNEVEN_STAGES, prompts=64),
)
RANKS_ELASTIC = (
    Case("pipeline", "served", options=PIPELINE, settings=UNEVEN_STAGES | TWO_CARDS, prompts=64, limit_bytes=21 * MIB // 2),
    Case(
        "tensor",
        "served_until_a_worker_dies",
        options=TENSOR,
        settings=WORKERS | TWO_CARDS | NO_RESERVE,
        async_scheduling=True,
        prompts=64,
        limit_bytes=7 * MIB,
        neighbour_bytes=24 * MIB,
    ),
)
RANKS_KILLED = (
    Case(
        "both",
        "core_killed",
        options=TENSOR | PIPELINE,
        settings=WORKERS | {"KVCACHED_HOST_GRANULARITY": "128KiB", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "KVCACHED_CANARY": "true"},
        prompts=24,
    ),
)
NEWEST = versions()[-1:]


def stock_cases(version: str) -> tuple[Case, ...]:
    """What the unhooked engine of a release is asked to do."""
    return STOCK + MORE_STOCK if version in NEWEST else STOCK


def token_cases(version: str) -> tuple[Case, ...]:
    """All prompts on the tiny model, under different settings."""
    return TOKENS + MORE_TOKENS if version in NEWEST else TOKENS


def elastic_cases(version: str) -> tuple[Case, ...]:
    """What the elastic engine of a release is asked to do."""
    return token_cases(version) + (MEMORY + MORE_MEMORY if version in NEWEST else MEMORY)


def pairs(marks: str = "") -> list[tuple[str, str]]:
    """(version, name) of every token case whose name contains one of the words."""
    words = marks.split() or [""]
    return [(version, case.name) for version in versions() for case in token_cases(version) if any(word in case.name for word in words)]
