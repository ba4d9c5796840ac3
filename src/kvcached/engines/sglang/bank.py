# SPDX-License-Identifier: Apache-2.0
"""Page ids between a pool on the host and tensors on the device, without a synchronise.

Ids that are handed out go to the device in one asynchronous copy, or as an `arange` where they are neighbours. Ids that come back are
copied into pinned memory, and count as free for the pool when that copy has finished; SGLang counts them as free at once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from kvcached.engines.sglang.page_sets import PageSets, row_of
from kvcached.errors import InvariantBroken, Misuse
from kvcached.runtime.pool import NOTHING_IN_FLIGHT

if TYPE_CHECKING:
    from kvcached.engines.sglang.page_sets import Ids
    from kvcached.runtime.pool import Pool, Sets

_PADDING: Final = 1
"""The set of block 0 on page 0."""


class Arrival(NamedTuple):
    """Ids on their way to the host; `event` tells when they are there, None that they are."""

    ids: torch.Tensor
    event: Any
    marker: int
    per_slot: bool


class PageBank:
    """The page ids of one SGLang allocator. `page_slots` slots make a page; id 0 is SGLang's padding page and never handed out.

    Call it with the pool's lock held.
    """

    def __init__(self, pool: Pool, page_slots: int, device: torch.device) -> None:
        self.pool = pool
        self.page_slots = page_slots
        self.capacity_pages = pool.geometry.num_blocks - 1
        self.out_pages = 0
        self.arriving_pages = 0
        self.marker = NOTHING_IN_FLIGHT
        self._device = device
        self._sets = PageSets(pool.geometry)
        self._arrivals: deque[Arrival] = deque()

    # ------------------------------------------------------------------ ids out

    def take(self, pages: int) -> torch.Tensor:
        """Ids of `pages` pages, int64, on the device. Raises `PoolExhausted`; then nothing was taken."""
        self.settle()
        if not pages:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        ranges, sets = self.pool.take_sets(pages)
        self.out_pages += pages
        if len(ranges) == 1 and not sets:
            return self._neighbours(*ranges[0])
        ids = self._sets.ids_of(ranges, sets)
        if self._device.type == "cpu":
            return torch.from_numpy(ids)
        row = row_of(ids)
        return torch.from_numpy(ids).pin_memory().to(self._device, non_blocking=True) if row is None else self._neighbours(*row)

    def _neighbours(self, first: int, count: int) -> torch.Tensor:
        return torch.arange(first, first + count, dtype=torch.int64, device=self._device)

    # ------------------------------------------------------------------ ids back

    def give(self, ids: torch.Tensor) -> None:
        """Pages named once each. They count as free for SGLang now, for the pool when they have arrived."""
        self.out_pages -= ids.numel()
        self.arriving_pages += ids.numel()
        self._send(ids, per_slot=False)

    def give_pages_of(self, slots: torch.Tensor) -> None:
        """The pages of these slots, which may name a page several times: how many they are is known when they have arrived."""
        self._send(slots, per_slot=True)
        self.settle(wait=True)

    @property
    def arrives_late(self) -> bool:
        """Whether ids that come back have to be copied from a device."""
        return bool(self._device.type != "cpu")

    def _send(self, ids: torch.Tensor, *, per_slot: bool) -> None:
        if not self.arrives_late:
            self._arrive(Arrival(ids, None, self.marker, per_slot))
            return
        host, event = copy_to_host(ids)
        self._arrivals.append(Arrival(host, event, self.marker, per_slot))

    def settle(self, *, wait: bool = False) -> None:
        """Count what has arrived. `wait`: until all has; only for callers that would have to refuse work otherwise."""
        while self._arrivals:
            event = self._arrivals[0].event
            if not event.query():
                if not wait:
                    return
                event.synchronize()
            self._arrive(self._arrivals.popleft())

    def _arrive(self, arrival: Arrival) -> None:
        ids: Ids = arrival.ids.numpy()
        row = None if arrival.per_slot else row_of(ids)
        sets = self._sets.sets_of(ids, times=self.page_slots if arrival.per_slot else 1) if row is None else []
        if arrival.per_slot:
            self.out_pages -= sum([blocks.bit_count() for _, blocks in sets])
        else:
            self.arriving_pages -= len(ids)
        try:
            self._give(row, sets, arrival.marker)
        except Misuse as error:
            raise InvariantBroken(f"SGLang gave pages back that it does not own: {error}") from error

    def _give(self, row: tuple[int, int] | None, sets: Sets, marker: int) -> None:
        lowest = row[0] if row else sets[0][0] or not sets[0][1] & _PADDING
        if lowest == 0:
            raise Misuse("block 0 is SGLang's padding page")
        if row is not None:
            self.pool.give([row], marker)
        else:
            self.pool.give_sets(sets, marker)

    def clear(self) -> None:
        """Everything comes back, whoever has it."""
        self.settle(wait=True)
        self.pool.give_sets(self._out_sets(), self.marker)
        self.out_pages = 0

    def _out_sets(self) -> Sets:
        """What SGLang owns: all but the padding page."""
        pieces = self.pool.ledger.owned_sets()
        return [(page, out) for page, owned in pieces if (out := owned if page else owned & ~_PADDING)]

    # ------------------------------------------------------------------ sight

    @property
    def free_slots(self) -> int:
        """What SGLang may count as free: everything that it has not been given, backed by memory or not."""
        return (self.capacity_pages - self.out_pages) * self.page_slots

    @property
    def ready_slots(self) -> int:
        """What can be taken without asking anybody."""
        return self.pool.available() * self.page_slots

    @property
    def most_slots(self) -> int:
        """What SGLang can ever own at the same time, at the present limit."""
        return max(0, self.pool.max_blocks() - 1) * self.page_slots

    def free_ids(self) -> torch.Tensor:
        """All ids that SGLang does not own, for its own checks."""
        self.settle(wait=True)
        out = torch.from_numpy(self._sets.ids_of([], self._out_sets()))
        free = torch.ones(self.capacity_pages + 1, dtype=torch.bool)
        free[0] = False
        free[out] = False
        return free.nonzero().reshape(-1).to(self._device)

    def problems(self) -> list[str]:
        """What is wrong with the books, in words; usually nothing."""
        owned = self.pool.ledger.counts().owned_blocks - self.pool.standing_blocks
        counted = self.out_pages + self.arriving_pages
        return [] if owned == counted else [f"{counted} pages are counted as handed out, the ledger knows {owned}"]


def copy_to_host(ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Queue a copy, and an event behind it."""
    host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    host.copy_(ids, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
