# SPDX-License-Identifier: Apache-2.0
"""Page ids between a pool on the host and tensors on the device, without a synchronise.

Ids that are handed out go to the device in one asynchronous copy, or as an `arange` where they are neighbours. Ids that come back are
copied into pinned memory, and count as free for the pool when that copy has finished; SGLang counts them as free at once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvcached.errors import InvariantBroken
from kvcached.runtime.pool import NOTHING_IN_FLIGHT

if TYPE_CHECKING:
    from kvcached.runtime.pool import Pool, Ranges

    Ids = np.ndarray[Any, np.dtype[np.int64]]


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
        self._owned: Any = np.zeros(pool.geometry.num_blocks, dtype=np.bool_)
        self._arrivals: deque[Arrival] = deque()

    # ------------------------------------------------------------------ ids out

    def take(self, pages: int) -> torch.Tensor:
        """Ids of `pages` pages, int64, on the device. Raises `PoolExhausted`; then nothing was taken."""
        self.settle()
        if not pages:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        ranges = self.pool.take(pages)
        self.out_pages += pages
        for first, count in ranges:
            self._owned[first : first + count] = True
        if len(ranges) == 1:
            first, count = ranges[0]
            return torch.arange(first, first + count, dtype=torch.int64, device=self._device)
        ids = torch.from_numpy(_ids_of(ranges, pages))
        return ids if self._device.type == "cpu" else ids.pin_memory().to(self._device, non_blocking=True)

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
        if arrival.per_slot:
            ids = np.unique(ids // self.page_slots)
            self.out_pages -= len(ids)
        else:
            ids = ids if (ids[1:] > ids[:-1]).all() else np.sort(ids)  # most often they come in order
            self.arriving_pages -= len(ids)
        if not self._owned[ids].all():
            raise InvariantBroken(f"SGLang gave pages back that it does not own: {ids[~self._owned[ids]][:8].tolist()} ...")
        self._owned[ids] = False
        self.pool.give(_ranges_of(ids), arrival.marker)

    def clear(self) -> None:
        """Everything comes back, whoever has it."""
        self.settle(wait=True)
        ids = np.flatnonzero(self._owned)
        if len(ids):
            self._owned[:] = False
            self.pool.give(_ranges_of(ids), self.marker)
        self.out_pages = 0

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
        free = ~self._owned
        free[0] = False
        return torch.from_numpy(np.flatnonzero(free)).to(self._device)

    def problems(self) -> list[str]:
        """What is wrong with the books, in words; usually nothing."""
        owned = int(self._owned.sum()) - self.arriving_pages
        ledger_owned = self.pool.counts().owned_blocks - self.pool.standing_blocks
        found = [] if owned == self.out_pages else [f"{self.out_pages} pages are counted as handed out, {owned} are marked"]
        if int(self._owned.sum()) != ledger_owned:
            found.append(f"{int(self._owned.sum())} pages are marked as handed out, the ledger knows {ledger_owned}")
        return found


def copy_to_host(ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Queue a copy, and an event behind it."""
    host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    host.copy_(ids, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


def _ids_of(ranges: Ranges, total: int) -> Ids:
    firsts, counts = np.array(ranges, dtype=np.int64).T
    ends = counts.cumsum()
    ids: Ids = np.arange(total, dtype=np.int64) + np.repeat(firsts - ends + counts, counts)
    return ids


def _ranges_of(ids: Ids) -> Ranges:
    """Ascending ids as (first, count)."""
    cuts: Ids = np.flatnonzero(np.diff(ids) != 1) + 1
    firsts = ids[np.concatenate(([0], cuts))]
    counts = np.diff(np.concatenate(([0], cuts, [len(ids)])))
    return list(zip(firsts.tolist(), counts.tolist(), strict=True))
