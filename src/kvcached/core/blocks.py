# SPDX-License-Identifier: Apache-2.0
"""Blocks as sets on pages: from ids and ranges to (page, set of blocks), and from owned to free."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from kvcached.core.pages import QUARANTINED, USED, PageTable
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BlockRange = tuple[int, int]
"""(first block, blocks)."""

Piece = tuple[int, int, int]
"""(first page, set of blocks, pages): the same blocks on each of some adjacent pages."""


class BlockState(Enum):
    """What a block is to its engine."""

    ABSENT = "absent"  # its page is not mapped, or it straddles two pages
    FREE = "free"
    OWNED = "owned"
    CACHED = "cached"


def state_of(table: PageTable, block: int) -> BlockState:
    """Raises `Misuse` for an id outside the range."""
    _require_id(table, block)
    page = table.page_of(block)
    if page < 0:
        return BlockState.ABSENT
    bit = 1 << (block - table.starts[page])
    if table.owned[page] & bit:
        return BlockState.OWNED
    if table.cached[page] & bit:
        return BlockState.CACHED
    return BlockState.FREE if table.frees[page] & bit else BlockState.ABSENT


def pieces_of_ids(table: PageTable, ids: Sequence[int]) -> dict[int, int]:
    """Page -> set of its blocks. Raises `Misuse` for an id that is named twice or that no page holds."""
    starts, pieces = table.starts, dict[int, int]()
    for block in ids:
        _require_id(table, block)
        page = table.page_of(block)
        if page < 0:
            raise Misuse(f"block {block} straddles two pages; it is never handed out")
        bit = 1 << (block - starts[page])
        known = pieces.get(page, 0)
        if known & bit:
            raise Misuse(f"block {block} is named twice")
        pieces[page] = known | bit
    return pieces


def require(table: PageTable, pieces: dict[int, int], sets: list[int], wanted: str, verb: str) -> None:
    """Raises `Misuse` unless all blocks are in `sets`, which holds the blocks of each page that are in the state `wanted`."""
    for page, blocks in pieces.items():
        if wrong := blocks & ~sets[page]:
            _refuse(table, page, wrong, f"not {wanted}; it cannot be {verb}")


def disown(table: PageTable, ranges: Iterable[BlockRange]) -> list[Piece]:
    """Take the blocks out of the sets of owned ones; the caller frees each piece.

    Raises `Misuse` for a block that is not owned or is named twice; then nothing has changed.
    """
    done: list[Piece] = []
    try:
        for first, blocks in ranges:
            _disown_range(table, first, blocks, done)
    except Misuse:
        for page, blocks, pages in done:
            for each in range(page, page + pages):
                table.owned[each] |= blocks
        raise
    return done


def _disown_range(table: PageTable, first: int, blocks: int, done: list[Piece]) -> None:
    bpp = table.bpp
    if blocks < 1:
        raise Misuse(f"({first}, {blocks}) is not a range of blocks")
    _require_id(table, first)
    _require_id(table, first + blocks - 1)
    while blocks:
        page, pages = table.page_of(first), 1
        shift = first - table.starts[page]
        part = min(blocks, table.caps[page] - shift)
        if page < 0 or part < 1:
            raise Misuse(f"block {first} is absent, not owned; it cannot be given")
        if part == bpp:
            pages = blocks // bpp
        piece = (page, ((1 << part) - 1) << shift, pages)
        _disown_piece(table, *piece)
        done.append(piece)
        first += part * pages
        blocks -= part * pages


def _disown_piece(table: PageTable, page: int, blocks: int, pages: int) -> None:
    owned = table.owned
    if pages > 1 and owned[page : page + pages] == [blocks] * pages:
        owned[page : page + pages] = [0] * pages
        return
    for each in range(page, page + pages):
        if wrong := blocks & ~owned[each]:
            for former in range(page, each):
                owned[former] |= blocks
            _refuse(table, each, wrong, "not owned, or it is named twice; it cannot be given")
        owned[each] ^= blocks


def free(table: PageTable, page: int, blocks: int, marker: int) -> None:
    """Blocks of one page that are neither owned nor cached any longer become free; read by work in flight up to step `marker`."""
    if marker > table.markers[page]:
        table.markers[page] = marker
        table.largest_marker = max(marker, table.largest_marker)
    gained = blocks.bit_count()
    if table.states[page] == QUARANTINED:
        table.lost_owned_blocks -= gained
        return
    table.frees[page] |= blocks
    table.available += gained
    free_count = table.counts[page] = table.counts[page] + gained
    if free_count == table.caps[page]:
        table.vacate(page, 1, table.markers[page])
    elif page != table.open_page:
        table.index(page, free_count)


def free_whole(table: PageTable, first: int, pages: int, marker: int) -> None:
    """All blocks of several adjacent pages become free."""
    end, bpp = first + pages, table.bpp
    full = (1 << bpp) - 1
    if marker < table.largest_marker or table.states[first:end] != bytes((USED,)) * pages:
        for page in range(first, end):
            free(table, page, full, marker)
        return
    table.largest_marker = marker
    table.markers[first:end] = [marker] * pages
    table.frees[first:end] = [full] * pages
    table.counts[first:end] = [bpp] * pages
    table.available += pages * bpp
    table.vacate(first, pages, marker)


def _require_id(table: PageTable, block: int) -> None:
    if not 0 <= block < table.geometry.num_blocks:
        raise Misuse(f"block {block} is not a block of this pool (0 to {table.geometry.num_blocks - 1})")


def _refuse(table: PageTable, page: int, wrong: int, why: str) -> NoReturn:
    """Raise for the lowest block of the set `wrong`."""
    block = table.starts[page] + (wrong & -wrong).bit_length() - 1
    raise Misuse(f"block {block} is {state_of(table, block).value}, {why}")
