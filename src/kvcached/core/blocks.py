# SPDX-License-Identifier: Apache-2.0
"""Blocks as sets on pages: from ids and ranges to (page, set of blocks), and from owned to free."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from kvcached.core.pages import QUARANTINED, ROWS, USED, PageTable
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


def own(table: PageTable, page: int, blocks: int) -> None:
    """Free blocks of a mapped page become owned."""
    if table.states[page] != USED:
        table.occupy(page)
    table.frees[page] ^= blocks
    table.owned[page] |= blocks
    table.counts[page] -= blocks.bit_count()
    table.available -= blocks.bit_count()


def take_from(table: PageTable, page: int, blocks: int, ranges: list[BlockRange]) -> int:
    """Open a page and own its lowest free blocks, up to `blocks`. Returns how many."""
    holes, start = table.frees[page], table.starts[page]
    blocks = rest = min(blocks, table.counts[page])
    while rest:
        low = holes & -holes
        stretch = holes & ~(holes + low)
        shift = low.bit_length() - 1
        length = min(rest, stretch.bit_length() - shift)
        holes ^= ((1 << length) - 1) << shift
        _append(ranges, start + shift, length)
        rest -= length
    table.open(page)
    own(table, page, table.frees[page] ^ holes)
    return blocks


def take_whole(table: PageTable, pages: int, ranges: list[BlockRange]) -> int:
    """Own all blocks of up to `pages` empty pages, parked ones first, in as long stretches as there are. Returns the blocks owned."""
    bpp, taken = table.bpp, 0
    full = (1 << bpp) - 1
    while taken < pages and (first := table.empty_page()) < table.whole_pages:
        stretch = _stretch(table, first, min(pages - taken, table.whole_pages - first))
        table.occupy(first, stretch)
        if stretch == 1:
            table.owned[first] = full
            table.frees[first] = table.counts[first] = 0
        else:
            end = first + stretch
            table.owned[first:end] = [full] * stretch
            table.frees[first:end] = table.counts[first:end] = [0] * stretch
        _append(ranges, first * bpp, stretch * bpp)
        taken += stretch
    table.available -= taken * bpp
    return taken * bpp


def _stretch(table: PageTable, first: int, pages: int) -> int:
    """How many of `pages` pages from `first` on are in the state of the first one before another state comes."""
    states = table.states
    state = states[first]
    if pages == 1 or states.startswith(ROWS[state] * pages, first):
        return pages
    window = states[first : first + pages]
    return len(window) - len(window.lstrip(window[:1]))


def _append(ranges: list[BlockRange], first: int, blocks: int) -> None:
    """Add a range, joined to the last one when it follows it."""
    if ranges and ranges[-1][0] + ranges[-1][1] == first:
        first, blocks = ranges[-1][0], ranges.pop()[1] + blocks
    ranges.append((first, blocks))


def disown(table: PageTable, ranges: Iterable[BlockRange]) -> list[Piece]:
    """Take the blocks out of the sets of owned ones; the caller frees each piece. Ranges that follow each other on a page are one piece.

    Raises `Misuse` for a block that is not owned or is named twice; then nothing has changed.
    """
    owned, bpp, regular_blocks = table.owned, table.bpp, table.regular_blocks
    done: list[Piece] = []
    last, last_blocks = table.none, 0
    try:
        for first, number in ranges:
            if 0 <= first < regular_blocks:
                page = first // bpp
                shift = first - page * bpp
                blocks = ((1 << number) - 1) << shift if 0 < number <= bpp - shift else 0
                if blocks and owned[page] & blocks == blocks:
                    owned[page] ^= blocks
                    if page == last:
                        last_blocks |= blocks
                        continue
                    if last_blocks:
                        done.append((last, last_blocks, 1))
                    last, last_blocks = page, blocks
                    continue
            _disown_range(table, first, number, done)
    except Misuse:
        owned[last] |= last_blocks
        for page, blocks, pages in done:
            for each in range(page, page + pages):
                owned[each] |= blocks
        raise
    if last_blocks:
        done.append((last, last_blocks, 1))
    return done


def _disown_range(table: PageTable, first: int, blocks: int, done: list[Piece]) -> None:
    """Any range, page by page and whole pages at once."""
    bpp = table.bpp
    if blocks < 1:
        raise Misuse(f"({first}, {blocks}) is not a range of blocks")
    _require_id(table, first)
    _require_id(table, first + blocks - 1)
    owned = table.owned
    while blocks:
        page = first // bpp if bpp else table.page_of(first)
        shift = first - table.starts[page]
        if shift == 0 and blocks >= 2 * bpp > 0:
            pages, full = blocks // bpp, (1 << bpp) - 1
            if owned[page : page + pages] == [full] * pages:
                owned[page : page + pages] = [0] * pages
                done.append((page, full, pages))
                first += bpp * pages
                blocks -= bpp * pages
                continue
        part = min(blocks, table.caps[page] - shift)
        if page < 0 or part < 1:
            raise Misuse(f"block {first} is absent, not owned; it cannot be given")
        piece = ((1 << part) - 1) << shift
        if wrong := piece & ~owned[page]:
            _refuse(table, page, wrong, "not owned, or it is named twice; it cannot be given")
        owned[page] ^= piece
        done.append((page, piece, 1))
        first += part
        blocks -= part


def free(table: PageTable, page: int, blocks: int, number: int, marker: int) -> None:
    """Blocks of one page (`number` of them), neither owned nor cached any longer, become free; work up to `marker` may read them."""
    if marker > table.markers[page]:
        table.markers[page] = marker
        if marker > table.largest_marker:
            table.largest_marker = marker
    if table.states[page] == QUARANTINED:
        table.lost_owned_blocks -= number
        return
    table.frees[page] |= blocks
    table.available += number
    count = table.counts[page] = table.counts[page] + number
    if count == table.caps[page]:
        table.vacate(page, 1, table.markers[page])
    elif page != table.open_page and not table.indexed[page] >> count & 1:
        table.index(page, count)


def free_whole(table: PageTable, first: int, pages: int, marker: int) -> None:
    """All blocks of several adjacent pages become free."""
    end, bpp = first + pages, table.bpp
    full = (1 << bpp) - 1
    if marker < table.largest_marker or table.lost:
        for page in range(first, end):
            free(table, page, full, bpp, marker)
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
