# SPDX-License-Identifier: Apache-2.0
"""All cases of one release: two processes, one unhooked and one elastic, run them one after another."""

from __future__ import annotations

from harness.cases import Case

NO_CACHE = {"enable_prefix_caching": False}
NO_RESERVE = {"KVCACHED_MIN_RESERVED_PAGES": "0", "KVCACHED_MAX_RESERVED_PAGES": "0"}
SMALL_PAGES = {"KVCACHED_HOST_GRANULARITY": "256KiB", "KVCACHED_VIRTUAL": "128MiB"}  # pages of 2 MiB: 16 blocks of 32 tokens
TIGHT = SMALL_PAGES | NO_RESERVE | {"KVCACHED_LIMIT": "14MiB"}

STOCK = (Case("cached"), Case("uncached", options=NO_CACHE))
TOKENS = (
    Case("cached", settings=SMALL_PAGES),
    Case("uncached", options=NO_CACHE, settings=SMALL_PAGES),
    Case("async", settings=SMALL_PAGES, async_scheduling=True),
    Case("tight", settings=TIGHT),
    Case("tight uncached async", options=NO_CACHE, settings=TIGHT, async_scheduling=True),
    Case("capped cache", settings=SMALL_PAGES | {"KVCACHED_MAX_CACHED_TOKENS": "2048"}),
    Case("per layer", settings=SMALL_PAGES | {"KVCACHED_CONTIGUOUS_LAYOUT": "false"}),
    Case("zero backing", settings=SMALL_PAGES | {"KVCACHED_ZERO_BACKING": "used"}, async_scheduling=True),
)
MEMORY = (
    Case("hopeless", "hopeless", settings=SMALL_PAGES | NO_RESERVE | {"KVCACHED_LIMIT": "8MiB"}),
    Case("idle limit", "idle_limit", settings=SMALL_PAGES, prompts=48),
    Case("reset", "reset", settings=SMALL_PAGES, prompts=24),
    Case("virtual", settings=SMALL_PAGES | {"KVCACHED_VIRTUAL": "48GiB"}, prompts=8),
)
ELASTIC = TOKENS + MEMORY
