# SPDX-License-Identifier: Apache-2.0
"""Every kind of KV cache as a matrix of cases: model x prefix cache x room or pressure x layout. Generated; nothing is left out by hand.

A cell that the unhooked engine cannot run is in the matrix too, with the reason that it gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from harness.cases import Case
from harness.matrix import NEWEST, NO_RESERVE
from kvcached.units import MIB

PROMPTS = 30  # of up to a thousand tokens; most share a passage with others
MAX_MODEL_LEN = 1024
GRANULES = {"KVCACHED_HOST_GRANULARITY": "64KiB"}
ROOMY = GRANULES | {"KVCACHED_VIRTUAL": "512MiB"}
TIGHT = GRANULES | NO_RESERVE | {"KVCACHED_VIRTUAL": "96MiB"}
PER_LAYER = {"KVCACHED_CONTIGUOUS_LAYOUT": "false"}
CANARY = {"KVCACHED_CANARY": "true"}
BFLOAT16 = {"dtype": "bfloat16"}
CACHES = ("cached", "uncached")
BOTH = "cached uncached"


@dataclass(frozen=True)
class Model:
    """`limit_bytes`: what makes its requests preempt each other. `broken`: (release, "cached", "uncached" or both) -> what vLLM says.

    `is_exact`: float32, where a request's tokens do not depend on what it is batched with. `interleaves_from`: the first release that can
    have it interleaved on a CPU, None where none can. `blocks`: as many as the limit allows, where an unhooked engine with so many preempts
    the same requests, so that tokens must be equal although batches change them. `watched`: a canary fits in its limit.
    """

    name: str
    limit_bytes: int
    folder: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    is_exact: bool = True
    interleaves_from: tuple[int, int] | None = (0, 0)
    max_tokens: int = 24
    blocks: int = 0
    watched: bool = False

    def interleaves(self, version: str) -> bool:
        """Whether this release can have it interleaved on a CPU."""
        major, minor = (int(part) for part in version.split(".")[:2])
        return self.interleaves_from is not None and (major, minor) >= self.interleaves_from

    def reason(self, version: str, cache: str) -> str:
        """What the unhooked engine says where it cannot run; empty where it can."""
        return next(
            (said for (release, caches), said in self.broken.items() if version.startswith(release) and cache in caches.split()), ""
        )

    def caches(self, version: str) -> list[str]:
        """With the prefix cache and without, as far as the release can."""
        return [cache for cache in CACHES if not self.reason(version, cache)]


NO_SHARED_NORMS = "were not initialized from checkpoint"  # of layers that have no keys of their own: since 0.30 they are not asked for
NO_CHECKPOINTS = "is out of bounds for dimension 0 with size 1"  # its CPU kernel returns no states between chunks
NGRAMS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
GDN = BFLOAT16 | {"mamba_ssm_cache_dtype": "float32"}  # what its CPU kernels take
STATES_SINCE = (0, 29)  # their blocks are large: answers must be long to outgrow one

HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()

# Long answers where short ones hardly outgrow the limit: with them it was the machine's whether a request is put back.
MODELS = (
    Model("llama ngram", 8 * MIB, "llama", NGRAMS),
    Model("llama fp8", 2 * MIB, "llama", {"kv_cache_dtype": "fp8"}, {} if HAS_AVX512 else {("", BOTH): "requires x86 with AVX-512"}),
    Model("mistral", 7 * MIB // 2, max_tokens=72),
    Model("gemma3", 6 * MIB, max_tokens=72),
    Model("gemma3n", 9 * MIB // 2, broken={("0.28", BOTH): NO_SHARED_NORMS}),
    Model("gemma4", 8 * MIB, broken={("0.28", BOTH): NO_SHARED_NORMS}),
    Model(
        "deepseek",
        12 * MIB,
        options={"block_size": 16},
        broken={("0.28", BOTH): "cannot import name 'compile_flash_attn_varlen_func_from_specs'"},
        is_exact=False,  # its CPU kernels give other tokens in other batches, in float32 too
        interleaves_from=None,
        blocks=81,
    ),
    Model("gptoss", 3 * MIB, options=BFLOAT16, is_exact=False, watched=True),
    Model("qwen3next", 4 * MIB, options=GDN, is_exact=False, interleaves_from=STATES_SINCE, max_tokens=72),
    Model("falconh1", 12 * MIB, broken={("0.32", "cached"): NO_CHECKPOINTS}, interleaves_from=STATES_SINCE, max_tokens=72),
    Model("nemotronh", 6 * MIB, broken={("0.32", "cached"): NO_CHECKPOINTS}, interleaves_from=STATES_SINCE, max_tokens=96),
    Model("zamba2", 14 * MIB, broken={("0.32", "cached"): NO_CHECKPOINTS}, interleaves_from=STATES_SINCE, max_tokens=72),
    Model("jamba", 8 * MIB, broken={("", BOTH): "has no attribute 'selective_scan_fwd'"}),
)
# Half a minute to compile; the second model with shared layers; the second and the third with Mamba-2 states.
ONLY_FULL = ("llama ngram", "gemma3n", "falconh1", "zamba2")
BY_NAME = {model.name: model for model in MODELS}


def stock_case(model: Model, cache: str) -> Case:
    return _case(model, f"{model.name} {cache}", cache, {})


def elastic_case(model: Model, cache: str, room: str, layout: str) -> Case:
    settings = TIGHT | {"KVCACHED_LIMIT": str(model.limit_bytes)} if room == "tight" else ROOMY
    settings = settings | (PER_LAYER if layout == "per layer" else {})
    return _case(model, f"{model.name} {cache} {room} {layout}", cache, settings)


def _case(model: Model, name: str, cache: str, settings: dict[str, str]) -> Case:
    options = {"max_model_len": MAX_MODEL_LEN} | model.options | {"enable_prefix_caching": cache == "cached"}
    return Case(name, model=model.folder or model.name, options=options, settings=settings, prompts=PROMPTS, max_tokens=model.max_tokens)


@dataclass(frozen=True)
class Cell:
    """One elastic engine of the matrix."""

    version: str
    model: str
    cache: str
    room: str
    layout: str

    @property
    def case(self) -> Case:
        case = elastic_case(BY_NAME[self.model], self.cache, self.room, self.layout)
        return replace(case, settings=case.settings | CANARY) if self.is_watched else case

    @property
    def stock(self) -> Case:
        return stock_case(BY_NAME[self.model], self.cache)

    @property
    def is_watched(self) -> bool:
        """Where pressure changes the batches, and with them tokens, a canary says that memory is right all the same: of cached blocks too.
        Blocks that lie side by side without a gap have no room for it."""
        has_room = self.layout == "auto" and BY_NAME[self.model].interleaves(self.version)
        return BY_NAME[self.model].watched and not self.is_exact and self.cache == "cached" and has_room

    @property
    def is_exact(self) -> bool:
        """Whether its tokens must be those of the unhooked engine: nothing but the batches can make a difference, if anything."""
        return BY_NAME[self.model].is_exact or self.room == "roomy"

    @property
    def is_quick(self) -> bool:
        """The newest release, and one cell for a model: under pressure where its tokens are exact then."""
        model = BY_NAME[self.model]
        chosen = (model.caches(self.version)[0], "tight" if model.is_exact else "roomy", "auto")
        return self.version in NEWEST and self.model not in ONLY_FULL and (self.cache, self.room, self.layout) == chosen


def cells(version: str) -> list[Cell]:
    """All that this release can run."""
    return [
        Cell(version, model.name, cache, room, layout)
        for model in MODELS
        for cache, room, layout in product(model.caches(version), ("roomy", "tight"), ("auto", "per layer"))
        if layout == "auto" or model.interleaves(version)
    ]


def broken_cases(version: str) -> list[tuple[Case, str]]:
    """What the unhooked engine cannot run, and what it says."""
    return [(stock_case(model, cache), said) for model in MODELS for cache in CACHES if (said := model.reason(version, cache))]
