# SPDX-License-Identifier: Apache-2.0
"""A reason for every byte that a pool holds, which pages they are, and what would free them. Pure."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final, TypeVar

from kvcached.core.states import PageState
from kvcached.runtime.control import ExplainRow, Explanation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvcached.core.geometry import BlockGeometry
    from kvcached.core.report import PageReport, PoolCounts
    from kvcached.ranks.api import MapperStatus

OWNED: Final = "owned by running requests"
CACHED: Final = "cached prefixes"
SHARED: Final = "free blocks beside owned or cached ones on the same page"
IDLE: Final = "parked: mapped and empty, kept ready"
RETIRED: Final = "retired: empty, behind work in flight"
MOVING: Final = "being mapped or unmapped now"
LOST: Final = "quarantined: the driver left its state unknown"
HANDLES: Final = "handles kept for the next map"
ROUNDING: Final = "zero page and rounding"
REASONS: Final = (OWNED, CACHED, SHARED, IDLE, RETIRED, MOVING, LOST, HANDLES, ROUNDING)
_MOST_NAMED: Final = 3
_T = TypeVar("_T")


def explain(geometry: BlockGeometry, counts: PoolCounts, pages: Sequence[PageReport], mapper: MapperStatus) -> Explanation:
    """Rows whose sizes add up to what the mapper holds. `counts` and `pages` are of one moment."""
    step, block_bytes = geometry.release_step_bytes, geometry.planes * geometry.block_stride_bytes
    owned_bytes, cached_bytes = counts.owned_blocks * block_bytes, counts.cached_blocks * block_bytes
    shared_bytes = counts.used_pages * step - owned_bytes - cached_bytes
    moving_bytes = (counts.mapping_pages + counts.unmapping_pages) * step

    def of(*states: PageState) -> list[PageReport]:
        return [page for page in pages if page.state in states]

    shared, behind = _shared(of(PageState.USED)), _behind(of(PageState.RETIRED))
    moving, lost = _named(of(PageState.MAPPING, PageState.UNMAPPING)), _named(of(PageState.QUARANTINED))
    rows = [
        _row(OWNED, owned_bytes, "the requests end, or the engine preempts them"),
        _row(CACHED, cached_bytes, "kvctl evict, a lower limit, or KVCACHED_MAX_CACHED_TOKENS"),
        _row(SHARED, shared_bytes, "the neighbours' end or eviction", shared),
        _row(IDLE, counts.parked_pages * step, "kvctl trim; by itself when the engine idles"),
        _row(RETIRED, counts.retired_pages * step, "the step that may still read it ends", behind),
        _row(MOVING, moving_bytes, "the mapper answers", moving),
        _row(LOST, mapper.quarantined_bytes, "restart the engine", lost),
        _row(HANDLES, mapper.cached_handle_bytes, "kvctl trim"),
    ]
    rest_bytes = mapper.held_bytes - sum(row.size_bytes for row in rows)
    rows.append(_row(ROUNDING, rest_bytes, "KVCACHED_ZERO_BACKING=never"))
    return Explanation(rows=tuple(row for row in rows if row.size_bytes > 0))


def _row(reason: str, size_bytes: int, freed_by: str, detail: str = "") -> ExplainRow:
    return ExplainRow(reason=reason, size_bytes=size_bytes, freed_by=freed_by, detail=detail)


def _shared(pages: list[PageReport]) -> str:
    """The emptiest first: what stands on them keeps the most."""
    holed = [page for page in pages if page.free_blocks]
    holed.sort(key=lambda page: (page.owned_blocks + page.cached_blocks) / _blocks_of(page))
    return _some(holed, _occupancy)


def _occupancy(page: PageReport) -> str:
    kinds = [(page.owned_blocks, "owned"), (page.cached_blocks, "cached")]
    stands = " and ".join(f"{blocks} {kind}" for blocks, kind in kinds if blocks)
    pinned = ", always mapped" if page.pinned else ""
    return f"page {page.page} ({stands} of {_blocks_of(page)} blocks{pinned})"


def _blocks_of(page: PageReport) -> int:
    return page.owned_blocks + page.cached_blocks + page.free_blocks


def _behind(pages: list[PageReport]) -> str:
    by_step = groupby(sorted(pages, key=lambda page: page.marker), key=lambda page: page.marker)
    return _some([(step, list(group)) for step, group in by_step], lambda item: f"{_named(item[1])} behind step {item[0]}")


def _named(pages: Iterable[PageReport]) -> str:
    """Neighbours as one stretch."""
    stretches = [[page.page for _, page in group] for _, group in groupby(enumerate(pages), key=lambda item: item[1].page - item[0])]
    return _some(stretches, lambda pages: f"page {pages[0]}" if len(pages) == 1 else f"pages {pages[0]}-{pages[-1]}")


def _some(items: Sequence[_T], text: Callable[[_T], str]) -> str:
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(map(text, items[:_MOST_NAMED])) + more
