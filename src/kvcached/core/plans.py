# SPDX-License-Identifier: Apache-2.0
"""Plans to map and to unmap runs of pages: made under the pool's lock, performed without it, settled under it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.core.states import PARKED, ROWS, UNMAPPED
from kvcached.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from kvcached.core.pages import PageTable

PageRun = tuple[int, int]
"""(first page, pages)."""


@dataclass(frozen=True, slots=True)
class GrowPlan:
    """Runs to map. Without runs (`id` 0) there is nothing to perform, and settling it does nothing."""

    id: int
    runs: tuple[PageRun, ...]

    @property
    def pages(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """Runs to unmap, each a whole run. Without runs (`id` 0) there is nothing to perform, and settling it does nothing."""

    id: int
    runs: tuple[PageRun, ...]

    @property
    def pages(self) -> int:
        return sum(count for _, count in self.runs)


class Planner:
    """Makes and settles plans over a page table, whose limit bounds what is held, pages in plans included."""

    __slots__ = ("_last_id", "_open", "_table")

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._open: dict[int, GrowPlan | ShrinkPlan] = {}
        self._last_id = 0

    @property
    def open_plans(self) -> tuple[GrowPlan | ShrinkPlan, ...]:
        """Plans that are not settled."""
        return tuple(self._open.values())

    # ------------------------------------------------------------------ growing

    def plan_grow(self, pages: int, max_run_pages: int, allow_partial: bool, max_stranded_pages: int | None) -> GrowPlan:
        table = self._table
        wanted = min(pages, table.limit_pages - table.held)
        if wanted <= 0 or (wanted < pages and not allow_partial):
            return GrowPlan(0, ())
        if max_stranded_pages is not None and table.stranded > max_stranded_pages:
            max_run_pages = 1
        runs = tuple(self._pick_unmapped(wanted, max_run_pages))
        planned = sum(count for _, count in runs)
        if not runs or (planned < pages and not allow_partial):
            for run in runs:
                self._unplan(*run)
            return GrowPlan(0, ())
        plan = GrowPlan(self._next_id(), runs)
        self._open[plan.id] = plan
        return plan

    def _pick_unmapped(self, wanted: int, max_run_pages: int) -> Iterator[PageRun]:
        """Lowest pages first. Runs are powers of two at a multiple of their size: few handle classes, and gaps fit again later."""
        table = self._table
        while wanted > 0 and (page := table.states.find(UNMAPPED, table.lows[UNMAPPED])) >= 0:
            table.lows[UNMAPPED] = page
            if not self._all_unmapped(page, 1):
                continue
            size = 1 << (max(1, min(wanted, max_run_pages)).bit_length() - 1)
            while page % size or not self._all_unmapped(page, size):
                size >>= 1
            table.begin_map(page, size)
            wanted -= size
            yield page, size

    def _all_unmapped(self, first: int, pages: int) -> bool:
        table = self._table
        free = table.states[first : first + pages] == ROWS[UNMAPPED] * pages
        return free and (table.bpp > 0 or all([table.learn(page) for page in range(first, first + pages)]))

    def _unplan(self, first: int, pages: int) -> None:
        self._table.finish_unmapped(first, pages)
        self._table.forget_run(first)

    def settle_grow(self, plan: GrowPlan, mapped: bool, quarantined: Collection[int]) -> None:
        if plan.runs:
            self._close(plan, quarantined)
        for first, pages in plan.runs:
            self._settle(first, pages, mapped, quarantined)

    # ------------------------------------------------------------------ shrinking

    def plan_shrink(self, pages: int, keep_parked: int, highest_first: bool) -> ShrinkPlan:
        """Runs that fit first; when they are too few one larger run fills the rest, so that any demand can be met."""
        wanted = min(pages, self._table.parked - keep_parked)
        runs: list[PageRun] = []
        spare: PageRun | None = None
        for run in self._parked_runs(highest_first):
            if wanted <= 0:
                break
            if run[1] <= wanted:
                runs.append(run)
                wanted -= run[1]
            elif spare is None or run[1] < spare[1]:
                spare = run
        short = pages - sum(count for _, count in runs)
        if spare and short > 0 and self._table.parked - keep_parked >= pages - short + spare[1]:
            runs.append(spare)
        if not runs:
            return ShrinkPlan(0, ())
        for run in runs:
            self._table.begin_unmap(*run)
        plan = ShrinkPlan(self._next_id(), tuple(runs))
        self._open[plan.id] = plan
        return plan

    def _parked_runs(self, highest_first: bool) -> Iterator[PageRun]:
        """Whole runs that are parked and not pinned."""
        table = self._table
        page = table.none if highest_first else -1
        while True:
            page = table.states.rfind(PARKED, 0, page) if highest_first else table.states.find(PARKED, page + 1)
            if page < 0:
                return
            first = table.run_first[page]
            count = table.run_count[first]
            if table.run_parked.get(first, count) == count and table.pinned.isdisjoint(range(first, first + count)):
                yield first, count
            page = first if highest_first else first + count - 1

    def settle_shrink(self, plan: ShrinkPlan, released: bool, quarantined: Collection[int]) -> None:
        if plan.runs:
            self._close(plan, quarantined)
        for first, pages in plan.runs:
            self._settle(first, pages, not released, quarantined)

    # ------------------------------------------------------------------ both

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _close(self, plan: GrowPlan | ShrinkPlan, quarantined: Collection[int]) -> None:
        if self._open.get(plan.id) is not plan:
            raise InvariantBroken(f"plan {plan.id} is not open: it was settled before or is of another ledger")
        stray = [page for page in quarantined if not any(first <= page < first + count for first, count in plan.runs)]
        if stray:
            raise InvariantBroken(f"pages {stray} are not in plan {plan.id} and cannot be quarantined with it")
        del self._open[plan.id]

    def _settle(self, first: int, pages: int, mapped: bool, quarantined: Collection[int]) -> None:
        table = self._table
        finish = table.finish_mapped if mapped else table.finish_unmapped
        lost = [page for page in range(first, first + pages) if page in quarantined]
        start = first
        for page in (*lost, first + pages):
            if page > start:
                finish(start, page - start)
            start = page + 1
        for page in lost:
            table.quarantine(page)
        if not mapped:
            table.forget_run(first)
            for page in lost:
                table.make_single(page)
