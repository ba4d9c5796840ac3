# SPDX-License-Identifier: Apache-2.0
"""Blocks as sets on pages: from ids and ranges to (page, set of blocks), and from owned to free."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NoReturn

from kvcached.core.states import PARKED, QUARANTINED, RETIRED, USED
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcached.core.pages import PageTable

BlockRange = tuple[int, int]
"""(first block, blocks)."""

Piece = tuple[int, int]
"""(page, set of blocks)."""


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
        length = stretch.bit_length() - shift
        if length > rest:
            length = rest
            stretch = ((1 << length) - 1) << shift
        holes ^= stretch
        ranges.append((start + shift, length))
        rest -= length
    table.open(page)
    own(table, page, table.frees[page] ^ holes)
    return blocks


def lowest(blocks: int, number: int) -> int:
    """The `number` lowest of a set that has at least as many."""
    low, high = number - 1, blocks.bit_length()  # the set below `high` has enough, below `low` too few
    while high - low > 1:
        middle = (low + high) >> 1
        if (blocks & ((1 << middle) - 1)).bit_count() >= number:
            high = middle
        else:
            low = middle
    return blocks & ((1 << high) - 1)


def take_set(table: PageTable, page: int, blocks: int, ranges: list[BlockRange], pieces: list[Piece]) -> int:
    """As `take_from`, as one range where they are neighbours, else as a set."""
    holes = table.frees[page]
    taken = holes if blocks >= table.counts[page] else lowest(holes, blocks)
    low, number = taken & -taken, taken.bit_count()
    if taken & (taken + low):
        pieces.append((page, taken))
    else:
        ranges.append((table.starts[page] + low.bit_length() - 1, number))
    table.open(page)
    own(table, page, taken)
    return number


def drain(table: PageTable, blocks: int, pieces: list[Piece]) -> int:
    """Own all free blocks of the roomiest pages, while more than a page is missing of `blocks`. Returns how many.

    As `take_set` on one page after the other, when there are enough blocks. It ends before empty pages, which above the limit come last.
    """
    owned, frees, counts = table.owned, table.frees, table.counts
    rest = blocks
    while rest >= table.page_limit and counts[page := table.roomiest()]:
        table.open(page)
        holes = frees[page]
        pieces.append((page, holes))
        owned[page] |= holes
        rest -= counts[page]
        frees[page] = counts[page] = 0
    table.available -= blocks - rest
    return blocks - rest


def take_row(table: PageTable, first: int, pages: int, ranges: list[BlockRange]) -> int:
    """Own all blocks of up to `pages` adjacent empty pages in one state, from `first` on. Returns the blocks owned.

    Page by page: slices of the arrays would cost more for the few pages of a usual take.
    """
    bpp, states, owned, frees, counts = table.bpp, table.states, table.owned, table.frees, table.counts
    full, state = (1 << bpp) - 1, table.states[first]
    page, end = first, min(first + pages, table.whole_pages)
    while page < end and states[page] == state:
        states[page] = USED
        owned[page] = full
        frees[page] = counts[page] = 0
        page += 1
    blocks = (page - first) * bpp
    table.leave_empty(first, page - first, state)
    table.available -= blocks
    ranges.append((first * bpp, blocks))
    return blocks


def joined(ranges: list[BlockRange]) -> list[BlockRange]:
    """The same blocks in the same order, with ranges that follow each other as one."""
    result: list[BlockRange] = []
    end = -1
    for first, blocks in ranges:
        if first == end:
            result[-1] = (result[-1][0], result[-1][1] + blocks)
        else:
            result.append((first, blocks))
        end = first + blocks
    return result


def give_row(table: PageTable, first: int, pages: int, marker: int) -> bool:
    """All blocks of adjacent pages, from owned to free. False, and nothing changed, when that takes a closer look."""
    bpp, states, owned = table.bpp, table.states, table.owned
    full, row = (1 << bpp) - 1, range(first, first + pages)
    if marker < table.largest_marker:
        return False
    for page in row:
        if owned[page] != full or states[page] != USED:
            return False
    frees, counts, markers = table.frees, table.counts, table.markers
    state = PARKED if marker <= table.completed else RETIRED
    for page in row:
        states[page] = state
        owned[page] = 0
        frees[page] = full
        counts[page] = bpp
        markers[page] = marker
    table.largest_marker = marker
    table.available += pages * bpp
    table.enter_empty(first, pages, state, marker)
    return True


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
                        done.append((last, last_blocks))
                    last, last_blocks = page, blocks
                    continue
            _disown_range(table, first, number, done)
    except Misuse:
        for page, blocks in (*done, (last, last_blocks)):
            owned[page] |= blocks
        raise
    if last_blocks:
        done.append((last, last_blocks))
    return done


def disown_sets(table: PageTable, pieces: Sequence[Piece]) -> None:
    """Take the blocks out of the sets of owned ones. Raises `Misuse` for one that is not owned or is named twice; nothing has changed."""
    owned = table.owned
    done = 0
    try:
        for page, blocks in pieces:
            if not (0 <= page < table.none and blocks > 0 == blocks & ~owned[page]):
                _refuse_set(table, page, blocks)
            owned[page] ^= blocks
            done += 1
    except Misuse:
        for page, blocks in pieces[:done]:
            owned[page] |= blocks
        raise


def _disown_range(table: PageTable, first: int, blocks: int, done: list[Piece]) -> None:
    """Any range, page by page."""
    if blocks < 1:
        raise Misuse(f"({first}, {blocks}) is not a range of blocks")
    _require_id(table, first)
    _require_id(table, first + blocks - 1)
    while blocks:
        page = table.page_of(first)
        shift = first - table.starts[page]
        part = min(blocks, table.caps[page] - shift)
        if page < 0 or part < 1:
            raise Misuse(f"block {first} is absent, not owned; it cannot be given")
        piece = ((1 << part) - 1) << shift
        if wrong := piece & ~table.owned[page]:
            _refuse(table, page, wrong, "not owned, or it is named twice; it cannot be given")
        table.owned[page] ^= piece
        done.append((page, piece))
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
        table.vacate(page, table.markers[page])
    elif page != table.open_page and not table.indexed[page] >> count & 1:
        table.index(page, count)


def _require_id(table: PageTable, block: int) -> None:
    if not 0 <= block < table.geometry.num_blocks:
        raise Misuse(f"block {block} is not a block of this pool (0 to {table.geometry.num_blocks - 1})")


def _refuse_set(table: PageTable, page: int, blocks: int) -> NoReturn:
    if not 0 <= page < table.none or blocks < 1:
        raise Misuse(f"({page}, {blocks:#x}) is not a set of blocks on a page")
    _refuse(table, page, blocks & ~table.owned[page], "not owned, or it is named twice; it cannot be given")


def _refuse(table: PageTable, page: int, wrong: int, why: str) -> NoReturn:
    """Raise for the lowest block of the set `wrong`."""
    block = table.starts[page] + (wrong & -wrong).bit_length() - 1
    _require_id(table, block)
    raise Misuse(f"block {block} is {state_of(table, block).value}, {why}")
