# SPDX-License-Identifier: Apache-2.0
"""A page bank that keeps ids in stock: what has been promised, and what comes back while it is promised still."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcached.engines.sglang.bank import PageBank
from kvcached.errors import PoolExhausted

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.runtime.pool import Pool


class StockedBank(PageBank):
    """SGLang takes from the stock and gives back to it; `refill` and `surrender` move ids between stock and pool.

    The pool has what is in stock as owned, so neither its limit nor other pools can take it. For SGLang it is free.
    """

    def __init__(self, pool: Pool, page_slots: int, device: torch.device) -> None:
        super().__init__(pool, page_slots, device)
        self._stock = torch.empty(0, dtype=torch.int64, device=device)
        self.when_cleared: Callable[[], None] = lambda: None

    @property
    def stock_pages(self) -> int:
        return len(self._stock)

    def refill(self, pages: int) -> None:
        """From the pool. Raises `PoolExhausted`; then nothing was taken."""
        self._add(super().take(pages))
        self.out_pages -= pages

    def surrender(self, pages: int) -> None:
        """To the pool."""
        self._stock, back = self._split(self.stock_pages - pages)
        self.out_pages += pages
        super().give(back)

    def take(self, pages: int) -> torch.Tensor:
        if pages > self.stock_pages:
            raise PoolExhausted(pages, self.stock_pages, "pages", "no more are in stock")
        taken, self._stock = self._split(pages)
        self.out_pages += pages
        return taken

    def _split(self, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, rest = self._stock.split((pages, self.stock_pages - pages))
        return first.clone(), rest

    def give(self, ids: torch.Tensor) -> None:
        self.out_pages -= ids.numel()
        self._add(ids)

    def _add(self, ids: torch.Tensor) -> None:
        """In order: the lowest are taken first and the highest given up, so that what is in use gathers on few pages."""
        self._stock = torch.cat((self._stock, ids)).sort().values

    def give_pages_of(self, slots: torch.Tensor) -> None:
        self.give(torch.unique(slots // self.page_slots))

    def clear(self) -> None:
        super().clear()
        self._stock = self._stock[:0]
        self.when_cleared()

    def free_ids(self) -> torch.Tensor:
        return torch.cat((super().free_ids(), self._stock))

    def problems(self) -> list[str]:
        owned = self.pool.ledger.counts().owned_blocks - self.pool.standing_blocks
        counted = (self.out_pages, self.stock_pages, self.arriving_pages)
        found = []
        if owned != sum(counted):
            found.append(f"{counted} pages are counted as handed out, in stock and on their way, the ledger knows {owned} in all")
        if len(torch.unique(self._stock)) != self.stock_pages:
            found.append(f"a page was given back twice, and is in the stock of {self.stock_pages} pages as often")
        return found
