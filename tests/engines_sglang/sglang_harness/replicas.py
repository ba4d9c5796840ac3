# SPDX-License-Identifier: Apache-2.0
"""Data parallel attention: each rank, or each two of four, has requests and a KV cache of its own; the other layers are computed by all."""

from __future__ import annotations

from typing import Any

from sglang_harness.cases import Case
from sglang_harness.pipelines import BIND, CARDS

MODEL = "qwen3"  # SGLang's Llama cannot
ATTENTION = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "schedule_conservativeness": 0.1}
FEW = 1  # prompts of the first replica where it has little to do
LOW_PAGES = 5
LESS = {"1": {"KVCACHED_HOST_CAPACITY": "1MiB"}}  # on rank 1


def divided(
    name: str, arguments: dict[str, Any] | None = None, environment: dict[str, str] | None = None, *, elastic: bool = True, **also: Any
) -> Case:
    asked = ATTENTION | (arguments or {})
    return Case(name, "ranked:ranks", MODEL, elastic, asked, BIND[asked["tp_size"]] | (environment or {}), {"part": "rounds"} | also, 300)


STATIC = divided("replicas-static", elastic=False)
UNEVEN = divided("replicas-uneven", None, CARDS, environments=LESS, prompts_of={"0": FEW})
LIMITED = divided("replicas-limited", limits=[[24, LOW_PAGES], [60, 60]], on=1)
SHARDED = divided("replicas-sharded", {"tp_size": 4})
QUICK = (UNEVEN,)
MORE = (STATIC, LIMITED, SHARDED)  # of the newest release with --full
OLDER = (UNEVEN, LIMITED)  # of an older one with --full
OLDER_VERSIONS = ("0.5.21",)  # those before it ask for pinned memory, which there is none of without a GPU
