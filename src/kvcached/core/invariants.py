# SPDX-License-Identifier: Apache-2.0
"""The ledger's rules as code: a full recount against every sum and index that the hot path keeps."""

from __future__ import annotations

from collections import Counter
from math import isclose
from typing import TYPE_CHECKING

from kvcached.core.plans import GrowPlan
from kvcached.core.states import MAPPING, PARKED, QUARANTINED, RETIRED, UNMAPPED, UNMAPPING, USED, VOID, PageState
from kvcached.errors import InvariantBroken

if TYPE_CHECKING:
    from kvcached.core.ledger import Ledger
    from kvcached.core.pages import PageTable
    from kvcached.core.plans import Planner
    from kvcached.core.victims import CacheIndex

EMPTY_STATES = (PARKED, RETIRED)
MAPPED_STATES = (PARKED, USED, RETIRED)


def check(ledger: Ledger) -> None:
    """Raises `InvariantBroken` with a sentence for the first rule that does not hold. Reads every page: for tests and diagnosis."""
    table, planner, cache = ledger._table, ledger._planner, ledger._cache
    for page in range(table.none):
        _check_page(table, page)
    _check_sums(table, planner)
    _check_runs(table)
    _check_index(table)
    _check_plans(table, planner)
    _check_cache(table, cache)


def _demand(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvariantBroken(sentence)


def _check_page(table: PageTable, page: int) -> None:
    state, owned, cached, free = table.states[page], table.owned[page], table.cached[page], table.frees[page]
    name = f"page {page} ({PageState(state).name})"
    _demand(owned & cached == 0 and owned & free == 0 and cached & free == 0, f"{name} has a block in two states at once")
    _demand(table.counts[page] == free.bit_count(), f"{name} counts {table.counts[page]} free blocks but has {free.bit_count()}")
    if state in MAPPED_STATES:
        blocks = table.geometry.blocks_of(page)
        full = (1 << len(blocks)) - 1
        _demand(owned | cached | free == full, f"{name} has lost a block")
        _demand((table.starts[page], table.caps[page]) == (blocks.start, len(blocks)), f"{name} differs from the geometry")
        _demand((state in EMPTY_STATES) == (free == full), f"{name} does not fit what it holds")
    else:
        _demand(free == 0 and cached == 0, f"{name} has free or cached blocks but is not mapped")
        _demand(owned == 0 or state == QUARANTINED, f"{name} has owned blocks but is not mapped")
    if state == PARKED:
        _demand(table.markers[page] <= table.completed, f"{name} is parked though marker {table.markers[page]} is not complete")
    if state == RETIRED:
        _demand(table.markers[page] > table.completed, f"{name} is retired though marker {table.markers[page]} is complete")
        due = [first for marker, first, pages in table.retirement if marker == table.markers[page] and first <= page < first + pages]
        _demand(bool(due), f"{name} is retired but nothing will look at it again")
    if state < VOID:
        _demand(table.lows[state] <= page, f"{name} is below page {table.lows[state]}, from which the search for its state starts")


def _check_sums(table: PageTable, planner: Planner) -> None:
    states = Counter(table.states[: table.none])
    pages = range(table.none)
    mapped = [page for page in pages if table.states[page] in MAPPED_STATES]
    lost = [page for page in pages if table.states[page] == QUARANTINED]
    sums = {
        "free blocks": (table.available, sum(table.counts)),
        "mapped blocks": (table.mapped_blocks, sum(table.caps[page] for page in mapped)),
        "owned blocks on quarantined pages": (table.lost_owned_blocks, sum(table.owned[page].bit_count() for page in lost)),
        "held pages": (table.held, len(pages) - states[UNMAPPED] - states[VOID]),
        "pages being mapped": (table.mapping, states[MAPPING]),
        "parked pages": (table.parked, states[PARKED]),
        "retired pages": (table.retired, states[RETIRED]),
        "pages being unmapped": (table.unmapping, states[UNMAPPING]),
        "quarantined pages": (table.lost, states[QUARANTINED]),
    }
    for what, (kept, counted) in sums.items():
        _demand(kept == counted, f"{kept} {what} are kept but {counted} are there")
    _demand(table.largest_marker >= max(table.markers), "a page's marker is above the largest one")
    _demand(0 <= table.limit_pages <= table.none, f"the limit of {table.limit_pages} pages is outside the range")
    over = len(mapped) + len(lost) - table.limit_pages
    withheld = max(0, over) * table.page_limit
    _demand(table.withheld == withheld, f"{table.withheld} blocks are withheld, {withheld} lie above the limit")


def _check_runs(table: PageTable) -> None:
    stranded = 0
    members: Counter[int] = Counter()
    parked: Counter[int] = Counter()
    for page in range(table.none):
        if table.states[page] in (UNMAPPED, VOID):
            continue
        first = table.run_first[page]
        _demand(first <= page < first + table.run_count[first], f"page {page} is outside its run, which starts at {first}")
        members[first] += 1
        parked[first] += table.states[page] == PARKED
    for first, pages in members.items():
        _demand(pages == table.run_count[first], f"the run at page {first} has {table.run_count[first]} pages but {pages} are held")
        if pages > 1:
            _demand(table.run_parked.get(first) == parked[first], f"the run at page {first} miscounts its parked pages")
            stranded += parked[first] % pages
    _demand(table.stranded == stranded, f"{table.stranded} stranded pages are kept but {stranded} are there")
    several = {first for first, pages in members.items() if pages > 1}
    _demand(set(table.run_parked) == several, "the runs of several pages are not those that are held")


def _check_index(table: PageTable) -> None:
    none = table.none
    _demand(table.counts[none] == table.frees[none] == table.owned[none] == table.cached[none] == 0, "a block is on no page")
    for count, heap in enumerate(table.buckets):
        _demand(bool(heap) == bool(table.nonempty >> count & 1), f"the mark of bucket {count} is wrong")
        _demand(len(set(heap)) == len(heap), f"a page is twice in bucket {count}")
        _demand(all(table.indexed[page] >> count & 1 for page in heap), f"an entry of bucket {count} is not marked")
        _demand(all(heap[(i - 1) // 2] <= page for i, page in enumerate(heap) if i), f"bucket {count} is not a heap")
    _demand(sum(map(int.bit_count, table.indexed)) == sum(map(len, table.buckets)), "a marked entry is in no bucket")
    for page in range(none):
        if table.states[page] == USED and page != table.open_page and table.counts[page]:
            _demand(bool(table.indexed[page] >> table.counts[page] & 1), f"page {page} has room but no take would find it")


def _check_plans(table: PageTable, planner: Planner) -> None:
    planned: Counter[int] = Counter()
    for plan in planner.open_plans:
        wanted = MAPPING if isinstance(plan, GrowPlan) else UNMAPPING
        for first, pages in plan.runs:
            planned[wanted] += pages
            states = table.states[first : first + pages]
            _demand(states == bytes((wanted,)) * pages, f"pages {first} to {first + pages - 1} are not in the state of plan {plan.id}")
    in_plans = (table.mapping, table.unmapping)
    _demand((planned[MAPPING], planned[UNMAPPING]) == in_plans, "a page waits for a plan that is not open")


def _check_cache(table: PageTable, cache: CacheIndex) -> None:
    blocks: dict[int, int] = {}
    costs: dict[int, float] = {}
    arrivals: dict[int, float] = {}
    for block, (last_use, cost, _, named, turnover) in cache.blocks.items():
        page = table.page_of(block)
        blocks[page] = blocks.get(page, 0) | 1 << (block - table.starts[page])
        costs[page] = costs.get(page, 0) + cost
        arrivals[page] = arrivals.get(page, 0) + cost * turnover
        _demand(block == named, f"the record of block {block} is of block {named}")
        _demand(last_use <= cache.worths[page][1], f"block {block} was used after the latest use on its page")
    there = {page: cached for page, cached in enumerate(table.cached) if cached}
    _demand(blocks == there, "the records of cached blocks are not the blocks that are cached")
    kept = set(cache.worths) == set(cache.costs) == set(cache.arrivals) == set(costs)
    _demand(kept, "a page keeps sums of cached blocks that it does not have")
    for page, cost in costs.items():
        _demand(isclose(cost, cache.costs[page], abs_tol=1e-6), f"page {page} keeps a wrong cost of its cached blocks")
        _demand(isclose(arrivals[page], cache.arrivals[page], abs_tol=1e-6), f"page {page} keeps a wrong arrival of its cached blocks")
        _demand(cache.worths[page][0] >= arrivals[page] / cost - 1e-6, f"page {page} is worth less than nothing")
