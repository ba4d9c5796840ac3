# SPDX-License-Identifier: Apache-2.0
"""SGLang's admission budget with the physical limit (0.5.21 and newer): a request is admitted when its prefill has memory behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

if TYPE_CHECKING:
    from kvcached.engines.sglang.gate import Gate


class ElasticPrefillBudget(PrefillBudget):
    """Growth by decoding is promised up to the limit, what a prefill takes at once is secured."""

    kvcached_parked = False

    @property
    def kvcached_gate(self) -> Gate:
        gate: Gate = self.allocator.kvcached_gate
        return gate

    def _available_and_evictable(self) -> int:
        """A request that would be alone is not measured by what it may decode one day: waiting would not help it."""
        stock = int(super()._available_and_evictable())
        return stock if self.total_offset == 0 else stock - self.kvcached_gate.withheld()

    def _secure(self, tokens: int) -> bool:
        return not self.kvcached_parked and self.kvcached_gate.secure(self.current_offset + tokens)

    def check_prefill(self, *, extend_input_len: int, chunk_limit: int | None, **others: Any) -> tuple[bool, int | None]:
        fits, chunk = super().check_prefill(extend_input_len=extend_input_len, chunk_limit=chunk_limit, **others)
        tokens = extend_input_len if chunk is None else min(extend_input_len, chunk)
        if not fits or not self._secure(self.ceil_paged_tokens(tokens) + self.page_size):
            return False, None
        return True, chunk

    def can_allocate_prefill(self, *, paged_input: int, chunk_limit: int | None, **others: Any) -> bool:
        fits = super().can_allocate_prefill(paged_input=paged_input, chunk_limit=chunk_limit, **others)
        tokens = paged_input if chunk_limit is None else min(paged_input, self.ceil_paged_tokens(chunk_limit) + self.page_size)
        return bool(fits) and self._secure(tokens)

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """What a prefill under way may go on with; None parks it, and then nobody else is let in before it."""
        tokens: int | None = super().available_chunk_tokens(chunk_limit)
        if tokens is None or self._secure(self.ceil_paged_tokens(tokens) + self.page_size):
            return tokens
        ready = self.kvcached_gate.bank.ready_slots - self.current_offset - self.page_size
        if ready >= self.page_size:
            return int(ready // self.page_size * self.page_size)
        self.kvcached_parked = True
        return None
