# SPDX-License-Identifier: Apache-2.0
"""SGLang's allocator of a model with sliding windows: two allocators in step, each elastic, behind one pair of gates."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from kvcached.engines.sglang.allocators import adopt
from kvcached.engines.sglang.gate import Gates
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.sglang.gate import Gate

_MODULES: Final = ("sglang.srt.mem_cache.allocator.swa", "sglang.srt.mem_cache.swa_memory_pool")  # the second until 0.5.12


def _stock_class() -> Any:
    from sglang.srt.mem_cache import allocator

    module = _MODULES[0] if hasattr(allocator, "__path__") else _MODULES[1]
    return importlib.import_module(module).SWATokenToKVPoolAllocator


SWATokenToKVPoolAllocator: Any = _stock_class()


class ElasticWindowAllocator(SWATokenToKVPoolAllocator):
    """Made by `adopt_windows`. Counts and frees are the two allocators' own."""

    kvcached_gates: Gates

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        from kvcached.engines.sglang.budget import ElasticSWAPrefillBudget

        return ElasticSWAPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens * self.page_size)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        self.kvcached_gates.prepare(num_tokens)

    def check_decode_capacity(self, *, num_tokens: int, **_: Any) -> bool:
        return self.kvcached_gates.secure(num_tokens)

    def verify_byte_accounting(self) -> list[str]:
        return [problem for gate in self.kvcached_gates.all for problem in gate.bank.problems()]


def adopt_windows(allocator: Any, gate_of: Callable[[Any], Gate]) -> Gates:
    """`gate_of` starts the pool of an inner allocator's KV pool. Raises `EngineNotSupported`."""
    if type(allocator) is not SWATokenToKVPoolAllocator or getattr(allocator, "_swa_req_ring", False):
        raise EngineNotSupported(f"SGLang's {type(allocator).__name__} with a ring of windows for each request cannot be elastic")
    full, window = allocator.full_attn_allocator, allocator.swa_attn_allocator
    gates = Gates(gate_of(full._kvcache), gate_of(window._kvcache))
    adopt(full, Gates(gates.full))
    adopt(window, Gates(gates.window))
    allocator.__class__ = ElasticWindowAllocator
    allocator.kvcached_gates = gates
    return gates
