# SPDX-License-Identifier: Apache-2.0
"""One block-to-page map for ranks whose blocks differ in bytes: pipeline stages with their own layers, layouts and cards.

The owner reckons in ids and pages only, so a page number must hold the same blocks on every rank; how many bytes a page has is each
rank's own matter. Two kinds of choice keep the map equal: a whole number of strides to a page, the same on every rank; or blocks
without gaps, with pages in the ratio of the blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Final

from kvcached.core.geometry import (
    MAX_WASTE,
    PAGE_LIMIT_BYTES,
    PAGE_TARGET_BYTES,
    PAGES_WANTED,
    STRIDE_ALIGNMENT_BYTES,
    BlockGeometry,
    choose_geometry,
    padded_stride,
    waste_of,
)
from kvcached.errors import GeometryError
from kvcached.units import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Sizes = tuple[tuple[int, int], ...]
"""(page, stride) of each stage, in bytes."""
_NO_COST: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank needs: `planes` planes with blocks of `block_bytes` each, on a card of this granularity."""

    block_bytes: int
    granularity_bytes: int
    planes: int = 1
    can_pad_stride: bool = True

    @property
    def bytes_of_a_block(self) -> int:
        """In all planes."""
        return self.block_bytes * self.planes


def choose_stages(
    stages: Sequence[Stage], num_blocks: int, *, page_bytes_floor: int | None = None, max_waste: float = MAX_WASTE
) -> tuple[BlockGeometry, ...]:
    """A geometry for each stage, all with the same map of `num_blocks` blocks to pages.

    The choice has the least cost, `choose_geometry`'s, summed over the stages by their bytes; stages that are equal get exactly its
    answer. Raises `GeometryError` when every choice wastes more than `max_waste` on some stage, naming sizes that work.
    """
    alone = {stage: _alone(stage, num_blocks, page_bytes_floor, max_waste) for stage in stages}
    if len(alone) == 1:
        return (alone[stages[0]],) * len(stages)
    plan = _Plan(Counter(stages), num_blocks, page_bytes_floor or 0)
    sizes = plan.cheapest(max_waste)
    if sizes is None:
        raise GeometryError(plan.refusal(max_waste))
    made = {
        stage: BlockGeometry(stage.block_bytes, stride, page, ceil_div(num_blocks * stride, page), stage.planes, num_blocks)
        for stage, (page, stride) in zip(alone, sizes, strict=True)
    }
    return tuple(made[stage] for stage in stages)


def _alone(stage: Stage, num_blocks: int, floor: int | None, max_waste: float) -> BlockGeometry:
    return choose_geometry(
        stage.block_bytes,
        num_blocks,
        stage.granularity_bytes,
        planes=stage.planes,
        can_pad_stride=stage.can_pad_stride,
        page_bytes_floor=floor,
        max_waste=max_waste,
    )


def same_pages(geometries: Sequence[BlockGeometry]) -> bool:
    """Whether every page number holds the same blocks in all of them, for any number of blocks."""
    return len({_map_of(geometry) for geometry in geometries}) <= 1


def require_same_pages(geometries: Sequence[BlockGeometry]) -> None:
    """Raises `GeometryError` that names the first rank whose pages hold other blocks than rank 0's."""
    for rank, geometry in enumerate(geometries):
        if _map_of(geometry) != _map_of(geometries[0]):
            raise GeometryError(
                f"rank {rank} has {geometry.num_blocks} blocks on {geometry.pages} pages of {geometry.page_bytes} bytes at a stride of "
                f"{geometry.block_stride_bytes} bytes, which hold other blocks than rank 0's: {geometries[0].num_blocks} blocks, "
                f"{geometries[0].pages} pages of {geometries[0].page_bytes} bytes, stride {geometries[0].block_stride_bytes} bytes"
            )


def _map_of(geometry: BlockGeometry) -> tuple[int, int, int, int, int]:
    """Equal for equal maps. Blocks and pages begin at multiples of the sizes' common divisor, so of a block's bytes only the multiple
    that they end before counts."""
    step = gcd(geometry.block_stride_bytes, geometry.page_bytes)
    return (
        geometry.num_blocks,
        geometry.pages,
        geometry.page_bytes // step,
        geometry.block_stride_bytes // step,
        ceil_div(geometry.block_bytes, step),
    )


class _Plan:
    """The search over sizes that give all stages one map."""

    def __init__(self, ranks_of: Counter[Stage], num_blocks: int, floor: int) -> None:
        self._stages = tuple(ranks_of)
        self._floor = floor
        total = sum(ranks * stage.bytes_of_a_block for stage, ranks in ranks_of.items())
        self._weights = [ranks * stage.bytes_of_a_block / total for stage, ranks in ranks_of.items()]
        self._targets = [_target(stage, num_blocks) for stage in self._stages]
        self._limit = max(PAGE_LIMIT_BYTES, 2 * floor)

    def cheapest(self, max_waste: float) -> Sizes | None:
        best, least = None, _NO_COST
        for sizes in self._choices():
            cost = self._cost(sizes, max_waste)
            if cost < least:
                best, least = sizes, cost
        return best

    def _choices(self) -> Iterator[Sizes]:
        yield from self._dense()
        largest = max(stage.block_bytes for stage in self._stages)
        for blocks in range(1, max(1, self._limit // largest) + 1):
            sizes = self._whole(blocks)
            if sizes is not None:
                yield sizes

    def _dense(self) -> Iterator[Sizes]:
        """Blocks without gaps: pages of n x granularity on the first stage, and in the ratio of the blocks on the others."""
        blocks = [stage.block_bytes for stage in self._stages]
        divisor = gcd(*blocks)
        # A page is unit x (block / divisor) on each stage; the least unit for which all are multiples of their granularity.
        unit = 1
        for stage, block in zip(self._stages, blocks, strict=True):
            part = block // divisor
            unit = lcm(unit, stage.granularity_bytes // gcd(stage.granularity_bytes, part))
        smallest, largest = min(blocks), max(blocks)
        first = round_up(max(divisor, ceil_div(self._floor * divisor, smallest)), unit)
        for size in range(first, max(self._limit * divisor // largest, first) + 1, unit):
            yield tuple((size * (block // divisor), block) for block in blocks)

    def _whole(self, blocks: int) -> Sizes | None:
        """`blocks` strides to a page on every stage, on the least pages; None where a stride that cannot be padded forbids it."""
        sizes = []
        for stage in self._stages:
            step = lcm(stage.granularity_bytes, STRIDE_ALIGNMENT_BYTES * blocks)
            page = round_up(max(blocks * stage.block_bytes, self._floor), step)
            exact = blocks * stage.block_bytes
            if exact % stage.granularity_bytes == 0 and exact >= self._floor:
                page = exact
            elif not stage.can_pad_stride:
                return None
            sizes.append((page, page // blocks))
        return tuple(sizes)

    def _cost(self, sizes: Sizes, max_waste: float) -> float:
        cost = 0.0
        for stage, weight, target, (page, stride) in zip(self._stages, self._weights, self._targets, sizes, strict=True):
            waste = waste_of(stage.block_bytes, stride, page)
            if waste > max_waste or page > max(self._limit, self._least_page(stage)):
                return _NO_COST
            cost += weight * (waste + abs(page - target) / (PAGES_WANTED * target))
        return cost

    def _least_page(self, stage: Stage) -> int:
        return round_up(max(stage.block_bytes, self._floor), stage.granularity_bytes)

    def refusal(self, max_waste: float) -> str:
        have = ", ".join(f"{stage.block_bytes}{'' if stage.can_pad_stride else ' (exactly)'}" for stage in self._stages)
        pages = [self._least_page(stage) for stage in self._stages]
        # One number of blocks for all that every stage's page can hold, with strides that divide it.
        strides = [padded_stride(stage.block_bytes, page) for stage, page in zip(self._stages, pages, strict=True)]
        fits = min(page // stride for page, stride in zip(pages, strides, strict=True))
        fits = next(blocks for blocks in range(fits, 0, -1) if all(page % (STRIDE_ALIGNMENT_BYTES * blocks) == 0 for page in pages))
        working = ", ".join(f"{page // fits} bytes on pages of {page} bytes" for page in pages)
        return (
            f"stages with blocks of {have} bytes have no pages up to {self._limit} bytes that hold the same blocks on all of them and "
            f"waste at most {max_waste:.0%}; equal numbers of layers on every stage work, and so do blocks of {working}"
        )


def _target(stage: Stage, num_blocks: int) -> int:
    """The page that `choose_geometry` wants for this stage alone."""
    wanted = min(PAGE_TARGET_BYTES // stage.planes, num_blocks * stage.block_bytes // PAGES_WANTED)
    return max(stage.granularity_bytes, wanted // stage.granularity_bytes * stage.granularity_bytes)
