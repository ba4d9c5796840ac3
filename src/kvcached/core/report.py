# SPDX-License-Identifier: Apache-2.0
"""What a ledger shows of itself: sums for tables and metrics, one record per page to explain each byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.core.states import UNMAPPED, VOID, PageState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcached.core.pages import PageTable


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Pages by state and blocks by state. `mapped_pages` are parked, used or retired ones; `held_pages` must be covered by a lease."""

    limit_pages: int
    held_pages: int
    mapped_pages: int
    mapping_pages: int
    parked_pages: int
    used_pages: int
    retired_pages: int
    unmapping_pages: int
    quarantined_pages: int
    pinned_pages: int
    stranded_pages: int
    owned_blocks: int
    cached_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class PageReport:
    """One page that is held. `marker` is -1 when no give has named one."""

    page: int
    state: PageState
    owned_blocks: int
    cached_blocks: int
    free_blocks: int
    marker: int
    run_first: int
    run_pages: int
    pinned: bool


def count(table: PageTable, cached_blocks: int) -> PoolCounts:
    mapped = table.held - table.mapping - table.unmapping - table.lost
    return PoolCounts(
        limit_pages=table.limit_pages,
        held_pages=table.held,
        mapped_pages=mapped,
        mapping_pages=table.mapping,
        parked_pages=table.parked,
        used_pages=mapped - table.parked - table.retired,
        retired_pages=table.retired,
        unmapping_pages=table.unmapping,
        quarantined_pages=table.lost,
        pinned_pages=len(table.pinned),
        stranded_pages=table.stranded,
        owned_blocks=table.mapped_blocks - table.available - cached_blocks + table.lost_owned_blocks,
        cached_blocks=cached_blocks,
        free_blocks=table.available,
    )


@dataclass(frozen=True, slots=True)
class PageCopy:
    """What a page table says of each page, at one moment; reports of it are made when the table is in use again."""

    states: bytes
    owned: list[int]
    cached: list[int]
    counts: list[int]
    markers: list[int]
    run_first: list[int]
    run_count: list[int]
    pinned: frozenset[int]

    def reports(self) -> Iterator[PageReport]:
        """Every page that is held, ascending."""
        return page_reports(self)


def copy_of(table: PageTable) -> PageCopy:
    """Cheap: flat copies."""
    return PageCopy(
        states=bytes(table.states),
        owned=table.owned.copy(),
        cached=table.cached.copy(),
        counts=table.counts.copy(),
        markers=table.markers.copy(),
        run_first=table.run_first.copy(),
        run_count=table.run_count.copy(),
        pinned=frozenset(table.pinned),
    )


def page_reports(table: PageTable | PageCopy) -> Iterator[PageReport]:
    """Every page that is held, ascending."""
    for page in range(len(table.states) - 1):  # the last entry stands for no page
        state = table.states[page]
        if state in (UNMAPPED, VOID):
            continue
        run = table.run_first[page]
        yield PageReport(
            page=page,
            state=PageState(state),
            owned_blocks=table.owned[page].bit_count(),
            cached_blocks=table.cached[page].bit_count(),
            free_blocks=table.counts[page],
            marker=table.markers[page],
            run_first=run,
            run_pages=table.run_count[run],
            pinned=page in table.pinned,
        )
