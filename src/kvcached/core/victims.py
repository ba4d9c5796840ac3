# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks go first: the coldest, or those whose loss empties whole pages at the least cost.

Blocks are ordered by last use. Pages are ordered by *worth*: a point in the cache's turnover (the cost evicted so far) when the page
last gained a block, plus a span in proportion to what its cached blocks cost; a full page outlives an almost empty one of its time by
`DENSE_LIFE` turnovers of the whole cache. Order by use alone leaves the survivors scattered over many pages; order by cost alone keeps
the first dense pages for ever. For pages that others want density counts less, `PRESSED_DENSE_LIFE`: much has to go at once, and a hot
prefix that was found again on pages with holes would go before cold ones that fill theirs.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.core.pages import PageTable

COMPACT_AT_LEAST: Final = 1024
DENSE_LIFE: Final = 1.0
PRESSED_DENSE_LIFE: Final = 0.25

CachedBlock = tuple[int, float, int, int]
"""(last use, cost, sequence, block): sorts as blocks go, coldest first, then cheapest, then first come."""

PageWorth = tuple[float, int, int]
"""(worth, latest use, page): sorts as pages go."""


class Emptying(NamedTuple):
    """A run that could be emptied; sorts as runs go."""

    worth_per_page: float
    latest_use: int
    first: int
    pages: int


class CacheIndex:
    """Every cached block with its last use and cost, and the worth of every page with cached blocks.

    What is no longer true stays in the heaps until it comes to the top or too much has gathered: an entry counts when it is the very
    one that the dictionary holds.
    """

    __slots__ = ("_block_heap", "_page_heap", "_scale", "_sequence", "_table", "_turnover", "blocks", "born", "costs", "worths")

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._sequence = 0
        self._turnover: float = 0  # cost of all blocks that had to go so far
        self._scale = 1  # cached blocks, within a factor of two: one turnover of the whole cache
        self._block_heap: list[CachedBlock] = []
        self._page_heap: list[PageWorth] = []
        self.blocks: dict[int, CachedBlock] = {}
        self.costs: dict[int, float] = {}  # page -> sum of the costs of its cached blocks
        self.born: dict[int, float] = {}  # page -> the turnover when it last gained a block
        self.worths: dict[int, PageWorth] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, ids: Iterable[int], last_use: int, cost: float) -> None:
        """These blocks are cached from now on."""
        costs, page_of, pages = self.costs, self._table.page_of, set[int]()
        for block in ids:
            self._sequence += 1
            entry = (last_use, cost, self._sequence, block)
            self.blocks[block] = entry
            heappush(self._block_heap, entry)
            page = page_of(block)
            costs[page] = costs.get(page, 0) + cost
            pages.add(page)
        for page in pages:
            self.born[page] = self._turnover
            self._rate(page, max(last_use, self.worths[page][1]) if page in self.worths else last_use)
        self._compact()

    def remove(self, ids: Iterable[int], pages: Iterable[int]) -> None:
        """The sets of cached blocks on `pages`, which held these blocks, no longer have them."""
        page_of, cached = self._table.page_of, self._table.cached
        for block in ids:
            self.costs[page_of(block)] -= self.blocks.pop(block)[1]
        for page in pages:
            if cached[page]:
                self._rate(page, self.worths[page][1])
            else:
                del self.costs[page], self.born[page], self.worths[page]
        self._compact()

    def _worth(self, page: int, dense_life: float = DENSE_LIFE) -> float:
        return self.born[page] + dense_life * self._scale / self._table.page_limit * self.costs[page]

    def _rate(self, page: int, latest_use: int) -> None:
        entry = (self._worth(page), latest_use, page)
        self.worths[page] = entry
        heappush(self._page_heap, entry)

    def _rescale(self) -> None:
        """Rate all pages anew once the cache has doubled or halved: seldom, and worths are comparable in between."""
        if self._scale <= 2 * len(self.blocks) <= 4 * self._scale:
            return
        self._scale = max(1, len(self.blocks))
        self._page_heap.clear()
        for page, entry in self.worths.items():
            self._rate(page, entry[1])

    def _compact(self) -> None:
        if len(self._block_heap) > COMPACT_AT_LEAST + 2 * len(self.blocks):
            self._block_heap = list(self.blocks.values())
            heapify(self._block_heap)
        if len(self._page_heap) > COMPACT_AT_LEAST + 2 * len(self.worths):
            self._page_heap = list(self.worths.values())
            heapify(self._page_heap)

    def coldest(self, blocks: int) -> list[int]:
        """Up to `blocks` cached blocks, coldest first. They stay cached."""
        chosen: list[CachedBlock] = []
        while len(chosen) < blocks and self._block_heap:
            entry = heappop(self._block_heap)
            if self.blocks.get(entry[3]) is entry:
                chosen.append(entry)
        for entry in chosen:
            heappush(self._block_heap, entry)
        return self._must_go([block for _, _, _, block in chosen])

    def least_worth(self, blocks: int) -> list[int]:
        """Up to `blocks` cached blocks, page by page in order of worth, the coldest of the last page first. They stay cached."""
        self._rescale()
        chosen: list[int] = []
        seen: list[PageWorth] = []
        while len(chosen) < blocks and self._page_heap:
            entry = heappop(self._page_heap)
            page = entry[2]
            if self.worths.get(page) is entry:
                seen.append(entry)
                chosen += self._on_page(page)[: blocks - len(chosen)]
        for entry in seen:
            heappush(self._page_heap, entry)
        return self._must_go(chosen)

    def _must_go(self, chosen: list[int]) -> list[int]:
        self._turnover += sum(self.blocks[block][1] for block in chosen)
        return chosen

    def _on_page(self, page: int) -> list[int]:
        """The page's cached blocks, coldest first."""
        return [block for _, _, _, block in sorted(self.blocks[block] for block in self._table.cached_on(page))]

    def cheapest_runs(self, pages: int) -> list[int]:
        """Cached blocks of the runs that are worth least per page, until `pages` pages are empty or no run is left. They stay cached."""
        self._rescale()
        table = self._table
        firsts = {table.run_first[page] for page in self.worths if not table.owned[page]}
        candidates = [run for first in firsts if (run := self._emptying(first)) is not None]
        heapify(candidates)
        chosen: list[int] = []
        while candidates and pages > 0:
            run = heappop(candidates)
            pages -= run.pages
            for page in range(run.first, run.first + run.pages):
                if page in self.worths:
                    chosen += self._on_page(page)
        return self._must_go(chosen)

    def _emptying(self, first: int) -> Emptying | None:
        """None when an owned block, a pinned page or a lost one keeps the run."""
        table = self._table
        pages = range(first, first + table.run_count[first])
        if not table.pinned.isdisjoint(pages) or any(table.owned[page] or table.is_lost(page) for page in pages):
            return None
        cached = [page for page in pages if page in self.worths]
        worth = sum(self._worth(page, PRESSED_DENSE_LIFE) for page in cached)
        return Emptying(worth / len(pages), max(self.worths[page][1] for page in cached), first, len(pages))
