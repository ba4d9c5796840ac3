# SPDX-License-Identifier: Apache-2.0
"""Engines that are a pipeline of stages: the first stage has one of three layers, the last one two."""

from __future__ import annotations

from typing import Any

from sglang_harness.cases import Case

MODEL = "threelayers"
PROMPTS = {"step": 20, "prompts": 5}
NEW_TOKENS = 40
STAGES = {"pp_size": 2, "schedule_conservativeness": 0.1}  # lets more in than fits to the end
LOW_PAGES = 6
# The last stage's page of 128 KiB holds 4 of SGLang's pages, the first one's of 64 KiB as many.
PAGE_BLOCKS = 4
CARDS = {"KVCACHED_CARD": "host:0,host:1", "KVCACHED_VIRTUAL": "32MiB", "KVCACHED_HOST_CAPACITY": "4MiB", "KVCACHED_FLOOR": "0"}
LESS = {"1": {"KVCACHED_HOST_CAPACITY": "1MiB"}}  # on rank 1
BIND = {1: {}, 2: {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, 4: {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}}  # by the ranks of a stage


def staged(
    name: str,
    arguments: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    *,
    elastic: bool = True,
    part: str = "rounds",
    **also: Any,
) -> Case:
    asked = STAGES | (arguments or {})
    also = PROMPTS | {"new_tokens": NEW_TOKENS, "part": part} | also
    return Case(name, "ranked:ranks", MODEL, elastic, asked, BIND[asked.get("tp_size", 1)] | (environment or {}), also, 300)


ALONE = Case("stages-alone", model=MODEL, elastic=False, also=PROMPTS | {"new_tokens": NEW_TOKENS})
STATIC = staged("stages-static", elastic=False)
UNEVEN = staged("stages-uneven", None, CARDS, environments=LESS)
LIMITED = staged("stages-limited", limits=[[30, LOW_PAGES], [110, 60]], on=1)
EVEN = staged("stages-even")
AHEAD = staged("stages-ahead", {"pp_async_batch_depth": 2})
SHARDED = staged("stages-sharded", {"tp_size": 2})
TREELESS = staged("stages-no-tree", {"disable_radix_cache": True})
KILLED = staged("stages-killed", part="killed", step=12)
DRAWN = tuple(Case(f"stages-drawn-{count}", "stages:stages", also={"stages": count, "seed": count, "turns": 400}) for count in (3, 2, 4))
QUICK = (DRAWN[0], ALONE, STATIC, UNEVEN, LIMITED)
MORE = (*DRAWN[1:], EVEN, AHEAD, SHARDED, TREELESS, KILLED)  # of the newest release with --full
OLDER = (ALONE, UNEVEN, LIMITED)  # of each older one with --full
