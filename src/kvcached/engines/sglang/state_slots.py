# SPDX-License-Identifier: Apache-2.0
"""SGLang's allocator of states over a page bank, for hybrid models.

SGLang takes states in many places, and in most of them a miss ends the engine. So states are held ahead for the requests that run: spare
ones, which the pool counts as handed out and SGLang as free. They are used when the pool has nothing to give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator

from kvcached.engines.sglang.states import STATES_OF_A_REQUEST
from kvcached.errors import EngineNotSupported, PoolExhausted

if TYPE_CHECKING:
    from kvcached.engines.sglang.bank import PageBank
    from kvcached.engines.sglang.gate import Gate


class ElasticStateAllocator(MambaSlotAllocator):
    """Made by `adopt_states`."""

    size: int
    kvcached_gate: Gate
    kvcached_spare: torch.Tensor
    kvcached_per_request: int
    kvcached_wanted: int = 0  # spare states, for what runs
    kvcached_refused: int = 0  # states that a request lacked when it was turned away last

    @property
    def kvcached_bank(self) -> PageBank:
        return self.kvcached_gate.bank

    # ------------------------------------------------------------------ what SGLang calls

    @property
    def free_slots(self) -> torch.Tensor:
        """For SGLang's own checks."""
        with self.kvcached_bank.pool.lock:
            return torch.cat((self.kvcached_bank.free_ids(), self.kvcached_spare))

    def available_size(self) -> int:
        return self.kvcached_bank.free_slots + len(self.kvcached_spare)

    def alloc_group_begin(self, num_reqs: int) -> None:
        """It would take a state for every request that waits, and give most of them back."""

    def alloc_group_end(self) -> None:
        """Nothing was taken."""

    def _do_alloc(self, need_size: int) -> torch.Tensor | None:
        """Nothing is evicted here: SGLang has not locked yet what it needs of the tree. It does, and evicts, when it gets None."""
        gate = self.kvcached_gate
        with gate.bank.pool.lock:
            lacks = len(self.kvcached_spare) < need_size
            if gate.make_ready(need_size, urgent=lacks and not gate.tree.evictable()):
                return gate.take(need_size)
            if lacks:
                return None
            taken, self.kvcached_spare = self.kvcached_spare.split((need_size, len(self.kvcached_spare) - need_size))
            return taken

    def free(self, free_index: torch.Tensor) -> None:
        """One is kept where there is none: SGLang that lacks one evicts one, asks once more, and ends on a miss."""
        with self.kvcached_bank.pool.lock:
            kept = min(len(free_index), max(0, max(1, self.kvcached_wanted) - len(self.kvcached_spare)))
            if kept:
                self.kvcached_spare = torch.cat((self.kvcached_spare, free_index[:kept]))
            if kept < len(free_index):
                self.kvcached_bank.give(free_index[kept:].clone())

    def clear(self) -> None:
        with self.kvcached_bank.pool.lock:
            self.kvcached_bank.clear()
            self.kvcached_spare = self.kvcached_spare[:0]
            self.kvcached_wanted = self.kvcached_refused = 0

    # ------------------------------------------------------------------ what is held ahead

    def kvcached_lacking(self, requests: int) -> int:
        """Spare states that are missing for so many requests to run, beside what they hold already."""
        used = self.kvcached_bank.out_pages - len(self.kvcached_spare) - self.kvcached_gate.tree.evictable()
        self.kvcached_wanted = max(0, requests * self.kvcached_per_request - used)
        return self.kvcached_wanted - len(self.kvcached_spare)

    def kvcached_admits(self, requests: int) -> bool:
        """Whether so many requests can run. Call it with the pool's lock held."""
        lacking = self.kvcached_lacking(requests)
        if lacking > 0:
            wanted, self.kvcached_wanted = self.kvcached_wanted, 0  # what the tree gives goes to the pool, which is asked
            if self.kvcached_gate.secure(lacking):
                self._hold(lacking)
                lacking = 0
            self.kvcached_wanted = wanted
        self.kvcached_refused = max(0, lacking)
        return lacking <= 0

    def _hold(self, states: int) -> None:
        try:
            self.kvcached_spare = torch.cat((self.kvcached_spare, self.kvcached_gate.take(states)))
        except PoolExhausted as error:
            raise EngineNotSupported(f"states that were ready are gone: {error}") from error

    def kvcached_tidy(self, requests: int) -> None:
        """So many run: what is held for more goes back."""
        surplus = -self.kvcached_lacking(requests)
        if surplus > 0:
            self.kvcached_spare, back = self.kvcached_spare.split((len(self.kvcached_spare) - surplus, surplus))
            self.kvcached_bank.give(back)

    def kvcached_may_have(self) -> bool:
        return not self.kvcached_refused or self.kvcached_gate.may_have(self.kvcached_refused)


def adopt_states(allocator: MambaSlotAllocator, gate: Gate, extra_states: int = 0) -> ElasticStateAllocator:
    """Turn a finished, unused allocator of states into an elastic one. `extra_states`: of each request, beside those it always needs."""
    if type(allocator) is not MambaSlotAllocator:
        raise EngineNotSupported(f"SGLang's {type(allocator).__name__} cannot be elastic")
    del allocator.free_slots
    allocator.__class__ = ElasticStateAllocator
    elastic: ElasticStateAllocator = allocator
    elastic.kvcached_gate = gate
    elastic.kvcached_spare = gate.bank.free_ids()[:0]
    elastic.kvcached_per_request = STATES_OF_A_REQUEST + extra_states
    return elastic
