# SPDX-License-Identifier: Apache-2.0
"""Each reason that a pool can give for a byte that it holds, on a ledger that was brought there."""

from __future__ import annotations

import pytest

from kvcached.core.geometry import BlockGeometry
from kvcached.core.ledger import Ledger
from kvcached.ranks.api import MapperStatus
from kvcached.runtime import explain as reasons
from kvcached.runtime.explain import explain

BLOCK = 1 << 19
PAGE = 4 * BLOCK
GEOMETRY = BlockGeometry(BLOCK, BLOCK, PAGE, 16, 1, 64)


class World:
    """Eight pages of four blocks are mapped."""

    def __init__(self) -> None:
        self.ledger = Ledger(GEOMETRY, limit_pages=16)
        self.ledger.settle_grow(self.ledger.plan_grow(8), mapped=True)

    def take(self, blocks: int) -> list[int]:
        ranges = self.ledger.take(blocks)
        assert ranges is not None
        return [block for first, count in ranges for block in range(first, first + count)]

    def give(self, ids: list[int], step: int = 0) -> None:
        self.ledger.give([(block, 1) for block in ids], step)

    def rows(self, quarantined_bytes: int = 0, handle_bytes: int = 0, rounding_bytes: int = 0) -> dict[str, tuple[int, str]]:
        """Blocks and pages by reason. The sum is what the mapper holds; whatever is said is read from a copy of the pages."""
        counts, pages = self.ledger.counts(), self.ledger.copy_pages()
        held = counts.held_pages * PAGE + handle_bytes + rounding_bytes
        mapper = MapperStatus(held, counts.mapped_pages * PAGE, handle_bytes, quarantined_bytes, held)
        self.take(min(1, self.ledger.available()))  # the pool goes on meanwhile
        rows = explain(GEOMETRY, counts, list(pages.reports()), mapper).rows
        assert sum(row.size_bytes for row in rows) == held
        assert all(row.freed_by and row.reason in reasons.REASONS for row in rows)
        return {row.reason: (row.size_bytes // BLOCK, row.detail) for row in rows}


def test_owned_cached_and_the_holes_beside_them() -> None:
    world = World()
    ids = world.take(32)
    world.ledger.give_cached(ids[4:6], 0, 1)
    world.give([*ids[1:4], *ids[6:8], *ids[9:12], *ids[13:15]])
    world.ledger.advance(0)
    assert world.rows() == {
        reasons.OWNED: (20, ""),
        reasons.CACHED: (2, ""),
        reasons.SHARED: (10, "page 0 (1 owned of 4 blocks), page 2 (1 owned of 4 blocks), page 1 (2 cached of 4 blocks) and 1 more"),
    }


def test_a_hole_beside_the_block_that_always_stays_says_so() -> None:
    world = World()
    world.ledger.pin(0)
    block = world.take(1)
    assert world.rows()[reasons.SHARED] == (3, f"page {block[0] // 4} (1 owned of 4 blocks, always mapped)")


def test_empty_pages_are_kept_ready() -> None:
    assert World().rows() == {reasons.IDLE: (32, "")}


def test_empty_pages_behind_steps_are_told_with_the_steps() -> None:
    world = World()
    ids = world.take(32)
    for step, first, last in ((7, 0, 3), (9, 4, 4), (3, 5, 5), (11, 7, 7)):
        world.give(ids[4 * first : 4 * last + 4], step)
    rows = world.rows()
    assert rows[reasons.RETIRED] == (28, "page 5 behind step 3, pages 0-3 behind step 7, page 4 behind step 9 and 1 more")
    world.ledger.advance(9)
    assert world.rows()[reasons.RETIRED] == (4, "page 7 behind step 11")


@pytest.mark.parametrize("grows", [True, False])
def test_pages_on_their_way_in_or_out(grows: bool) -> None:
    world = World()
    if grows:
        world.ledger.plan_grow(2)
        assert world.rows()[reasons.MOVING] == (8, "pages 8-9")
    else:
        kept = world.take(4)[0] // 4
        plan = world.ledger.plan_shrink(7)
        assert sum(count for _, count in plan.runs) == 7
        assert world.rows()[reasons.MOVING] == (28, f"pages {0 if kept else 1}-{6 if kept else 7}")


def test_pages_that_the_driver_lost() -> None:
    world = World()
    plan = world.ledger.plan_grow(3)
    world.ledger.settle_grow(plan, mapped=False, quarantined=(8, 10))
    assert world.rows(quarantined_bytes=2 * PAGE)[reasons.LOST] == (8, "page 8, page 10")


def test_what_is_no_page_of_the_pool() -> None:
    rows = World().rows(handle_bytes=PAGE, rounding_bytes=BLOCK)
    assert (rows[reasons.HANDLES], rows[reasons.ROUNDING]) == ((4, ""), (1, ""))
