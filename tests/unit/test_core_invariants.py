# SPDX-License-Identifier: Apache-2.0
"""Each rule of the ledger notices its own breach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.invariants import check
from kvcached.core.ledger import Ledger
from kvcached.core.states import MAPPING, PARKED, RETIRED, UNMAPPED, USED
from kvcached.errors import InvariantBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.core.pages import PageTable


def busy() -> Ledger:
    """Pages 0 and 1: used; 2: retired; 3: parked; 4 to 7: one run, partly used; 8: being mapped; 9: unmapped."""
    ledger = Ledger(BlockGeometry(1, 1, 4, 10, 1, 40), limit_pages=10)
    ledger.settle_grow(ledger.plan_grow(4), mapped=True)
    ledger.settle_grow(ledger.plan_grow(4, max_run_pages=4), mapped=True)
    ledger.take(32)
    ledger.give_cached([0, 1], 1, last_use=5, cost=2)
    ledger.give([(2, 1), (5, 2), (12, 4), (16, 8)], -1)
    ledger.give([(8, 4)], 9)
    ledger.take(1)
    ledger.give([(2, 1)], -1)
    assert ledger.take_ids([2])
    ledger.take(2)
    ledger.give([(5, 1)], -1)
    ledger.give([(2, 1)], -1)
    plan = ledger.plan_grow(2)
    ledger.settle_grow(plan, mapped=False)
    ledger.plan_grow(1)
    return ledger


def test_a_busy_ledger_keeps_all_rules() -> None:
    check(busy())


def put(name: str, at: int, value: int) -> Callable[[Ledger], None]:
    def breach(ledger: Ledger) -> None:
        getattr(ledger._table, name)[at] = value

    return breach


def add(name: str, amount: int = 1) -> Callable[[Ledger], None]:
    def breach(ledger: Ledger) -> None:
        setattr(ledger._table, name, getattr(ledger._table, name) + amount)

    return breach


def on_table(change: Callable[[PageTable], object]) -> Callable[[Ledger], None]:
    def breach(ledger: Ledger) -> None:
        change(ledger._table)

    return breach


def lose_retirement(ledger: Ledger) -> None:
    ledger._table.retirement.pop_through(99)


def lose_index(table: PageTable) -> None:
    table.open_page = table.none
    table.indexed = [0] * len(table.indexed)
    table.buckets = [[] for _ in table.buckets]
    table.nonempty = 0


def unsorted_bucket(table: PageTable) -> None:
    for page in (3, 2):
        table.indexed[page] |= 1 << 3
    table.buckets[3] = [3, 2]
    table.nonempty |= 1 << 3


def lose_planned_page(table: PageTable) -> None:
    table.quarantine(8)


def wrong_record(ledger: Ledger) -> None:
    ledger._cache.blocks[0], ledger._cache.blocks[1] = ledger._cache.blocks[1], ledger._cache.blocks[0]


BREACHES: dict[str, tuple[Callable[[Ledger], None], str]] = {
    "two states": (put("cached", 0, 0b1111), "two states at once"),
    "count": (put("counts", 3, 3), "counts 3 free blocks but has 4"),
    "lost block": (put("owned", 1, 0), "has lost a block"),
    "geometry": (put("starts", 3, 11), "differs from the geometry"),
    "state": (put("states", 3, USED), "does not fit what it holds"),
    "unmapped but free": (put("states", 3, UNMAPPED), "is not mapped"),
    "unmapped but owned": (put("owned", 9, 1), "has owned blocks but is not mapped"),
    "parked early": (put("states", 2, PARKED), "parked though marker 9 is not complete"),
    "retired late": (put("states", 3, RETIRED), "retired though marker -1 is complete"),
    "retired for ever": (lose_retirement, "nothing will look at it again"),
    "search start": (put("lows", PARKED, 4), "from which the search for its state starts"),
    "available": (add("available"), "free blocks are kept"),
    "mapped blocks": (add("mapped_blocks"), "mapped blocks are kept"),
    "lost owned": (add("lost_owned_blocks"), "owned blocks on quarantined pages are kept"),
    "held": (add("held"), "held pages are kept"),
    "mapping": (add("mapping"), "pages being mapped are kept"),
    "parked": (add("parked"), "parked pages are kept"),
    "retired": (add("retired"), "retired pages are kept"),
    "unmapping": (add("unmapping"), "pages being unmapped are kept"),
    "quarantined": (add("lost"), "quarantined pages are kept"),
    "largest marker": (add("largest_marker", -5), "above the largest one"),
    "limit": (on_table(lambda table: setattr(table, "limit_pages", 11)), "outside the range"),
    "above the limit": (add("withheld"), "blocks are withheld"),
    "run": (put("run_first", 3, 9), "outside its run"),
    "run length": (put("run_count", 3, 2), "has 2 pages but 1 are held"),
    "run parked": (on_table(lambda table: table.run_parked.update({4: 4})), "miscounts its parked pages"),
    "stranded": (add("stranded"), "stranded pages are kept"),
    "run table": (on_table(lambda table: table.run_parked.update({0: 1})), "not those that are held"),
    "no page": (put("frees", 10, 1), "a block is on no page"),
    "bucket mark": (on_table(lambda table: setattr(table, "nonempty", table.nonempty ^ 0b1000)), "the mark of bucket 3"),
    "double entry": (on_table(lambda table: table.buckets[2].extend(table.buckets[2] or [1, 1])), "bucket 2"),
    "unmarked entry": (on_table(lambda table: setattr(table, "indexed", [0] * 11)), "is not marked"),
    "no heap": (on_table(unsorted_bucket), "is not a heap"),
    "marked nowhere": (put("indexed", 3, 1), "in no bucket"),
    "not found": (on_table(lose_index), "no take would find it"),
    "plan": (lambda ledger: ledger._planner._open.clear(), "a plan that is not open"),
    "plan state": (on_table(lose_planned_page), "not in the state of plan"),
    "record": (wrong_record, "is of block"),
    "later use": (lambda ledger: ledger._cache.blocks.update({0: (9, 2, 1, 0, 0)}), "after the latest use"),
    "records": (lambda ledger: ledger._cache.blocks.pop(0) and None, "not the blocks that are cached"),
    "cost": (lambda ledger: ledger._cache.costs.update({0: 3}), "wrong cost"),
    "arrival": (lambda ledger: ledger._cache.arrivals.update({0: 99}), "wrong arrival"),
    "worth": (lambda ledger: ledger._cache.worths.update({0: (-1, 9, 0)}), "worth less than nothing"),
    "page sums": (lambda ledger: ledger._cache.arrivals.update({3: 0}), "sums of cached blocks that it does not have"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BREACHES))
def test_a_breach_is_noticed(name: str) -> None:
    breach, sentence = BREACHES[name]
    ledger = busy()
    breach(ledger)
    with pytest.raises(InvariantBroken, match=sentence):
        check(ledger)


def test_the_states_of_the_busy_ledger_are_those_it_names() -> None:
    states = busy()._table.states
    assert (states[2], states[3], states[8], states[9]) == (RETIRED, PARKED, MAPPING, UNMAPPED)
