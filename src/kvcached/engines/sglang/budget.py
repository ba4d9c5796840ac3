# SPDX-License-Identifier: Apache-2.0
"""SGLang's admission budgets with the physical limit, 0.5.21 and newer. `Admission` secures memory for what they let in.

Growth by decoding is promised up to the limit. A request that would be alone is not measured by what it may decode one day: waiting would
not help it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.mem_cache.prefill_budget import PrefillBudget, SWAPrefillBudget

if TYPE_CHECKING:
    from kvcached.engines.sglang.gate import Gates


class ElasticPrefillBudget(PrefillBudget):
    """For one kind of slots."""

    kvcached_parked = False

    @property
    def kvcached_gates(self) -> Gates:
        gates: Gates = self.allocator.kvcached_gates
        return gates

    def _available_and_evictable(self) -> int:
        return int(super()._available_and_evictable()) - (self.kvcached_gates.full.count_withheld() if self.total_offset else 0)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """What a prefill under way may go on with; None parks it, and then nobody is let in before it."""
        tokens: int | None = super().available_chunk_tokens(chunk_limit)
        if tokens is not None:
            tokens = self.kvcached_gates.secure_chunk(tokens, self.current_offset)
        self.kvcached_parked = tokens is None
        return tokens


class ElasticSWAPrefillBudget(SWAPrefillBudget):
    """For slots of full attention and of sliding windows."""

    kvcached_parked = False

    @property
    def kvcached_gates(self) -> Gates:
        gates: Gates = self.allocator.kvcached_gates
        return gates

    def _available_and_evictable(self) -> int:
        return int(super()._available_and_evictable()) - (self.kvcached_gates.full.count_withheld() if self.total_offset else 0)

    @property
    def remaining_swa(self) -> int:
        return int(super().remaining_swa) - (self.kvcached_gates.window.count_withheld() if self.swa_offset else 0)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        tokens: int | None = super().available_chunk_tokens(chunk_limit)
        if tokens is not None:
            tokens = self.kvcached_gates.secure_chunk(tokens, self.current_offset)
        self.kvcached_parked = tokens is None
        return tokens
