# SPDX-License-Identifier: Apache-2.0
"""SGLang's allocators over a page bank. Finished stock allocators get these classes, so that everyone who holds them keeps them.

What SGLang reads off an allocator stays: its counts are logical, `None` from an alloc still means "out of memory", which the gates see to
that nobody meets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages

from kvcached.errors import EngineNotSupported, PoolExhausted

if TYPE_CHECKING:
    from kvcached.engines.sglang.bank import PageBank
    from kvcached.engines.sglang.gate import Gates

    _Base = Any
else:
    _Base = object


class ElasticAllocator(_Base):
    """What both kinds share."""

    kvcached_gates: Gates
    kvcached_group: list[tuple[torch.Tensor, bool]] | None = None

    @property
    def kvcached_bank(self) -> PageBank:
        return self.kvcached_gates.full.bank

    def available_size(self) -> int:
        return self.kvcached_bank.free_slots

    def get_all_free_pages(self) -> torch.Tensor:
        with self.kvcached_bank.pool.lock:
            return self.kvcached_bank.free_ids()

    def kvcached_take(self, pages: int) -> torch.Tensor | None:
        """Page ids on the device; None when there is no memory for them after all."""
        gate, slots = self.kvcached_gates.full, pages * self.page_size
        with gate.bank.pool.lock:
            if gate.ready_slots < slots:
                gate.secure(slots)
            try:
                return gate.take(pages)
            except PoolExhausted:
                return None

    def kvcached_give(self, ids: torch.Tensor, *, per_slot: bool) -> None:
        """Page ids, each once, or slots whose pages are meant."""
        if not ids.numel():
            return
        if self.kvcached_group is not None:
            self.kvcached_group.append((ids.clone(), per_slot))  # the caller may change what a view shows before the group ends
            return
        bank = self.kvcached_bank
        with bank.pool.lock:
            if per_slot:
                bank.give_pages_of(ids)
            else:
                bank.give(ids)

    def free_group_begin(self) -> None:
        self.kvcached_group = []
        self.free_group: list[torch.Tensor] | None = []  # SGLang looks at it
        self.is_not_in_free_group = False

    def free_group_end(self) -> None:
        group, self.kvcached_group = self.kvcached_group or [], None
        self.free_group = None
        self.is_not_in_free_group = True
        for per_slot in (False, True):
            parts = [ids for ids, kind in group if kind is per_slot]
            if parts:
                self.kvcached_give(torch.cat(parts) if len(parts) > 1 else parts[0], per_slot=per_slot)

    def clear(self) -> None:
        bank = self.kvcached_bank
        with bank.pool.lock:
            bank.clear()
        self.kvcached_group = self.free_group = None
        self.is_not_in_free_group = True

    def resize(self, config: Any) -> None:
        raise EngineNotSupported("SGLang resizes its KV pool after graph capture, which an elastic one does not need")

    # ------------------------------------------------------------------ gates of SGLang 0.5.19 and newer

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> Any:
        from kvcached.engines.sglang.budget import ElasticPrefillBudget

        return ElasticPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens * self.page_size)

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        with self.kvcached_bank.pool.lock:
            self.kvcached_gates.prepare(num_tokens)

    def check_decode_capacity(self, *, num_tokens: int, **_: Any) -> bool:
        with self.kvcached_bank.pool.lock:
            return self.kvcached_gates.secure(num_tokens)

    def verify_byte_accounting(self) -> list[str]:
        with self.kvcached_bank.pool.lock:
            return self.kvcached_bank.problems()


def shared(kind: type) -> Any:
    """Give a class the methods of `ElasticAllocator`. As a second base it would change the layout of instances, and a stock one could
    not become elastic.
    """
    for name, member in vars(ElasticAllocator).items():
        if not name.startswith("__") and name not in vars(kind):
            setattr(kind, name, member)
    return kind


@shared
class ElasticTokenAllocator(TokenToKVPoolAllocator):
    """A page is one slot."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        return self.kvcached_take(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        self.kvcached_give(free_index, per_slot=False)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.kvcached_give(free_index, per_slot=False)

    free_page_ids = free


@shared
class ElasticPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's own kernels spread slots over pages; they get exactly the pages that they will use."""

    free_pages: torch.Tensor

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = self.kvcached_take(need_size // self.page_size)
        if pages is None:
            return None
        return (pages[:, None] * self.page_size + torch.arange(self.page_size, device=self.device)).reshape(-1)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        arguments = (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens)
        return self._kvcached_spread(num_new_pages, super().alloc_extend, *arguments)

    def alloc_decode(self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor | None:
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        return self._kvcached_spread(num_new_pages, super().alloc_decode, seq_lens, seq_lens_cpu, last_loc)

    def _kvcached_spread(self, pages: int, spread: Any, *arguments: Any) -> torch.Tensor | None:
        taken = self.kvcached_take(pages)
        if taken is None:
            return None
        self.free_pages = taken
        slots: torch.Tensor | None = spread(*arguments)
        if slots is None or len(self.free_pages):
            raise EngineNotSupported(f"SGLang's paged allocator did not use the {pages} pages that it asked for")
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        self.kvcached_give(free_index, per_slot=True)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.kvcached_give(free_index[:: self.page_size] // self.page_size, per_slot=False)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        self.kvcached_give(page_ids, per_slot=False)


_CLASSES: Final[dict[type, type]] = {
    TokenToKVPoolAllocator: ElasticTokenAllocator,
    PagedTokenToKVPoolAllocator: ElasticPagedAllocator,
}


def adopt(allocator: Any, gates: Gates) -> None:
    """Turn a finished, unused allocator into an elastic one. Raises `EngineNotSupported` for a kind that cannot be."""
    elastic = _CLASSES.get(type(allocator))
    if elastic is None:
        raise EngineNotSupported(f"SGLang's {type(allocator).__name__} cannot be elastic")
    allocator.free_pages = allocator.release_pages = torch.empty(0, dtype=torch.int64, device=allocator.device)
    allocator.__class__ = elastic
    allocator.kvcached_gates = gates
