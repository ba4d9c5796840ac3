# SPDX-License-Identifier: Apache-2.0
"""The ledger against a model that is obvious: one state per block, one per page, and no index of any kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcached.core.geometry import BlockGeometry
from kvcached.core.invariants import check
from kvcached.core.ledger import BlockState, GrowPlan, Ledger, PageState, ShrinkPlan
from kvcached.core.limits import LimitOutcome
from kvcached.errors import Misuse

GEOMETRIES = {
    "whole pages, one block each": BlockGeometry(16, 16, 16, 9, 1, 9),
    "four to a page": BlockGeometry(4, 4, 16, 9, 1, 36),
    "the last page is not full": BlockGeometry(4, 4, 16, 9, 1, 34),
    "padded stride": BlockGeometry(3, 4, 16, 9, 2, 36),
    "straddling blocks": BlockGeometry(5, 5, 16, 9, 1, 28),
    "pages without a whole block": BlockGeometry(15, 15, 16, 9, 1, 9),
    "straddling, gaps between": BlockGeometry(3, 5, 16, 9, 1, 20),
    "many blocks": BlockGeometry(1, 1, 70, 4, 1, 280),
}
MAPPED = (PageState.PARKED, PageState.USED, PageState.RETIRED)


@dataclass
class Page:
    blocks: range
    state: PageState
    marker: int = -1
    run: tuple[int, int] = (-1, 0)


class Model:
    def __init__(self, geometry: BlockGeometry) -> None:
        self.pages = [Page(geometry.blocks_of(page), PageState.UNMAPPED) for page in range(geometry.pages)]
        self.page_of = {block: page for page in self.pages for block in page.blocks}
        self.owned: set[int] = set()
        self.cached: dict[int, int] = {}
        self.completed = -1
        self.limit = geometry.pages
        self.revision = 0
        self.pinned: set[int] = set()

    def state_of(self, block: int) -> BlockState:
        if block in self.owned:
            return BlockState.OWNED
        if block in self.cached:
            return BlockState.CACHED
        page = self.page_of.get(block)
        return BlockState.FREE if page is not None and page.state in MAPPED else BlockState.ABSENT

    def free(self) -> set[int]:
        return {block for block, page in self.page_of.items() if page.state in MAPPED} - self.owned - set(self.cached)

    def withheld(self, most_blocks: int) -> int:
        """Free blocks that lie above the limit, on pages of up to `most_blocks`."""
        settled = sum(page.state in (*MAPPED, PageState.QUARANTINED) for page in self.pages)
        return max(0, settled - self.limit) * most_blocks

    def held(self) -> int:
        return sum(page.state is not PageState.UNMAPPED and len(page.blocks) > 0 for page in self.pages)

    def refresh(self) -> None:
        """The states of mapped pages follow from their blocks and markers."""
        for page in self.pages:
            if page.state in MAPPED:
                busy = any(block in self.owned or block in self.cached for block in page.blocks)
                late = page.marker > self.completed
                page.state = PageState.USED if busy else PageState.RETIRED if late else PageState.PARKED

    def settle(self, pages: list[int], mapped: bool, lost: set[int]) -> None:
        for page in pages:
            record = self.pages[page]
            record.state = PageState.QUARANTINED if page in lost else PageState.PARKED if mapped else PageState.UNMAPPED
            if not mapped:
                record.run = (page, 1)
            if record.state is PageState.UNMAPPED:
                record.marker = -1


def ranges_of(blocks: Any) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if ranges and sum(ranges[-1]) == block:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((block, 1))
    return ranges


def blocks_of(ranges: Any) -> list[int]:
    return [block for first, count in ranges for block in range(first, first + count)]


def pages_of(plan: GrowPlan | ShrinkPlan) -> list[int]:
    return blocks_of(plan.runs)


class LedgerMachine(RuleBasedStateMachine):
    ledger: Ledger
    model: Model
    plans: list[GrowPlan | ShrinkPlan]

    @initialize(name=st.sampled_from(sorted(GEOMETRIES)), mapped=st.integers(0, 9))
    def start(self, name: str, mapped: int) -> None:
        self.geometry = GEOMETRIES[name]
        self.ledger = Ledger(self.geometry, limit_pages=self.geometry.pages)
        self.model = Model(self.geometry)
        self.plans = []
        self.marker = self.clock = 0
        if mapped:
            self.grow(mapped, 1, True)
            while self.plans:
                plan = self.plans.pop()
                self.ledger.settle_grow(plan, mapped=True)  # type: ignore[arg-type]
                self.model.settle(pages_of(plan), True, set())

    def subset(self, data: Any, blocks: Any) -> list[int]:
        known = sorted(blocks)
        if data.draw(st.booleans(), label="a stretch"):
            start = data.draw(st.integers(0, len(known) - 1))
            return known[start : start + data.draw(st.integers(1, len(known)))]
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=12, unique=True))

    # ------------------------------------------------------------------ blocks

    @rule(blocks=st.one_of(st.integers(0, 8), st.integers(0, 80)))
    def take(self, blocks: int) -> None:
        free = self.model.free()
        fits = [len(free & set(page.blocks)) for page in self.model.pages if page.state in MAPPED]
        ranges = self.ledger.take(blocks)
        if blocks and blocks + self.model.withheld(self.geometry.max_blocks_per_page) > len(free):
            assert ranges is None
            return
        assert ranges is not None
        ids = blocks_of(ranges)
        assert len(ids) == len(set(ids)) == blocks
        assert set(ids) <= free
        regular = self.geometry.page_bytes % self.geometry.block_stride_bytes == 0
        used = [len(free & set(page.blocks)) for page in self.model.pages if page.state is PageState.USED]
        above = self.model.held() > self.model.limit
        if blocks and regular and any(fit >= blocks for fit in (used if above else fits)):
            assert len({self.model.page_of[block].blocks.start for block in ids}) == 1, "one page could hold the whole"
            tightest = min((fit for fit in used if fit >= blocks), default=None)
            if tightest is not None:
                assert len(free & set(self.model.page_of[ids[0]].blocks)) == tightest, "another page fits better"
        self.model.owned |= set(ids)
        self.model.refresh()

    @precondition(lambda self: self.model.free())
    @rule(data=st.data())
    def take_ids(self, data: Any) -> None:
        ids = self.subset(data, self.model.free())
        stray = sorted(set(self.model.page_of) - self.model.free())
        if stray and data.draw(st.booleans(), label="one is not free"):
            assert not self.ledger.take_ids([*ids, data.draw(st.sampled_from(stray))])
            return
        assert self.ledger.take_ids(ids)
        self.model.owned |= set(ids)
        self.model.refresh()

    def note_given(self, ids: Any, marker: int) -> None:
        for block in ids:
            page = self.model.page_of[block]
            page.marker = max(page.marker, marker)
        self.model.owned -= set(ids)

    @precondition(lambda self: self.model.owned)
    @rule(data=st.data(), back=st.integers(0, 2), as_ranges=st.booleans())
    def give(self, data: Any, back: int, as_ranges: bool) -> None:
        ids = self.subset(data, self.model.owned)
        ranges = ranges_of(ids) if as_ranges else [(block, 1) for block in ids]
        self.ledger.give(ranges, self.marker - back)
        self.note_given(ids, self.marker - back)
        self.model.refresh()

    @precondition(lambda self: self.model.owned)
    @rule(data=st.data())
    def give_wrongly(self, data: Any) -> None:
        ids = self.subset(data, self.model.owned)
        wrong = data.draw(st.integers(-3, self.geometry.num_blocks + 3).filter(lambda block: block not in self.model.owned or block in ids))
        with pytest.raises(Misuse):
            self.ledger.give([*ranges_of(ids), (wrong, 1)], self.marker)
        with pytest.raises(Misuse):
            self.ledger.give_cached([*ids, wrong], self.marker, self.clock)
        with pytest.raises(Misuse):
            self.ledger.give([*ranges_of(ids)[:1], (ids[0], self.geometry.num_blocks + 1)], self.marker)

    @precondition(lambda self: self.model.owned)
    @rule(data=st.data(), cost=st.sampled_from((1, 2, 0.3)))
    def give_cached(self, data: Any, cost: float) -> None:
        ids = self.subset(data, self.model.owned)
        self.clock += 1
        self.ledger.give_cached(ids, self.marker, self.clock, cost)
        self.note_given(ids, self.marker)
        kept = [block for block in ids if self.model.page_of[block].state is not PageState.QUARANTINED]
        self.model.cached.update(dict.fromkeys(kept, self.clock))
        self.model.refresh()

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data())
    def touch(self, data: Any) -> None:
        ids = self.subset(data, self.model.cached)
        with pytest.raises(Misuse):
            self.ledger.touch([*ids, ids[0]])
        self.ledger.touch(ids)
        for block in ids:
            del self.model.cached[block]
        self.model.owned |= set(ids)

    def drop(self, ids: list[int]) -> None:
        self.ledger.evict(ids)
        for block in ids:
            del self.model.cached[block]
        self.model.refresh()

    @precondition(lambda self: self.model.cached)
    @rule(data=st.data())
    def evict(self, data: Any) -> None:
        ids = self.subset(data, self.model.cached)
        uncached = sorted(set(self.model.page_of) - set(self.model.cached))
        if uncached:
            with pytest.raises(Misuse):
                self.ledger.evict([*ids, data.draw(st.sampled_from(uncached))])
        self.drop(ids)

    @rule(blocks=st.integers(0, 20))
    def victims_for_blocks(self, blocks: int) -> None:
        victims = self.ledger.victims_for_blocks(blocks)
        assert len(victims) == len(set(victims)) == min(blocks, len(self.model.cached))
        partly = 0
        for page in self.model.pages:
            cached = sorted(self.model.cached[block] for block in page.blocks if block in self.model.cached)
            chosen = sorted(self.model.cached[block] for block in page.blocks if block in victims)
            assert chosen == cached[: len(chosen)], "the coldest of a page go first"
            partly += 0 < len(chosen) < len(cached)
        assert partly <= 1, "the holes lie together"
        self.drop(victims)

    @rule(pages=st.integers(0, 4))
    def victims_for_pages(self, pages: int) -> None:
        victims = set(self.ledger.victims_for_pages(pages))
        emptied = 0
        for page in self.model.pages:
            cached = {block for block in page.blocks if block in self.model.cached}
            assert victims & cached in (set(), cached), "a page that is chosen loses all"
            emptied += bool(victims & cached)
            if victims & cached:
                run = [self.model.pages[each] for each in range(page.run[0], sum(page.run))]
                blocks = {block for member in run for block in member.blocks}
                assert not blocks & self.model.owned
                assert all(member.state in MAPPED for member in run)
        if pages == 0:
            assert not victims
        self.drop(list(victims))
        assert emptied == sum(bool(victims & set(page.blocks)) and page.state in MAPPED[::2] for page in self.model.pages)

    @rule(cap=st.integers(-1, 20))
    def cap_cached(self, cap: int) -> None:
        victims = self.ledger.cached_overflow(cap)
        assert len(victims) == (max(0, len(self.model.cached) - cap) if cap >= 0 else 0)
        self.drop(victims)

    # ------------------------------------------------------------------ time

    @rule(steps=st.integers(1, 2))
    def schedule(self, steps: int) -> None:
        self.marker += steps

    @rule(behind=st.integers(0, 3))
    def advance(self, behind: int) -> None:
        parked = sum(page.state is PageState.PARKED for page in self.model.pages)
        self.model.completed = max(self.model.completed, self.marker - behind)
        self.model.refresh()
        gained = self.ledger.advance(self.marker - behind)
        assert gained == sum(page.state is PageState.PARKED for page in self.model.pages) - parked

    # ------------------------------------------------------------------ pages

    @rule(pages=st.integers(0, 9), max_run=st.sampled_from((1, 2, 3, 4, 8)), partial=st.booleans(), bound=st.sampled_from((None, 0, 1)))
    def plan_grow(self, pages: int, max_run: int, partial: bool, bound: int | None) -> None:
        self.grow(pages, max_run, partial, bound)

    def grow(self, pages: int, max_run: int, partial: bool, bound: int | None = None) -> None:
        unmapped = [at for at, page in enumerate(self.model.pages) if page.state is PageState.UNMAPPED and page.blocks]
        stranded = self.ledger.stranded_pages()
        plan = self.ledger.plan_grow(pages, max_run_pages=max_run, allow_partial=partial, max_stranded_pages=bound)
        room = max(0, min(self.model.limit - self.model.held(), len(unmapped)))
        expected = min(pages, room) if partial or room >= pages else 0
        assert pages_of(plan) == unmapped[:expected], "the lowest pages"
        for first, count in plan.runs:
            assert count <= max_run
            assert first % count == 0
            assert count == 1 or bound is None or stranded <= bound
            for page in range(first, first + count):
                self.model.pages[page].state = PageState.MAPPING
                self.model.pages[page].run = (first, count)
        if plan.runs:
            self.plans.append(plan)

    @rule(pages=st.integers(0, 9), keep=st.integers(0, 2), highest=st.booleans())
    def plan_shrink(self, pages: int, keep: int, highest: bool) -> None:
        parked = {at for at, page in enumerate(self.model.pages) if page.state is PageState.PARKED}
        runs = {self.model.pages[page].run for page in parked}
        whole = {run for run in runs if set(range(run[0], sum(run))) <= parked and not self.model.pinned & set(range(run[0], sum(run)))}
        plan = self.ledger.plan_shrink(pages, keep_parked=keep, highest_first=highest)
        assert set(plan.runs) <= whole
        assert len(set(plan.runs)) == len(plan.runs)
        assert plan.pages <= max(0, len(parked) - keep)
        if all(count == 1 for _, count in whole):
            assert plan.pages == max(0, min(pages, len(whole), len(parked) - keep))
            expected = sorted(whole, reverse=highest)[: plan.pages]
            assert list(plan.runs) == expected
        elif plan.pages < pages:
            left = whole - set(plan.runs)
            assert all(count > len(parked) - keep - plan.pages for _, count in left), "another run would have helped"
        for page in pages_of(plan):
            self.model.pages[page].state = PageState.UNMAPPING
        if plan.runs:
            self.plans.append(plan)

    @precondition(lambda self: self.plans)
    @rule(data=st.data(), at=st.integers(0, 9), done=st.booleans(), lose=st.booleans())
    def settle(self, data: Any, at: int, done: bool, lose: bool) -> None:
        plan = self.plans.pop(at % len(self.plans))
        pages = pages_of(plan)
        lost = set(data.draw(st.lists(st.sampled_from(pages), max_size=2))) if lose else set()
        if isinstance(plan, GrowPlan):
            self.ledger.settle_grow(plan, mapped=done, quarantined=tuple(lost))
            self.model.settle(pages, done, lost)
        else:
            self.ledger.settle_shrink(plan, released=done, quarantined=tuple(lost))
            self.model.settle(pages, not done, lost)

    @rule(page=st.integers(0, 8), sure=st.integers(0, 3))
    def quarantine(self, page: int, sure: int) -> None:
        if page >= self.geometry.pages or sure:
            return
        record = self.model.pages[page]
        if record.state in (PageState.MAPPING, PageState.UNMAPPING) or not record.blocks:
            if record.blocks:
                with pytest.raises(Misuse):
                    self.ledger.quarantine([page])
            return
        lost = [block for block in record.blocks if block in self.model.cached]
        assert self.ledger.quarantine([page]) == lost
        for block in lost:
            del self.model.cached[block]
        if record.state is PageState.UNMAPPED:
            record.run = (page, 1)
        record.state = PageState.QUARANTINED

    @rule(page=st.integers(0, 3), sure=st.integers(0, 3))
    def pin(self, page: int, sure: int) -> None:
        if not sure and len(self.model.pinned) < 2:
            self.ledger.pin(page)
            self.model.pinned.add(page)

    @rule(pages=st.integers(-1, 12), newer=st.integers(-1, 1))
    def set_limit(self, pages: int, newer: int) -> None:
        change = self.ledger.set_limit(pages, self.model.revision + newer)
        if newer < 0:
            assert change.outcome is LimitOutcome.STALE
        else:
            self.model.revision += newer
            self.model.limit = max(len(self.model.pinned), min(pages, self.geometry.pages))
            over = self.model.held() > self.model.limit
            clamped = self.model.limit != pages
            assert change.outcome is (LimitOutcome.CLAMPED if clamped else LimitOutcome.DEFERRED if over else LimitOutcome.APPLIED)
        assert change.limit_pages == self.model.limit
        assert change.overage_pages == self.ledger.overage_pages() == max(0, self.model.held() - self.model.limit)

    # ------------------------------------------------------------------ always

    @invariant()
    def rules_hold(self) -> None:
        check(self.ledger)

    @invariant()
    def same_as_the_model(self) -> None:
        ledger, model = self.ledger, self.model
        for block in range(self.geometry.num_blocks):
            assert ledger.state_of(block) is model.state_of(block), block
        reports = {report.page: report for report in ledger.pages()}
        held = {at for at, page in enumerate(model.pages) if page.state is not PageState.UNMAPPED}
        assert set(reports) == held
        for at, report in reports.items():
            page = model.pages[at]
            assert (report.state, report.marker, report.pinned) == (page.state, page.marker, at in model.pinned)
            assert (report.run_first, report.run_pages) == page.run
            assert report.owned_blocks == len(model.owned & set(page.blocks))
            assert report.cached_blocks == len(set(model.cached) & set(page.blocks))
            assert report.free_blocks == len(model.free() & set(page.blocks))

    @invariant()
    def same_sums(self) -> None:
        counts, model = self.ledger.counts(), self.model
        states = [page.state for page in model.pages]
        assert counts.free_blocks == len(model.free())
        spare = len(model.free()) - model.withheld(self.geometry.max_blocks_per_page)
        assert self.ledger.available() == max(0, spare)
        assert self.ledger.reachable() == max(0, spare + len(model.cached))
        assert self.ledger.missing(5) == max(0, 5 - spare)
        assert counts.owned_blocks == len(model.owned)
        assert counts.cached_blocks == self.ledger.cached_blocks == len(model.cached)
        assert counts.mapped_pages == sum(state in MAPPED for state in states)
        assert counts.held_pages == self.ledger.held_pages == model.held()
        assert counts.parked_pages == self.ledger.parked_pages == states.count(PageState.PARKED)
        assert counts.retired_pages == self.ledger.retired_pages == states.count(PageState.RETIRED)
        assert counts.used_pages == states.count(PageState.USED)
        assert counts.mapping_pages == states.count(PageState.MAPPING)
        assert counts.unmapping_pages == states.count(PageState.UNMAPPING)
        assert counts.quarantined_pages == states.count(PageState.QUARANTINED)
        assert counts.pinned_pages == len(model.pinned)
        assert counts.limit_pages == self.ledger.limit_pages == model.limit


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
