# SPDX-License-Identifier: Apache-2.0
"""Where the physical limit acts: SGLang asks before it admits or decodes, and gets a yes only with memory behind it.

SGLang's own counts stay logical, so its leak checks hold; what of the logical room has no memory to be had is *withheld* at its gates.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvcached.core.tally import Eviction
from kvcached.units import ceil_div

if TYPE_CHECKING:
    import torch

    from kvcached.engines.sglang.bank import PageBank
    from kvcached.engines.sglang.state_slots import ElasticStateAllocator

_BACKOFF_S: Final = 0.02
_ASK_AGAIN_S: Final = 0.25
_ASKING_SHARE: Final = 0.1
"""A card that has refused is asked again for a prefill that was turned away after a quarter of a second, and for so much of the time at
most: asking presses the other pools, and nobody decodes meanwhile."""


class Tree(Protocol):
    """One side of SGLang's prefix tree, in slots."""

    def evictable(self) -> int: ...

    def evict(self, slots: int) -> int:
        """Drop about so many of the coldest; returns how many. They come back through the allocator."""


class NoTree:
    """Before there is a tree, or without one."""

    def evictable(self) -> int:
        return 0

    def evict(self, slots: int) -> int:
        return 0


class FullTree:
    """The slots of full attention: all there are, but in a model with sliding windows, or with states."""

    def __init__(self, tree: Any, *, beside_others: bool = False) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._tree = tree
        self._params = EvictParams
        self._size = tree.full_evictable_size if beside_others else tree.evictable_size

    def evictable(self) -> int:
        return int(self._size())

    def evict(self, slots: int) -> int:
        return int(self._tree.evict(self._params(num_tokens=slots)).num_tokens_evicted)


class WindowTree:
    """The slots of sliding windows."""

    def __init__(self, tree: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._tree = tree
        self._params = EvictParams

    def evictable(self) -> int:
        return int(self._tree.swa_evictable_size())

    def evict(self, slots: int) -> int:
        return int(self._tree.evict(self._params(num_tokens=0, swa_num_tokens=slots)).swa_num_tokens_evicted)


class StateTree:
    """The states of linear attention, in a hybrid model."""

    def __init__(self, tree: Any) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self._tree = tree
        self._params = EvictParams

    def evictable(self) -> int:
        return int(self._tree.mamba_evictable_size()) if self._tree.supports_mamba() else 0

    def evict(self, slots: int) -> int:
        return int(self._tree.evict(self._params(num_tokens=0, mamba_num=slots)).mamba_num_evicted)


class Gate:
    """The gate of one allocator. Call it with the pool's lock held. `ahead_slots`: what prefills leave for requests that decode."""

    ahead_slots = 0

    def __init__(self, bank: PageBank) -> None:
        self.bank = bank
        self.tree: Tree = NoTree()
        self._refused_s = float("-inf")
        self._ask_again_s = float("-inf")
        self._withheld_slots = 0  # when room was counted last

    def pages(self, slots: int) -> int:
        return ceil_div(int(slots), self.bank.page_slots)

    @property
    def ready_slots(self) -> int:
        """What can be taken without asking anybody."""
        return self.bank.ready_slots

    @property
    def most_slots(self) -> int:
        """What SGLang can ever own at the same time, at the present limit."""
        return self.bank.most_slots

    @property
    def longest_prompt_slots(self) -> int:
        """A prefill is admitted with one page more than it takes."""
        return max(0, self.most_slots - self.bank.page_slots)

    def take(self, pages: int) -> torch.Tensor:
        """Page ids on the device. Raises `PoolExhausted`; then nothing was taken."""
        return self.bank.take(pages)

    def secure(self, slots: int, *, insist: bool = True, patient: bool = False) -> bool:
        """Whether so many slots can be taken now, after mapping pages and evicting from the tree if need be.

        `insist`: ask a card that has just refused once more. Not for who can do with fewer, and asks at every turn. `patient`: rather
        no than to evict, where memory comes by itself within some steps.
        """
        pool, pages = self.bank.pool, self.pages(slots)
        self.bank.settle()
        missing = pool.missing(pages)
        if not missing:
            return True
        can_evict = self.pages(self.tree.evictable()) >= missing
        self._grow(missing, urgent=not can_evict, insist=insist and not can_evict)
        while (missing := pool.missing(pages)) and self._drop(missing * self.bank.page_slots, Eviction.NEED):
            self.bank.settle(wait=True)
        if 0 < missing <= self.bank.arriving_pages:
            self.bank.settle(wait=True)
        return not pool.missing(pages)

    def make_ready(self, slots: int, *, urgent: bool) -> bool:
        """Whether so many slots can be taken now, after mapping pages if need be; nothing is evicted."""
        pool, pages = self.bank.pool, self.pages(slots)
        self.bank.settle()
        if (missing := pages - pool.available()) > 0:
            self._grow(missing, urgent=urgent, insist=urgent)
        if 0 < pages - pool.available() <= self.bank.arriving_pages:
            self.bank.settle(wait=True)
        return pool.available() >= pages

    def may_have(self, slots: int) -> bool:
        """Whether asking for so many slots again, after a refusal, is worth the time."""
        self.bank.settle()
        if not self.bank.pool.missing(self.pages(slots)):
            return True
        return time.monotonic() >= self._ask_again_s and self.bank.pool.obtainable() >= self.pages(slots)

    def _grow(self, pages: int, *, urgent: bool, insist: bool) -> None:
        """A card that has just refused is not asked again at once, unless requests would have to wait."""
        begun_s = time.monotonic()
        if not insist and begun_s - self._refused_s < _BACKOFF_S:
            return
        if self.bank.pool.grow(pages, urgent=urgent) < pages:
            self._refused_s = time.monotonic()
            self._ask_again_s = self._refused_s + max(_ASK_AGAIN_S, (self._refused_s - begun_s) / _ASKING_SHARE)

    def withheld(self) -> int:
        """Slots that SGLang counts as free and that no memory is to be had for, at the present limit."""
        bank = self.bank
        obtainable = bank.pool.obtainable() - bank.pool.missing(0) + bank.arriving_pages  # missing: above the limit
        return max(0, bank.free_slots - obtainable * bank.page_slots)

    def count_withheld(self) -> int:
        """The same, and remembered: room is being counted for prefills."""
        self._withheld_slots = self.withheld()
        return self._withheld_slots

    def has_freed(self) -> bool:
        """Whether less is withheld than when room was counted. Says so once."""
        freed = self._withheld_slots > 0 and self.withheld() < self._withheld_slots
        if freed:
            self._withheld_slots = 0
        return freed

    def reclaim(self, blocks: int, why: Eviction) -> int:
        """Give blocks of the tree back to the pool, for others. Returns how many."""
        evicted = self.pages(self.tree.evict(blocks * self.bank.page_slots))
        self.bank.settle(wait=True)
        return evicted

    def prepare(self, slots: int) -> None:
        """SGLang is about to take up to so many slots, usually fewer: make room without waiting for ids."""
        self.bank.settle()
        missing = self.bank.pool.missing(self.pages(slots)) - self.bank.arriving_pages
        if missing > 0:
            self._grow(missing, urgent=False, insist=False)
            self.evict_ahead(slots)

    def evict_ahead(self, slots: int) -> None:
        """Where ids come back late: have so many slots ready, or on their way, by the next time somebody asks."""
        pool, bank = self.bank.pool, self.bank
        missing = pool.missing(self.pages(slots)) - bank.arriving_pages
        if missing > 0 and pool.obtainable() - pool.available() < missing and self.tree.evictable():
            self._drop(missing * bank.page_slots, Eviction.NEED)

    def trim_cache(self, most_slots: int) -> None:
        """Keep at most so many slots in the tree that no request holds; below 0 there is no bound."""
        while most_slots >= 0 and (over := self.tree.evictable() - most_slots) > 0 and self._drop(over, Eviction.CAP):
            pass

    def _drop(self, slots: int, why: Eviction) -> int:
        """Evict about so many slots from the tree. Returns how many, which the pool counts in its blocks."""
        evicted = self.tree.evict(slots)
        if evicted:
            self.bank.pool.tally.evicted_blocks[why] += self.pages(evicted)
        return evicted


class Gates:
    """The gates of one SGLang allocator: of its slots, or of those of full attention and of sliding windows."""

    def __init__(self, full: Gate, window: Gate | None = None) -> None:
        self.full = full
        self._window = window
        self.all = (full,) if window is None else (full, window)
        self.page_slots = full.bank.page_slots
        self.mixes_decode = False  # whether requests decode in the batch of a prefill
        self.refused_slots = 0  # of the prefill that was turned away last
        self.states: ElasticStateAllocator | None = None  # of a hybrid model

    @property
    def window(self) -> Gate:
        return self.full if self._window is None else self._window

    def watch_tree(self, tree: Any) -> None:
        """From here on the tree gives up what it can spare."""
        self.full.tree = FullTree(tree, beside_others=self._window is not None or self.states is not None)
        if self._window is not None:
            self._window.tree = WindowTree(tree)
        if self.states is not None:
            self.states.kvcached_gate.tree = StateTree(tree)

    @property
    def banks(self) -> list[PageBank]:
        """All that SGLang takes slots of."""
        banks = [gate.bank for gate in self.all]
        return banks if self.states is None else [*banks, self.states.kvcached_bank]

    def can_evict(self) -> bool:
        trees = [gate.tree for gate in self.all] + ([] if self.states is None else [self.states.kvcached_gate.tree])
        return any(tree.evictable() for tree in trees)

    def can_run(self, requests: int) -> bool:
        """Whether so many requests can run, as far as it is a question of what each of them has one of."""
        return self.states is None or self.states.kvcached_admits(requests)

    def prepare(self, slots: int) -> None:
        for gate in self.all:
            gate.prepare(slots)

    def secure(self, slots: int, *, insist: bool = True, patient: bool = False) -> bool:
        """Whether so many slots of each kind can be taken now."""
        return all([gate.secure(slots, insist=insist, patient=patient) for gate in self.all])

    def admits(self, slots: int, *, reserved: int) -> bool:
        """Whether a prefill can take so many slots of each kind now, beside those that are promised. What it lacks is remembered until
        `may_reopen`."""
        admitted = self.secure(reserved + slots + self.full.ahead_slots, patient=True)
        self.turned_away(0 if admitted else slots)
        return admitted

    def turned_away(self, slots: int) -> None:
        self.refused_slots = slots

    def may_reopen(self) -> bool:
        """Whether a prefill may have been turned away for memory that may be had now. Says so once."""
        if self.states is not None and not self.states.kvcached_may_have():
            return False
        served = self.refused_slots > 0 and all([gate.may_have(self.refused_slots) for gate in self.all])
        if served:
            self.refused_slots = 0
        return any([gate.has_freed() for gate in self.all]) or served

    def secure_chunk(self, slots: int, reserved: int) -> int | None:
        """As many slots of `slots` as can be had beside `reserved` ones, in whole pages where they are fewer; None for none."""
        page = self.page_slots
        reserved += self.full.ahead_slots
        if self.secure(reserved + self.full.pages(slots) * page + page, insist=False, patient=True):
            return slots
        ready = min(gate.ready_slots for gate in self.all) - reserved - page
        return ready // page * page if ready >= page else None


def gates_of(allocator: Any) -> Gates | None:
    """None for an allocator that is not elastic."""
    gates: Gates | None = getattr(allocator, "kvcached_gates", None)
    return gates
