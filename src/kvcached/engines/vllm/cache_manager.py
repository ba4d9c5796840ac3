# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache manager over an elastic pool: a miss grows the pool and asks again; what can never fit is reported."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvcached.units import ceil_div

if TYPE_CHECKING:
    from kvcached.runtime.pool import Pool

_BACKOFF_S: Final = 0.02


class ElasticKVCacheManager(KVCacheManager):
    """Made by `adopt`. `kvcached_hopeless` maps requests that need more than the pool may ever hold to the reason, for people."""

    kvcached_pool: Pool
    kvcached_hopeless: dict[str, str]
    kvcached_refused_until_s: float

    @classmethod
    def adopt(cls, manager: Any, pool: Pool) -> ElasticKVCacheManager:
        manager.__class__ = cls
        elastic: ElasticKVCacheManager = manager
        elastic.kvcached_pool = pool
        elastic.kvcached_hopeless = {}
        elastic.kvcached_refused_until_s = 0.0
        return elastic

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        slots = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        if slots is None and self._grow_for(request, num_new_tokens, kwargs):
            slots = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        return slots

    def _grow_for(self, request: Any, num_new_tokens: int, options: dict[str, Any]) -> bool:
        """Whether the pool has more now. vLLM's own count of what it lacked is not told; ours is that, or a little more."""
        total, held = self._blocks_of(request, self._tokens_of(request, num_new_tokens, options))
        most = self.kvcached_pool.max_blocks() - 1  # the null block
        if total > most:
            self.kvcached_hopeless[request.request_id] = (
                f"the request needs {total} KV cache blocks and the pool can hold {most} at most; "
                "raise its limit (kvctl limit, KVCACHED_LIMIT) or send a shorter request"
            )
            return False
        reserved = int(options.get("reserved_blocks", 0)) + int(self.watermark_blocks)
        missing: int = total - held + reserved - self.block_pool.get_num_free_blocks()
        if missing <= 0 or time.monotonic() < self.kvcached_refused_until_s:
            return missing <= 0
        gained = self.kvcached_pool.grow(missing)
        if gained < missing:
            self.kvcached_refused_until_s = time.monotonic() + _BACKOFF_S
        return gained > 0

    def longest_request_tokens(self) -> int:
        """The most tokens of one request that the pool can ever hold, alone."""
        fits, fails = 0, self.max_model_len + 1
        while fails - fits > 1:
            tokens = (fits + fails) // 2
            total, _ = self._blocks_of(None, tokens)
            fits, fails = (tokens, fails) if total < self.kvcached_pool.max_blocks() else (fits, tokens)
        return fits

    def _tokens_of(self, request: Any, num_new_tokens: int, options: dict[str, Any]) -> int:
        computed = request.num_computed_tokens + options.get("num_new_computed_tokens", 0) + options.get("num_external_computed_tokens", 0)
        tokens = computed + num_new_tokens + options.get("num_lookahead_tokens", 0)
        if options.get("full_sequence_must_fit"):
            tokens = max(tokens, request.num_tokens)
        return int(min(tokens, self.max_model_len))

    def _blocks_of(self, request: Any | None, tokens: int) -> tuple[int, int]:
        """(blocks that so many tokens take at most, blocks that the request holds), over all groups."""
        total = held = 0
        for manager in self.coordinator.single_type_managers:
            blocks = ceil_div(tokens, manager.block_size)
            cap = getattr(manager, "max_admission_blocks_per_request", None) or getattr(manager, "_max_admission_blocks_per_request", None)
            total += blocks if cap is None else min(blocks, cap)
            held += len(manager.req_to_blocks.get(request.request_id, ()) if request else ())
        return total, held
