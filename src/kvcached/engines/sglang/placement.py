# SPDX-License-Identifier: Apache-2.0
"""How the slots of an SGLang pool lie in an arena. Pure arithmetic.

SGLang addresses a slot by its number alone, in one tensor for each layer and buffer, so the distance of two slots is one number for all
of them, and no slot may straddle two pages: `block` here is one SGLang page of slots, and blocks divide the arena's page exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcached.core.geometry import PAGE_LIMIT_BYTES, PAGE_TARGET_BYTES, PAGES_WANTED, BlockGeometry
from kvcached.errors import GeometryError
from kvcached.units import MIB, ceil_div, format_size, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT_BYTES: Final = 16  # widest load of a kernel
MAX_WASTE: Final = 0.10


@dataclass(frozen=True, slots=True)
class Placement:
    """`offsets_bytes` are those of each row's first slot from the arena's base; `slot_bytes` is the distance of two slots there."""

    geometry: BlockGeometry
    offsets_bytes: tuple[int, ...]
    slot_bytes: int


def place(
    rows_bytes: Sequence[int],
    *,
    page_slots: int,
    blocks: int,
    granularity_bytes: int,
    interleaved: bool,
    page_bytes_floor: int = 0,
) -> Placement:
    """Place tensors whose slots have `rows_bytes` each, in order: all of a slot side by side, or each tensor in a plane of its own.

    `blocks` counts SGLang pages of `page_slots` slots, the padding page included. Raises `GeometryError`.
    """
    if not interleaved and len(set(rows_bytes)) != 1:
        raise GeometryError(f"rows of {sorted(set(rows_bytes))} bytes cannot lie in planes of one size; unset KVCACHED_CONTIGUOUS_LAYOUT")
    planes = 1 if interleaved else len(rows_bytes)
    slot_bytes = sum(rows_bytes) if interleaved else rows_bytes[0]
    geometry = _cheapest(slot_bytes, page_slots, blocks, granularity_bytes, planes, page_bytes_floor)
    offsets = [sum(rows_bytes[:row]) if interleaved else row * geometry.plane_bytes for row in range(len(rows_bytes))]
    return Placement(geometry, tuple(offsets), geometry.block_stride_bytes // page_slots)


def _cheapest(slot_bytes: int, page_slots: int, blocks: int, granularity: int, planes: int, floor: int) -> BlockGeometry:
    """The page whose waste and distance from the wanted size cost least together. Only an interleaved slot may be padded."""
    block_bytes = page_slots * slot_bytes
    wanted = min(PAGE_TARGET_BYTES // planes, blocks * block_bytes // PAGES_WANTED)
    target = max(granularity, wanted // granularity * granularity)
    lowest = round_up(max(block_bytes, floor, granularity), granularity)
    best: tuple[float, int, int] | None = None
    for page in range(lowest, max(PAGE_LIMIT_BYTES, 2 * lowest) + 1, granularity):
        stride = page_slots * _slot_stride(slot_bytes, page_slots, page, can_pad=planes == 1)
        if stride:
            waste = 1 - block_bytes / stride
            cost = waste + abs(page - target) / (PAGES_WANTED * target)
            if waste <= MAX_WASTE and (best is None or cost < best[0]):
                best = (cost, page, stride)
    if best is None:
        raise GeometryError(
            f"slots of {slot_bytes} bytes in pages of {page_slots} fill no page up to {format_size(PAGE_LIMIT_BYTES)} in steps of "
            f"{format_size(granularity)} without waste of more than {MAX_WASTE:.0%}; another page size of SGLang's may do"
        )
    _, page, stride = best
    return BlockGeometry(block_bytes, stride, page, ceil_div(blocks * stride, page), planes, blocks)


def _slot_stride(slot_bytes: int, page_slots: int, page_bytes: int, *, can_pad: bool) -> int:
    """The least distance of slots with which blocks fill the page exactly; 0 when there is none."""
    if not can_pad:
        return slot_bytes if page_bytes % (page_slots * slot_bytes) == 0 else 0
    units, rest = divmod(page_bytes, page_slots * ALIGNMENT_BYTES)
    if rest:
        return 0
    for blocks in range(page_bytes // (page_slots * slot_bytes), 0, -1):
        if units % blocks == 0:
            return units // blocks * ALIGNMENT_BYTES
    return 0


def page_floor_bytes(page_size_mb: int | None) -> int:
    """The setting of that name, in bytes."""
    return 0 if page_size_mb is None else page_size_mb * MIB
