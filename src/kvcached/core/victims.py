# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks go first: the coldest, or those whose loss empties whole runs of pages at the least cost."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvcached.core.pages import PageTable

COMPACT_AT_LEAST: Final = 1024


class CachedBlock(NamedTuple):
    """Ordered as blocks go: coldest first, then cheapest, then first come."""

    last_use: int
    cost: float
    sequence: int
    block: int


class Emptying(NamedTuple):
    """A run that could be emptied, ordered by what it costs per page."""

    cost_per_page: float
    heat: int
    first: int
    pages: int


class CacheIndex:
    """Every cached block with its last use and cost, and the sums per page.

    A block that is no longer cached leaves its entry in the heap until it comes to the top or too many have gathered.
    """

    __slots__ = ("_compact_at", "_heap", "_records", "_sequence", "_table", "page_cost", "page_heat")

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._records: dict[int, CachedBlock] = {}
        self._heap: list[CachedBlock] = []
        self._sequence = 0
        self._compact_at = COMPACT_AT_LEAST
        self.page_cost: dict[int, float] = {}  # pages with cached blocks -> sum of their costs
        self.page_heat: dict[int, int] = {}  # the same pages -> latest use of a block there since the page had no cached one

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, block: int) -> bool:
        return block in self._records

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._records.values())

    def add(self, block: int, page: int, last_use: int, cost: float) -> None:
        self._sequence += 1
        record = CachedBlock(last_use, cost, self._sequence, block)
        self._records[block] = record
        heappush(self._heap, record)
        self.page_cost[page] = self.page_cost.get(page, 0) + cost
        self.page_heat[page] = max(last_use, self.page_heat.get(page, last_use))
        if len(self._heap) > self._compact_at:
            self._compact()

    def remove(self, ids: Iterable[int], pages: Iterable[int]) -> None:
        """The sets of cached blocks on `pages`, which held these blocks, no longer have them."""
        page_of, cached = self._table.page_of, self._table.cached
        for block in ids:
            self.page_cost[page_of(block)] -= self._records.pop(block).cost
        for page in pages:
            if not cached[page]:
                del self.page_cost[page], self.page_heat[page]

    def _compact(self) -> None:
        self._heap = list(self._records.values())
        heapify(self._heap)
        self._compact_at = max(COMPACT_AT_LEAST, 2 * len(self._heap))

    def coldest(self, blocks: int) -> list[int]:
        """Up to `blocks` cached blocks, coldest first. They stay cached."""
        chosen: list[CachedBlock] = []
        while len(chosen) < blocks and self._heap:
            record = heappop(self._heap)
            if self._records.get(record.block) is record:
                chosen.append(record)
        for record in chosen:
            heappush(self._heap, record)
        return [record.block for record in chosen]

    def blocks_on(self, page: int) -> list[int]:
        """The cached blocks on a page, ascending."""
        start, rest, blocks = self._table.starts[page], self._table.cached[page], []
        while rest:
            low = rest & -rest
            blocks.append(start + low.bit_length() - 1)
            rest ^= low
        return blocks

    def cheapest_runs(self, pages: int) -> list[int]:
        """Cached blocks of the runs that are emptied at the least cost per page, until `pages` pages are empty or no run is left."""
        victims: list[int] = []
        candidates = self._emptyable()
        heapify(candidates)
        while candidates and pages > 0:
            run = heappop(candidates)
            pages -= run.pages
            for page in range(run.first, run.first + run.pages):
                victims += self.blocks_on(page)
        return victims

    def _emptyable(self) -> list[Emptying]:
        table = self._table
        runs = {table.run_first[page] for page in self.page_cost if not table.owned[page]}
        return [run for first in runs if (run := self._emptying(first)) is not None]

    def _emptying(self, first: int) -> Emptying | None:
        """None when an owned block, a pinned or a lost page keeps the run."""
        table = self._table
        count = table.run_count[first]
        cost, heat = 0.0, 0
        for page in range(first, first + count):
            if table.owned[page] or page in table.pinned or table.counts[page] == 0 == table.cached[page]:
                return None
            cost += self.page_cost.get(page, 0)
            heat = max(heat, self.page_heat.get(page, heat))
        return Emptying(cost / count, heat, first, count)
