# SPDX-License-Identifier: Apache-2.0
"""Which block lies on which page, and the choice of page and stride that wastes least.

In each plane block `i` fills the bytes from `i * block_stride_bytes` on, so ids and addresses are affine. A block that
straddles a page boundary would tie two pages together; its id exists but is never handed out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import gcd
from typing import Final

from kvcached.errors import GeometryError
from kvcached.units import MIB, ceil_div, format_size, round_up

PAGE_LIMIT_BYTES: Final = 64 * MIB
PAGE_TARGET_BYTES: Final = 16 * MIB
STRIDE_ALIGNMENT_BYTES: Final = 256
PAGES_WANTED: Final = 64  # of a small range; a page so many times larger than wanted is as bad as wasting everything
MAX_WASTE: Final = 0.10


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Where `num_blocks` blocks lie on `pages` pages, the same in each of `planes` planes.

    `block_bytes` is the payload of one block in one plane, `block_stride_bytes` the distance of consecutive ids there.
    Raises `GeometryError` for sizes that cannot work together.
    """

    block_bytes: int
    block_stride_bytes: int
    page_bytes: int
    pages: int
    planes: int
    num_blocks: int

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_positive(field.name, getattr(self, field.name))
        if self.block_stride_bytes < self.block_bytes:
            raise GeometryError(
                f"blocks of {self.block_bytes} bytes overlap at a stride of {self.block_stride_bytes} bytes; "
                f"a stride of {self.block_bytes} bytes works"
            )
        if self.page_bytes < self.block_bytes:
            raise GeometryError(
                f"a block of {self.block_bytes} bytes does not fit a page of {self.page_bytes} bytes; "
                f"a page of {round_up(self.block_bytes, self.page_bytes)} bytes works"
            )
        if self.pages * self.page_bytes < self.num_blocks * self.block_stride_bytes:
            raise GeometryError(
                f"{self.num_blocks} blocks at a stride of {self.block_stride_bytes} bytes do not fit {self.pages} pages of "
                f"{self.page_bytes} bytes; {ceil_div(self.num_blocks * self.block_stride_bytes, self.page_bytes)} pages work"
            )

    def page_of(self, block: int) -> int:
        """The page that holds `block` (0 <= block < num_blocks), or -1 when it straddles a boundary."""
        start = block * self.block_stride_bytes
        page = start // self.page_bytes
        return page if start + self.block_bytes <= (page + 1) * self.page_bytes else -1

    def blocks_of(self, page: int) -> range:
        """The ids that lie wholly on `page`, ascending; empty when there is none."""
        start = page * self.page_bytes
        first = ceil_div(start, self.block_stride_bytes)
        stop = (start + self.page_bytes - self.block_bytes) // self.block_stride_bytes + 1
        return range(first, max(first, min(stop, self.num_blocks)))

    @property
    def straddling_blocks(self) -> int:
        """How many of the ids are never handed out."""
        reach = _floor_sum(self.num_blocks, self.page_bytes, self.block_stride_bytes, self.block_bytes - 1)
        return reach - _floor_sum(self.num_blocks, self.page_bytes, self.block_stride_bytes, 0)

    @property
    def usable_blocks(self) -> int:
        """How many of the ids can be handed out: the capacity."""
        return self.num_blocks - self.straddling_blocks

    @property
    def max_blocks_per_page(self) -> int:
        return len(self.blocks_of(0))  # no page begins nearer to a block's start than the first

    @property
    def waste(self) -> float:
        """Fraction of a page's bytes that hold no payload of a block that can be handed out, over the affine ids' whole period."""
        return waste_of(self.block_bytes, self.block_stride_bytes, self.page_bytes)

    @property
    def plane_bytes(self) -> int:
        """Bytes of the address range of one plane."""
        return self.pages * self.page_bytes

    @property
    def range_bytes(self) -> int:
        """Bytes of the address range of all planes."""
        return self.planes * self.plane_bytes

    @property
    def release_step_bytes(self) -> int:
        """Least physical memory that can be given back: one page in every plane."""
        return self.planes * self.page_bytes


def choose_geometry(
    block_bytes: int,
    num_blocks: int,
    granularity_bytes: int,
    *,
    planes: int = 1,
    can_pad_stride: bool,
    page_bytes_floor: int | None = None,
    target_page_bytes: int | None = None,
    max_waste: float = MAX_WASTE,
) -> BlockGeometry:
    """Page and stride with the least sum of waste and distance from the wanted page size.

    `block_bytes` is per plane. Pages are multiples of `granularity_bytes`, not below `page_bytes_floor` and at most 64 MiB, unless
    the floor or a block is larger. The wanted page gives a release step of 16 MiB over all planes, or a range of 64 pages when
    that is less; `target_page_bytes` (per plane) overrides it. `can_pad_stride` says whether the engine lets the stride exceed
    `block_bytes`. Raises `GeometryError` when every choice wastes more than `max_waste`, naming sizes that work.
    """
    sizes = {"block_bytes": block_bytes, "num_blocks": num_blocks, "granularity_bytes": granularity_bytes, "planes": planes}
    for name, value in sizes.items():
        _require_positive(name, value)
    if granularity_bytes % STRIDE_ALIGNMENT_BYTES:
        suitable = round_up(granularity_bytes, STRIDE_ALIGNMENT_BYTES)
        raise GeometryError(f"granularity_bytes is {granularity_bytes}, not a multiple of {STRIDE_ALIGNMENT_BYTES}; {suitable} works")
    floor = page_bytes_floor or 0
    lowest = round_up(max(block_bytes, floor), granularity_bytes)
    pages = range(lowest, max(PAGE_LIMIT_BYTES, lowest, 2 * floor) + 1, granularity_bytes)
    wanted = target_page_bytes or min(PAGE_TARGET_BYTES // planes, num_blocks * block_bytes // PAGES_WANTED)
    target = max(granularity_bytes, wanted // granularity_bytes * granularity_bytes)
    choice = _cheapest(block_bytes, sorted(pages, key=lambda page: abs(page - target)), target, can_pad_stride, max_waste)
    if choice is None:
        raise GeometryError(_refusal(block_bytes, pages, granularity_bytes, max_waste))
    _, page_bytes, stride_bytes = choice
    return BlockGeometry(block_bytes, stride_bytes, page_bytes, ceil_div(num_blocks * stride_bytes, page_bytes), planes, num_blocks)


def _cheapest(block_bytes: int, pages: list[int], target: int, can_pad: bool, max_waste: float) -> tuple[float, int, int] | None:
    """(cost, page, stride) of the best pair; `pages` is nearest first, so the search ends where distance alone costs more."""
    best: tuple[float, int, int] | None = None
    for page in pages:
        distance = abs(page - target) / (PAGES_WANTED * target)
        if best and distance > best[0]:
            break
        for stride in _strides(block_bytes, page, can_pad):
            waste = waste_of(block_bytes, stride, page)
            if waste <= max_waste and (best is None or (waste + distance, page, stride) < best):
                best = (waste + distance, page, stride)
    return best


def _strides(block_bytes: int, page_bytes: int, can_pad: bool) -> tuple[int, ...]:
    """The block's own size, and the least aligned divisor of the page that holds it."""
    return (block_bytes, padded_stride(block_bytes, page_bytes)) if can_pad else (block_bytes,)


def padded_stride(block_bytes: int, page_bytes: int) -> int:
    """The least aligned divisor of the page that holds a block."""
    units = page_bytes // STRIDE_ALIGNMENT_BYTES
    least = ceil_div(block_bytes, STRIDE_ALIGNMENT_BYTES)
    most_blocks = units // least
    if most_blocks < least:
        return page_bytes // next(blocks for blocks in range(most_blocks, 0, -1) if units % blocks == 0)
    return STRIDE_ALIGNMENT_BYTES * next(stride for stride in range(least, units + 1) if units % stride == 0)


def waste_of(block_bytes: int, stride_bytes: int, page_bytes: int) -> float:
    """Fraction of the pages that holds no block. Blocks start at every multiple of the sizes' common divisor within a page, each once
    in their period."""
    step = gcd(stride_bytes, page_bytes)
    usable = (page_bytes - block_bytes) // step + 1
    return 1.0 - usable * block_bytes / (stride_bytes // step * page_bytes)


def _refusal(block_bytes: int, pages: range, granularity_bytes: int, max_waste: float) -> str:
    working = padded_stride(block_bytes, pages[0])
    return (
        f"blocks of {block_bytes} bytes ({format_size(block_bytes)}) waste more than {max_waste:.0%} of every page from "
        f"{format_size(pages[0])} to {format_size(pages[-1])} in steps of {format_size(granularity_bytes)}; "
        f"blocks of {working} bytes on pages of {pages[0]} bytes work"
    )


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise GeometryError(f"{name} is {value}; 1 is the least that works")


def _floor_sum(terms: int, divisor: int, slope: int, offset: int) -> int:
    """Sum of (slope * i + offset) // divisor for i in 0 .. terms-1, by Euclid's steps."""
    total = 0
    while terms:
        total += terms * (terms - 1) // 2 * (slope // divisor) + terms * (offset // divisor)
        slope, offset = slope % divisor, offset % divisor
        terms, offset = divmod(slope * terms + offset, divisor)
        slope, divisor = divisor, slope
    return total
