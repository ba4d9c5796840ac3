# SPDX-License-Identifier: Apache-2.0
"""The ledger: who owns which block, and which pages are mapped for them. Plain data; the pool above holds the one lock.

Blocks are free, owned or cached (evictable); they travel as ranges (first, count) or as single ids. A take finds blocks on mapped
pages only; pages come and go by plans that the pool performs and settles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.core.blocks import (
    BlockRange,
    BlockState,
    Piece,
    disown,
    disown_sets,
    drain,
    free,
    give_row,
    joined,
    own,
    pieces_of_ids,
    require,
    state_of,
    take_from,
    take_row,
    take_set,
)
from kvcached.core.limits import LimitChange, LimitOutcome
from kvcached.core.pages import PageTable
from kvcached.core.plans import GrowPlan, Planner, ShrinkPlan
from kvcached.core.report import PageCopy, PageReport, PoolCounts, copy_of, count, page_reports
from kvcached.core.states import MAPPING, QUARANTINED, UNMAPPING, USED, VOID, PageState
from kvcached.core.victims import CacheIndex
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kvcached.core.geometry import BlockGeometry


class Ledger:
    """Blocks and pages of one pool. Not safe for threads; no clock: markers and uses are numbers that only grow.

    Every call either does all that it says or changes nothing. `Misuse`: the caller names blocks that are not in the state the call
    needs. `InvariantBroken`: a plan is settled that is not open.
    """

    __slots__ = ("_cache", "_planner", "_revision", "_table")

    def __init__(self, geometry: BlockGeometry, *, limit_pages: int, capped: bool = False) -> None:
        """`capped`: cached blocks beyond a cap will be evicted all the time, see `cached_overflow`."""
        self._table = PageTable(geometry)
        self._table.limit_pages = max(0, min(limit_pages, geometry.pages))
        self._planner = Planner(self._table)
        self._cache = CacheIndex(self._table, capped=capped)
        self._revision = 0

    @property
    def geometry(self) -> BlockGeometry:
        return self._table.geometry

    # ------------------------------------------------------------------ take

    def available(self) -> int:
        """Free blocks on mapped pages, less what lies above the limit: a take of that many succeeds."""
        spare = self._table.available - self._table.withheld
        return spare if spare > 0 else 0

    def missing(self, blocks: int) -> int:
        """Blocks that would have to become free first for a take of so many."""
        return max(0, blocks + self._table.withheld - self._table.available)

    def reachable(self) -> int:
        """Blocks that can be had without mapping a page: available, or cached ones evicted."""
        return max(0, self._table.available + len(self._cache) - self._table.withheld)

    def take(self, blocks: int) -> list[BlockRange] | None:
        """`blocks` free blocks become owned; None, and nothing changed, when fewer are available.

        They come from the page with the fewest free blocks that holds them all, else from empty pages, else from the emptiest ones:
        blocks of one request stay together, and holes are filled before an empty page is begun.
        """
        table = self._table
        page = table.open_page
        spare = table.counts[page] - blocks
        if spare >= 0 < blocks and not table.withheld and not (table.nonempty >> blocks) & ((1 << spare) - 1):
            holes = table.frees[page]
            low = holes & -holes
            taken = low if blocks == 1 else low * ((1 << blocks) - 1)
            if holes & taken == taken:
                if table.states[page] != USED:
                    table.occupy(page)
                table.frees[page] = holes ^ taken
                table.owned[page] |= taken
                table.counts[page] = spare
                table.available -= blocks
                return [(table.starts[page] + low.bit_length() - 1, blocks)]
        if blocks + table.withheld > table.available and blocks > 0:
            return None
        if blocks < 0:
            raise Misuse(f"{blocks} blocks cannot be taken")
        return self._take_scattered(blocks)

    def _take_scattered(self, blocks: int) -> list[BlockRange]:
        """Page by page, or row of pages by row. There are enough."""
        table = self._table
        ranges: list[BlockRange] = []
        while blocks:
            page = table.page_for(blocks)
            if blocks >= 2 * table.bpp > 0 and page < table.whole_pages and table.states[page] != USED:
                blocks -= take_row(table, page, blocks // table.bpp, ranges)
            else:
                blocks -= take_from(table, page, blocks, ranges)
        return ranges if len(ranges) == 1 else joined(ranges)

    def take_sets(self, blocks: int) -> tuple[list[BlockRange], list[Piece]] | None:
        """The blocks that `take` would take: as ranges where they are neighbours, and for each other page the set of its blocks.

        For many blocks in about as many places, which would be as many ranges.
        """
        table = self._table
        if blocks + table.withheld > table.available and blocks > 0:
            return None
        if blocks < 0:
            raise Misuse(f"{blocks} blocks cannot be taken")
        if blocks == table.page_limit == table.counts[table.open_page] and (whole := self.take(blocks)) is not None:
            return whole, []
        ranges: list[BlockRange] = []
        pieces: list[Piece] = []
        while blocks:
            page = table.page_for(blocks)
            if table.states[page] == USED and blocks >= table.page_limit:
                blocks -= drain(table, blocks, pieces)
            elif blocks >= 2 * table.bpp > 0 and page < table.whole_pages and table.states[page] != USED:
                blocks -= take_row(table, page, blocks // table.bpp, ranges)
            else:
                blocks -= take_set(table, page, blocks, ranges, pieces)
        return ranges if len(ranges) == 1 else joined(ranges), pieces

    def take_ids(self, ids: Sequence[int]) -> bool:
        """Exactly these free blocks become owned; False, and nothing changed, when one is not free on a mapped page."""
        table = self._table
        pieces = pieces_of_ids(table, ids)
        if any(table.frees[page] & blocks != blocks for page, blocks in pieces.items()):
            return False
        for page, blocks in pieces.items():
            own(table, page, blocks)
            if page != table.open_page:
                table.index(page, table.counts[page])
        return True

    # ------------------------------------------------------------------ give

    def give(self, ranges: Iterable[BlockRange], marker: int) -> None:
        """Owned blocks become free. Work up to step `marker` may still read them, so a page that this empties retires until then.

        Raises `Misuse`, naming the block, when one is not owned or is named twice; then nothing has changed.
        """
        table = self._table
        if type(ranges) is list and len(ranges) == 1:
            first, blocks = ranges[0]
            if 0 <= first < table.regular_blocks:
                bpp = table.bpp
                page = first // bpp
                shift = first - page * bpp
                if 0 < blocks <= bpp - shift:
                    owned = table.owned[page]
                    given = 1 << shift if blocks == 1 else ((1 << blocks) - 1) << shift
                    if owned & given == given:
                        table.owned[page] = owned ^ given
                        free(table, page, given, blocks, marker)
                        return
                elif 0 == shift == blocks % bpp < blocks <= table.regular_blocks - first and give_row(table, page, blocks // bpp, marker):
                    return
        for page, given in disown(table, ranges):
            free(table, page, given, given.bit_count(), marker)

    def give_sets(self, pieces: Sequence[Piece], marker: int) -> None:
        """As `give`, of each page the set of its blocks."""
        table = self._table
        disown_sets(table, pieces)
        for page, given in pieces:
            free(table, page, given, given.bit_count(), marker)

    def owned_sets(self) -> list[Piece]:
        """All owned blocks, page by page."""
        return [(page, owned) for page, owned in enumerate(self._table.owned) if owned]

    def advance(self, completed_marker: int) -> int:
        """All work up to this step has finished: pages that retired by then are parked. Returns how many."""
        return self._table.advance(completed_marker)

    @property
    def completed_marker(self) -> int:
        """The newest step that has finished; below every step before the first has."""
        return self._table.completed

    @property
    def newest_marker(self) -> int:
        """The newest step that any block was given back behind."""
        return self._table.largest_marker

    # ------------------------------------------------------------------ cached blocks

    def give_cached(self, ids: Sequence[int], marker: int, last_use: int, cost: float = 1) -> None:
        """Owned blocks become cached: kept for reuse until they are evicted, those named first before others of the same use.

        `last_use` grows with time; `cost` is what losing one block costs. On a quarantined page they are lost instead.
        """
        table = self._table
        pieces = pieces_of_ids(table, ids)
        require(table, pieces, table.owned, "owned", "cached")
        for page, blocks in pieces.items():
            table.owned[page] ^= blocks
            table.markers[page] = max(marker, table.markers[page])
            if table.is_lost(page):
                table.lost_owned_blocks -= blocks.bit_count()
            else:
                table.cached[page] |= blocks
        table.largest_marker = max(marker, table.largest_marker)
        self._cache.add([block for block in ids if not table.is_lost(table.page_of(block))] if table.lost else ids, last_use, cost)

    def touch(self, ids: Sequence[int]) -> None:
        """Cached blocks become owned again."""
        for page, blocks in self._uncache(ids, "touched").items():
            self._table.owned[page] |= blocks

    def evict(self, ids: Sequence[int]) -> None:
        """Cached blocks become free."""
        for page, blocks in self._uncache(ids, "evicted").items():
            free(self._table, page, blocks, blocks.bit_count(), self._table.markers[page])

    def _uncache(self, ids: Sequence[int], verb: str) -> dict[int, int]:
        table = self._table
        pieces = pieces_of_ids(table, ids)
        require(table, pieces, table.cached, "cached", verb)
        for page, blocks in pieces.items():
            table.cached[page] ^= blocks
        self._cache.remove(ids, pieces)
        return pieces

    @property
    def cached_blocks(self) -> int:
        return len(self._cache)

    def victims_for_blocks(self, blocks: int) -> list[int]:
        """Up to `blocks` cached blocks, those of the pages that are worth least: evicting them frees as many on mapped pages."""
        return self._cache.least_worth(blocks)

    def victims_for_pages(self, pages: int) -> list[int]:
        """The cached blocks whose eviction empties `pages` pages, in whole runs, at the least cost per page; fewer if need be."""
        return self._cache.cheapest_runs(pages)

    def cached_overflow(self, max_cached_blocks: int) -> list[int]:
        """The cached blocks to evict so that at most `max_cached_blocks` stay, on few pages; below 0 there is no cap."""
        return self._cache.least_worth(len(self._cache) - max_cached_blocks) if max_cached_blocks >= 0 else []

    # ------------------------------------------------------------------ pages

    def plan_grow(
        self, pages: int, *, max_run_pages: int = 1, allow_partial: bool = True, max_stranded_pages: int | None = None
    ) -> GrowPlan:
        """The lowest unmapped pages, within limit and range, in runs of up to `max_run_pages` (single ones beyond `max_stranded_pages`).

        The plan has no runs when there is nothing to map, or fewer than `pages` and not `allow_partial`.
        """
        return self._planner.plan_grow(pages, max_run_pages, allow_partial, max_stranded_pages)

    def settle_grow(self, plan: GrowPlan, mapped: bool, quarantined: Collection[int] = ()) -> None:
        """What became of a plan: its pages are parked now or unmapped again, except those whose state nobody knows."""
        self._planner.settle_grow(plan, mapped, quarantined)

    def plan_shrink(self, pages: int, *, keep_parked: int = 0, highest_first: bool = True) -> ShrinkPlan:
        """Whole parked runs for `pages` pages; the last may exceed them. `keep_parked` pages stay, and so do pinned ones."""
        return self._planner.plan_shrink(pages, keep_parked, highest_first)

    def settle_shrink(self, plan: ShrinkPlan, released: bool, quarantined: Collection[int] = ()) -> None:
        """What became of a plan: its pages are unmapped now or parked again, except those whose state nobody knows."""
        self._planner.settle_shrink(plan, released, quarantined)

    def pin(self, page: int) -> None:
        """Never unmap this page. Raises `Misuse` for one outside the range."""
        self._require_page(page)
        self._table.pinned.add(page)

    def _require_page(self, page: int) -> None:
        if not 0 <= page < self._table.none:
            raise Misuse(f"page {page} is not a page of this pool (0 to {self._table.none - 1})")

    def quarantine(self, pages: Iterable[int]) -> list[int]:
        """Nobody knows whether these pages are mapped. Owned blocks stay owned and never become free; cached ones are lost and returned."""
        table = self._table
        lost: list[int] = []
        pages = tuple(pages)
        for page in pages:
            self._require_page(page)
            if table.states[page] in (MAPPING, UNMAPPING, VOID):
                raise Misuse(f"page {page} is {PageState(table.states[page]).name}; only the plan that it is in can say what became of it")
        for page in pages:
            blocks = table.cached_on(page)
            if blocks:
                table.cached[page] = 0
                self._cache.remove(blocks, (page,))
            lost += blocks
            if table.states[page] != QUARANTINED:
                table.quarantine(page)
        return lost

    # ------------------------------------------------------------------ limits and sight

    def set_limit(self, limit_pages: int, revision: int) -> LimitChange:
        """Bound what is held, from the next plan on. Nothing that is owned is taken; `overage_pages` go as they become free, and until then
        a take gets no more than would fit within the limit."""
        if revision < self._revision:
            return LimitChange(LimitOutcome.STALE, self._table.limit_pages, self.overage_pages())
        self._revision = revision
        self._table.limit_pages = max(len(self._table.pinned), min(limit_pages, self._table.geometry.pages))
        self._table.bound()
        overage = self.overage_pages()
        outcome = LimitOutcome.DEFERRED if overage else LimitOutcome.APPLIED
        if self._table.limit_pages != limit_pages:
            outcome = LimitOutcome.CLAMPED
        return LimitChange(outcome, self._table.limit_pages, overage)

    def overage_pages(self) -> int:
        """Pages held beyond the limit."""
        return max(0, self._table.held - self._table.limit_pages)

    @property
    def limit_pages(self) -> int:
        return self._table.limit_pages

    @property
    def parked_pages(self) -> int:
        return self._table.parked

    @property
    def retired_pages(self) -> int:
        return self._table.retired

    @property
    def held_pages(self) -> int:
        return self._table.held

    def stranded_pages(self) -> int:
        """Parked pages that cannot be unmapped because their run has other pages in use."""
        return self._table.stranded

    def state_of(self, block: int) -> BlockState:
        """Raises `Misuse` for an id outside the range."""
        return state_of(self._table, block)

    def is_owned(self, block: int) -> bool:
        return self.state_of(block) is BlockState.OWNED

    def is_cached(self, block: int) -> bool:
        return self.state_of(block) is BlockState.CACHED

    def counts(self) -> PoolCounts:
        return count(self._table, len(self._cache))

    def pages(self) -> Iterator[PageReport]:
        """Every page that is held, ascending."""
        return page_reports(self._table)

    def copy_pages(self) -> PageCopy:
        """The same, to be read later."""
        return copy_of(self._table)


__all__ = ["BlockRange", "BlockState", "GrowPlan", "Ledger", "PageReport", "PageState", "Piece", "PoolCounts", "ShrinkPlan"]
