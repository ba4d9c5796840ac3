# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks go first: page by page, so that what comes next and what is left lie together.

Pages are ordered by *worth*: a time, on the clock of the cache's turnover (the cost evicted so far), plus a span in proportion to what
their cached blocks cost; a full page outlives an almost empty one of its time by `DENSE_LIFE` turnovers of the whole cache. On a page
the blocks are ordered by last use. The time is the mean of when its blocks came: in simulations as much is found again as with an order
of blocks by use alone, which leaves holes on all pages, so that what is cached next is scattered over these and lost when pages are
given back. Under a cap it is when the page last gained a block: that is where the requests that now end have more, and few pages are
left. Order by cost alone would keep the first dense pages for ever.

For pages that others want density counts less, `PRESSED_DENSE_LIFE`: much has to go at once, and a hot prefix that was found again on
pages with holes would go before cold ones that fill theirs.

A cap drops blocks while requests run, which frees no page that such a request is on too: what its other blocks will be when it ends,
most often cached as well, decides how dense the page is then. So its owned blocks count there, `OWNED_LIFE` turnovers for a full page.
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
OWNED_LIFE: Final = 3.0

CachedBlock = tuple[int, float, int, int, float]
"""(last use, cost, sequence, block, turnover when it came): sorts as blocks of a page go, coldest first, then cheapest, then first come."""

PageWorth = tuple[float, int, int]
"""(worth, latest use, page): sorts as pages go."""


class Emptying(NamedTuple):
    """A run that could be emptied; sorts as runs go."""

    worth_per_page: float
    latest_use: int
    first: int
    pages: int


class CacheIndex:
    """Every cached block with its last use and cost, and the worth of every page with cached blocks. `capped`: see above.

    What is no longer true stays in the heap until it comes to the top or too much has gathered: an entry counts when it is the very
    one that the dictionary holds.
    """

    __slots__ = (
        "_capped",
        "_line",
        "_line_page",
        "_page_heap",
        "_scale",
        "_sequence",
        "_table",
        "_turnover",
        "arrivals",
        "blocks",
        "born",
        "costs",
        "worths",
    )

    def __init__(self, table: PageTable, *, capped: bool = False) -> None:
        self._table = table
        self._capped = capped
        self._sequence = 0
        self._turnover: float = 0  # cost of all blocks that had to go so far
        self._scale = 1  # cached blocks, within a factor of two: one turnover of the whole cache
        self._page_heap: list[PageWorth] = []
        self.blocks: dict[int, CachedBlock] = {}
        self.costs: dict[int, float] = {}  # page -> sum of the costs of its cached blocks
        self.arrivals: dict[int, float] = {}  # page -> sum over its cached blocks: cost x turnover when it came
        self.born: dict[int, float] = {}  # page -> the turnover when it last gained a block
        self.worths: dict[int, PageWorth] = {}
        self._line_page = -1  # whose blocks are drawn up: one that has to give a block gives more soon
        self._line: list[int] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def add(self, ids: Iterable[int], last_use: int, cost: float) -> None:
        """These blocks are cached from now on."""
        costs, arrivals, page_of, pages, turnover = self.costs, self.arrivals, self._table.page_of, set[int](), self._turnover
        arrival = cost * turnover
        for block in ids:
            self._sequence += 1
            self.blocks[block] = (last_use, cost, self._sequence, block, turnover)
            page = page_of(block)
            costs[page] = costs.get(page, 0) + cost
            arrivals[page] = arrivals.get(page, 0) + arrival
            pages.add(page)
        if self._line_page in pages:
            self._line_page = -1
        for page in pages:
            self.born[page] = turnover
            self._rate(page, max(last_use, self.worths[page][1]) if page in self.worths else last_use)
        self._compact()

    def remove(self, ids: Iterable[int], pages: Iterable[int]) -> None:
        """The sets of cached blocks on `pages`, which held these blocks, no longer have them."""
        page_of, cached = self._table.page_of, self._table.cached
        for block in ids:
            _, cost, _, _, turnover = self.blocks.pop(block)
            page = page_of(block)
            self.costs[page] -= cost
            self.arrivals[page] -= cost * turnover
        for page in pages:
            if page == self._line_page:
                self._line = [block for block in self._line if block in self.blocks]
            if cached[page]:
                self._rate(page, self.worths[page][1])
            else:
                del self.costs[page], self.arrivals[page], self.born[page], self.worths[page]
        self._compact()

    def _worth(self, page: int, dense_life: float = DENSE_LIFE) -> float:
        cost = self.costs[page]
        time = self.born[page] if self._capped else self.arrivals[page] / cost
        return time + dense_life * self._scale / self._table.page_limit * cost

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
        if len(self._page_heap) > COMPACT_AT_LEAST + 2 * len(self.worths):
            self._page_heap = list(self.worths.values())
            heapify(self._page_heap)

    def least_worth(self, blocks: int) -> list[int]:
        """Up to `blocks` cached blocks, page by page in order of worth, the coldest of the last page first. They stay cached."""
        self._rescale()
        chosen: list[int] = []
        seen: list[PageWorth] = []
        shared: list[PageWorth] = []  # pages with owned blocks, by what they are worth with them
        while len(chosen) < blocks and (self._page_heap or shared):
            if shared and not (self._page_heap and self._page_heap[0] < shared[0]):
                chosen += self._on_page(heappop(shared)[2])[: blocks - len(chosen)]
                continue
            entry = heappop(self._page_heap)
            page = entry[2]
            if self.worths.get(page) is not entry:
                continue
            seen.append(entry)
            if self._capped and self._table.owned[page]:
                heappush(shared, (entry[0] + self._owned_worth(page), *entry[1:]))
            else:
                chosen += self._on_page(page)[: blocks - len(chosen)]
        for entry in seen:
            heappush(self._page_heap, entry)
        return self._must_go(chosen)

    def _owned_worth(self, page: int) -> float:
        return OWNED_LIFE * self._scale / self._table.page_limit * self._table.owned[page].bit_count()

    def _must_go(self, chosen: list[int]) -> list[int]:
        self._turnover += sum(self.blocks[block][1] for block in chosen)
        return chosen

    def _on_page(self, page: int) -> list[int]:
        """The page's cached blocks, coldest first."""
        if page != self._line_page:
            self._line_page = page
            self._line = [entry[3] for entry in sorted(self.blocks[block] for block in self._table.cached_on(page))]
        return self._line

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
