# SPDX-License-Identifier: Apache-2.0
"""The page table: state, blocks and run of every page, and an index of partly used pages by the number of their free blocks.

Parallel arrays, because a warm take or give touches two or three numbers of one page and must cost about a microsecond. Sets of
blocks on a page are integers (bit i = the page's i-th block). Each array has one entry more than there are pages: the entry
`none` stands for "no page", so that the hot path needs no test for it.

One page is *open*: takes go to it while nothing fits better. Its free count may differ from the index, which holds it again only when
another page is opened; so takes from one page cost no index operation, nor do takes and gives that begin and empty it in turn.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from kvcached.core.retirement import RetirementQueue
from kvcached.core.states import MAPPING, PARKED, QUARANTINED, RETIRED, ROWS, UNMAPPED, UNMAPPING, USED, VOID

if TYPE_CHECKING:
    from kvcached.core.geometry import BlockGeometry

NO_MARKER: Final = -1
"""The marker of a page that no give has named: every completed marker is at least this."""


class PageTable:
    """State of `geometry.pages` pages. Changes keep the table's own sums right; what may be done when is the ledger's business."""

    __slots__ = (
        "available",
        "bpp",
        "buckets",
        "cached",
        "caps",
        "completed",
        "counts",
        "frees",
        "geometry",
        "held",
        "indexed",
        "largest_marker",
        "limit_pages",
        "lost",
        "lost_owned_blocks",
        "lows",
        "mapped_blocks",
        "mapping",
        "markers",
        "none",
        "nonempty",
        "open_page",
        "owned",
        "page_limit",
        "parked",
        "pinned",
        "queued",
        "regular_blocks",
        "retired",
        "retirement",
        "run_count",
        "run_first",
        "run_parked",
        "starts",
        "states",
        "stranded",
        "unmapping",
        "whole_pages",
        "withheld",
    )

    def __init__(self, geometry: BlockGeometry) -> None:
        pages = geometry.pages
        slots = pages + 1
        regular = geometry.page_bytes % geometry.block_stride_bytes == 0
        self.geometry = geometry
        self.none = pages
        self.page_limit = geometry.max_blocks_per_page  # no page has more blocks
        self.bpp = self.page_limit if regular else 0  # blocks per page, 0 when it differs from page to page
        self.regular_blocks = geometry.num_blocks if regular else 0  # ids below this one lie on page id // bpp
        self.whole_pages = min(pages, geometry.num_blocks // self.bpp) if regular else 0  # pages below this one have exactly bpp blocks
        self.states = bytearray(slots)
        self.states[pages] = VOID
        self.frees = [0] * slots
        self.owned = [0] * slots
        self.cached = [0] * slots
        self.counts = [0] * slots  # free blocks
        self.caps = [self.bpp] * slots  # blocks; when they differ, known from the page's first mapping on and 0 before
        self.starts = list(range(0, slots * self.bpp, self.bpp)) if regular else [0] * slots  # first block, likewise
        self.markers = [NO_MARKER] * slots
        for page in range(self.whole_pages, pages) if regular else ():
            self.learn(page)
        self.run_first = [0] * slots
        self.run_count = [0] * slots  # pages of the run, at the run's first page; 0 elsewhere
        self.run_parked: dict[int, int] = {}  # first page of each run of several pages -> how many of them are parked
        self.pinned: set[int] = set()
        self.available = 0  # free blocks on mapped pages
        self.limit_pages = pages  # that may be held
        self.withheld = 0  # free blocks that nobody is given, while more is held than may be
        self.held = 0  # pages that are not unmapped (nor void)
        self.mapping = self.parked = self.retired = self.unmapping = self.lost = 0  # of them; the rest is used
        self.mapped_blocks = 0  # blocks of parked, used and retired pages
        self.lost_owned_blocks = 0  # owned blocks of quarantined pages
        self.stranded = 0  # parked pages in runs that are not wholly parked
        self.completed = NO_MARKER
        self.largest_marker = NO_MARKER
        self.retirement = RetirementQueue()
        self.queued = [NO_MARKER] * slots  # marker of the page's newest entry there that is of this page alone
        self.lows = [0] * (VOID + 1)  # no page below lows[state] is in that state
        self.open_page = pages  # or `none`
        self.buckets: list[list[int]] = [[] for _ in range(self.page_limit)]  # free count -> heap of pages, some outdated
        self.indexed = [0] * slots  # bit c: the page has an entry in buckets[c]
        self.nonempty = 0  # bit c: buckets[c] has entries

    def page_of(self, block: int) -> int:
        """The page of an id within the range; -1 when it straddles two."""
        return block // self.bpp if self.bpp else self.geometry.page_of(block)

    def cached_on(self, page: int) -> list[int]:
        """The cached blocks of a page, ascending."""
        rest, blocks = self.cached[page], []
        while rest:
            low = rest & -rest
            blocks.append(self.starts[page] + low.bit_length() - 1)
            rest ^= low
        return blocks

    def is_lost(self, page: int) -> bool:
        return self.states[page] == QUARANTINED

    # ------------------------------------------------------------------ choice of a page

    def best_fit(self, blocks: int) -> int:
        """The used page with the fewest free blocks that has room for `blocks`; the lowest id among equals, the open page first."""
        open_count = self.counts[self.open_page]
        ceiling = open_count if open_count >= blocks else self.page_limit
        window = self.nonempty >> blocks
        while window:
            count = blocks + (window & -window).bit_length() - 1
            if count >= ceiling:
                break
            page = self._head(count)
            if page != self.none:
                return page
            window &= window - 1
        return self.open_page if open_count >= blocks else self.none

    def roomiest(self) -> int:
        """The used page with the most free blocks. For a take that no single page can serve, so that several have room."""
        open_count = self.counts[self.open_page]
        window = self.nonempty
        while (count := window.bit_length() - 1) > open_count:
            page = self._head(count)
            if page != self.none:
                return page
            window ^= 1 << count
        return self.open_page

    def page_for(self, blocks: int) -> int:
        """The page that a take of `blocks` goes to next. There are enough free ones. Above the limit an empty page is the last choice."""
        page = self.best_fit(blocks) if blocks < self.page_limit else self.none
        if page == self.none and not self.withheld:
            page = self.empty_page()
        if page == self.none:
            page = self.roomiest()
        return page if self.counts[page] else self.empty_page()

    def _head(self, count: int) -> int:
        """The lowest page with `count` free blocks, or `none`; drops outdated entries on the way."""
        heap, counts = self.buckets[count], self.counts
        while heap:
            page = heap[0]
            if counts[page] == count:
                return page
            heappop(heap)
            self.indexed[page] ^= 1 << count
        self.nonempty ^= 1 << count
        return self.none

    def index(self, page: int, count: int) -> None:
        """File a used page that is not open under its free count. An entry that is still there from before serves again."""
        bit = 1 << count
        if count and not self.indexed[page] & bit:
            self.indexed[page] |= bit
            self.nonempty |= bit
            heappush(self.buckets[count], page)

    def open(self, page: int) -> None:
        """Make `page` the open page."""
        former = self.open_page
        if former != page:
            self.open_page = page
            if self.states[former] == USED:
                self.index(former, self.counts[former])

    def empty_page(self) -> int:
        """The lowest parked page, else the lowest retired one, else `none`."""
        if self.parked:
            return self.lowest(PARKED)
        return self.lowest(RETIRED) if self.retired else self.none

    def lowest(self, state: int) -> int:
        """The lowest page in `state`; there is one. The search starts where the last one ended, unless a lower page came since."""
        page = self.lows[state] = self.states.find(state, self.lows[state])
        return page

    # ------------------------------------------------------------------ states

    def occupy(self, page: int) -> None:
        """An empty mapped page becomes used."""
        if self.states[page] == PARKED:
            self.parked -= 1
            if self.run_parked:
                self._count_one(page, -1)
        else:
            self.retired -= 1
        self.states[page] = USED

    def vacate(self, page: int, marker: int) -> None:
        """A used page has no blocks left: it retires until its marker is complete, or is parked at once when nothing is in flight."""
        if marker <= self.completed:
            self.states[page] = PARKED
            self.parked += 1
            if page < self.lows[PARKED]:
                self.lows[PARKED] = page
            if self.run_parked:
                self._count_one(page, 1)
            return
        self.states[page] = RETIRED
        self.retired += 1
        if page < self.lows[RETIRED]:
            self.lows[RETIRED] = page
        if self.queued[page] != marker:
            self.queued[page] = marker
            self.retirement.push(marker, page, 1)

    def leave_empty(self, first: int, pages: int, state: int) -> None:
        """Adjacent pages that were in `state` have become used."""
        if state == RETIRED:
            self.retired -= pages
            return
        self.parked -= pages
        if self.run_parked:
            self._count_parked(first, pages, -1)

    def enter_empty(self, first: int, pages: int, state: int, marker: int) -> None:
        """Adjacent used pages with one marker have come into `state`."""
        if first < self.lows[state]:
            self.lows[state] = first
        if state == RETIRED:
            self.retired += pages
            self.retirement.push(marker, first, pages)
            return
        self.parked += pages
        if self.run_parked:
            self._count_parked(first, pages, 1)

    def advance(self, completed: int) -> int:
        """Retired pages whose marker is complete are parked. Returns how many. A marker below the last one changes nothing."""
        if completed <= self.completed:
            return 0
        self.completed = completed
        before = self.parked
        for first, pages in self.retirement.pop_through(completed):
            for page in range(first, first + pages):
                if self.states[page] == RETIRED and self.markers[page] <= completed:
                    self.retired -= 1
                    self._park(page, 1)
        return self.parked - before

    def _park(self, first: int, pages: int) -> None:
        self.states[first : first + pages] = ROWS[PARKED] * pages
        self.parked += pages
        if first < self.lows[PARKED]:
            self.lows[PARKED] = first
        if self.run_parked:
            self._count_parked(first, pages, 1)

    def _count_one(self, page: int, sign: int) -> None:
        """Bring the sums of runs of several pages up to date after a page became parked (+1) or no longer is (-1)."""
        run = self.run_first[page]
        pages = self.run_count[run]
        if pages > 1:
            before = self.run_parked[run]
            after = self.run_parked[run] = before + sign
            self.stranded += after % pages - before % pages  # a wholly parked run strands nothing

    def _count_parked(self, first: int, pages: int, sign: int) -> None:
        """The same for adjacent pages."""
        page, end = first, first + pages
        while page < end:
            run = self.run_first[page]
            count = self.run_count[run]
            stop = min(end, run + count)
            if count > 1:
                before = self.run_parked[run]
                after = before + sign * (stop - page)
                self.run_parked[run] = after
                self.stranded += after % count - before % count
            page = stop

    # ------------------------------------------------------------------ mapping

    def learn(self, page: int) -> bool:
        """Read the page's blocks from the geometry. False when there is none; then the page is void from now on."""
        blocks = self.geometry.blocks_of(page)
        self.starts[page], self.caps[page] = blocks.start, len(blocks)
        if not blocks:
            self.states[page] = VOID
        return bool(blocks)

    def bound(self) -> None:
        """After the limit or what is held has changed. Above its limit a pool gives what would fit within it: else takes would fill the
        holes that gives leave, no page would ever be empty, and a busy pool would stay above for good."""
        over = self.held - self.mapping - self.unmapping - self.limit_pages
        self.withheld = over * self.page_limit if over > 0 else 0

    def begin_map(self, first: int, pages: int) -> None:
        """Unmapped pages become one run that is being mapped."""
        self.states[first : first + pages] = ROWS[MAPPING] * pages
        self.run_first[first : first + pages] = [first] * pages
        self.run_count[first] = pages
        if pages > 1:
            self.run_parked[first] = 0
        self.held += pages
        self.mapping += pages

    def begin_unmap(self, first: int, pages: int) -> None:
        """A whole run of parked pages. Its blocks are no longer there to be taken."""
        self.parked -= pages
        if pages > 1:
            self._count_parked(first, pages, -1)
        blocks = sum(self.caps[first : first + pages])
        self.available -= blocks
        self.mapped_blocks -= blocks
        self.frees[first : first + pages] = self.counts[first : first + pages] = [0] * pages
        self.states[first : first + pages] = ROWS[UNMAPPING] * pages
        self.unmapping += pages
        self.bound()

    def finish_mapped(self, first: int, pages: int) -> None:
        """Pages that were being mapped are, or pages that were being unmapped still are: they are parked."""
        self._leave_plan(first, pages)
        caps = self.caps[first : first + pages]
        self.frees[first : first + pages] = [(1 << cap) - 1 for cap in caps]
        self.counts[first : first + pages] = caps
        self.available += sum(caps)
        self.mapped_blocks += sum(caps)
        self._park(first, pages)
        self.bound()

    def finish_unmapped(self, first: int, pages: int) -> None:
        """Pages that were being unmapped are, or pages that were being mapped are not."""
        self._leave_plan(first, pages)
        self.states[first : first + pages] = ROWS[UNMAPPED] * pages
        self.lows[UNMAPPED] = min(first, self.lows[UNMAPPED])
        self.markers[first : first + pages] = [NO_MARKER] * pages
        self.held -= pages

    def _leave_plan(self, first: int, pages: int) -> None:
        if self.states[first] == MAPPING:
            self.mapping -= pages
        else:
            self.unmapping -= pages

    def forget_run(self, first: int) -> None:
        """The run is no longer backed as a whole."""
        self.run_count[first] = 0
        self.run_parked.pop(first, None)

    def make_single(self, page: int) -> None:
        """The page is a run of its own."""
        self.run_first[page], self.run_count[page] = page, 1

    def quarantine(self, page: int) -> None:
        """The page's free blocks are lost; owned ones stay owned. For a page that holds no cached block."""
        state = self.states[page]
        if state == UNMAPPED:
            self.held += 1
            self.make_single(page)
        elif state in (MAPPING, UNMAPPING):
            self._leave_plan(page, 1)
        else:
            self._lose_blocks(page, state)
        self.states[page] = QUARANTINED
        self.lost += 1
        self.bound()

    def _lose_blocks(self, page: int, state: int) -> None:
        if state == PARKED:
            self.parked -= 1
            if self.run_parked:
                self._count_one(page, -1)
        self.retired -= state == RETIRED
        self.available -= self.counts[page]
        self.mapped_blocks -= self.caps[page]
        self.lost_owned_blocks += self.owned[page].bit_count()
        self.counts[page] = self.frees[page] = 0
