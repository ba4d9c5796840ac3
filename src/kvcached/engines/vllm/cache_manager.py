# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache manager over an elastic pool: a miss grows the pool and asks again; what can never fit is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvcached.engines.vllm.demand import Demand
from kvcached.engines.vllm.growth import Growth

if TYPE_CHECKING:
    from kvcached.runtime.pool import Pool


class ElasticKVCacheManager(KVCacheManager):
    """Made by `adopt`. `kvcached_hopeless` maps requests that need more than the pool may ever hold to the reason, for people."""

    kvcached_pool: Pool
    kvcached_hopeless: dict[str, str]
    kvcached_demand: Demand
    kvcached_growth: Growth

    @classmethod
    def adopt(cls, manager: Any, pool: Pool) -> ElasticKVCacheManager:
        manager.__class__ = cls
        elastic: ElasticKVCacheManager = manager
        elastic.kvcached_pool = pool
        elastic.kvcached_hopeless = {}
        elastic.kvcached_demand = Demand(manager.coordinator.single_type_managers)
        elastic.kvcached_growth = Growth(pool)
        return elastic

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        slots = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        while slots is None and self._grow_for(request, num_new_tokens, kwargs):
            slots = super().allocate_slots(request, num_new_tokens, *args, **kwargs)
        return slots

    def _grow_for(self, request: Any, num_new_tokens: int, options: dict[str, Any]) -> bool:
        """Whether the pool has more now. What vLLM lacked it does not tell, so this is an estimate, and at least one block: the caller
        asks again as long as something was gained, and until there is more than vLLM can have lacked.
        """
        if self.kvcached_demand.waits_for_a_state(options.get("new_computed_blocks")):
            return False
        tokens = self._tokens_of(request, num_new_tokens, options)
        total, most = self.kvcached_demand.held_at_most(tokens), self.kvcached_pool.max_blocks() - 1  # the null block
        if total > most:
            self.kvcached_hopeless[request.request_id] = (
                f"the request needs {total} KV cache blocks and the pool can hold {most} at most; "
                "raise its limit (kvctl limit, KVCACHED_LIMIT) or send a shorter request"
            )
            return False
        reserved = int(options.get("reserved_blocks", 0)) + int(self.watermark_blocks)
        spare = self.block_pool.get_num_free_blocks() - reserved
        if spare >= self.kvcached_demand.upper_bound(max(tokens, int(options.get("num_encoder_tokens", 0)))):
            return False
        missing = max(1, self.kvcached_demand.missing(request.request_id, tokens) - spare)
        return self.kvcached_growth.ask(missing, runs=request.status.name == "RUNNING") > 0

    def longest_request_tokens(self) -> int:
        """The most tokens of one request that the pool can ever hold, alone."""
        fits, fails = 0, self.max_model_len + 1
        while fails - fits > 1:
            tokens = (fits + fails) // 2
            total = self.kvcached_demand.held_at_most(tokens)
            fits, fails = (tokens, fails) if total < self.kvcached_pool.max_blocks() else (fits, tokens)
        return fits

    def _tokens_of(self, request: Any, num_new_tokens: int, options: dict[str, Any]) -> int:
        computed = request.num_computed_tokens + options.get("num_new_computed_tokens", 0) + options.get("num_external_computed_tokens", 0)
        tokens = computed + num_new_tokens + options.get("num_lookahead_tokens", 0)
        if options.get("full_sequence_must_fit"):
            tokens = max(tokens, request.num_tokens)
        return int(min(tokens, self.max_model_len))
