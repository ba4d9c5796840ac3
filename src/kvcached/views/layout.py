# SPDX-License-Identifier: Apache-2.0
"""Where each element of each layer's KV tensors lies in an arena, by arithmetic alone.

A payload is what one block holds of one layer and one buffer: `[tokens][heads][head_size]`, dense. Payloads of a block lie side by
side within a plane, so the number of planes is the layout:

    interleaved   [block][layer][K|V][payload]    one plane; a block is one stretch of memory
    per layer     [layer][K|V][block][payload]    layers x buffers planes; each tensor is dense
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from math import gcd
from typing import TYPE_CHECKING, Final

from kvcached.core.geometry import BlockGeometry, choose_geometry
from kvcached.errors import GeometryError

if TYPE_CHECKING:
    from collections.abc import Callable

_USUAL_BLOCK_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class LayoutKind(Enum):
    INTERLEAVED = "interleaved"
    PER_LAYER = "per-layer"


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """What the engine keeps per token. `buffers` is 2 for K and V apart, 1 for a latent or for K and V in one.

    Raises `GeometryError` for a number below 1.
    """

    layers: int
    buffers: int
    heads: int
    head_size: int
    element_bytes: int
    block_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise GeometryError(f"{field.name} is {getattr(self, field.name)}; 1 is the least that works")

    @property
    def parts(self) -> int:
        """Tensors: one for each layer and buffer."""
        return self.layers * self.buffers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer and buffer."""
        return self.heads * self.head_size * self.element_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block in one layer and buffer."""
        return self.block_tokens * self.token_bytes

    def planes(self, kind: LayoutKind) -> int:
        return self.parts if kind is LayoutKind.PER_LAYER else 1


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensor `[blocks, tokens, heads, head_size]` of one layer and buffer; strides in elements."""

    offset_bytes: int  # from the arena's base address
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    element_bytes: int

    @property
    def strides_bytes(self) -> tuple[int, int, int, int]:
        blocks, tokens, heads, elements = (stride * self.element_bytes for stride in self.strides)
        return blocks, tokens, heads, elements

    def offset_of(self, block: int, token: int, head: int, element: int) -> int:
        """Bytes from the arena's base address to one element."""
        steps = zip(self.strides_bytes, (block, token, head, element), strict=True)
        return self.offset_bytes + sum(stride * index for stride, index in steps)


@dataclass(frozen=True, slots=True)
class Layout:
    """`spec` laid over the planes of `geometry`. Raises `GeometryError` when the two are not about the same blocks."""

    spec: LayoutSpec
    geometry: BlockGeometry

    def __post_init__(self) -> None:
        spec, geometry = self.spec, self.geometry
        if geometry.planes not in (1, spec.parts):
            raise GeometryError(f"{geometry.planes} planes cannot hold {spec.parts} tensors; 1 or {spec.parts} planes work")
        block_bytes = self._parts_per_plane * spec.payload_bytes
        if geometry.block_bytes != block_bytes:
            raise GeometryError(
                f"a block has {block_bytes} bytes in each plane, not {geometry.block_bytes}; block_bytes={block_bytes} works"
            )
        for name in ("block_stride_bytes", "page_bytes"):
            value = getattr(geometry, name)
            if value % spec.element_bytes:
                suitable = value - value % spec.element_bytes + spec.element_bytes
                raise GeometryError(f"{name}={value} cuts elements of {spec.element_bytes} bytes; {name}={suitable} works")

    @property
    def kind(self) -> LayoutKind:
        return LayoutKind.INTERLEAVED if self.geometry.planes == 1 else LayoutKind.PER_LAYER

    @property
    def _parts_per_plane(self) -> int:
        return self.spec.parts // self.geometry.planes

    def tensor(self, layer: int, buffer: int = 0) -> TensorLayout:
        """The tensor of `layer` and `buffer`. Raises `IndexError` when there is no such tensor."""
        spec = self.spec
        if not (0 <= layer < spec.layers and 0 <= buffer < spec.buffers):
            raise IndexError(f"layer {layer}, buffer {buffer} of {spec.layers} layers with {spec.buffers} buffers")
        plane, part = divmod(layer * spec.buffers + buffer, self._parts_per_plane)
        return TensorLayout(
            offset_bytes=plane * self.geometry.plane_bytes + part * spec.payload_bytes,
            shape=(self.geometry.num_blocks, spec.block_tokens, spec.heads, spec.head_size),
            strides=(self.geometry.block_stride_bytes // spec.element_bytes, spec.heads * spec.head_size, spec.head_size, 1),
            element_bytes=spec.element_bytes,
        )


def choose_layout(
    spec: LayoutSpec,
    kind: LayoutKind,
    num_blocks: int,
    granularity_bytes: int,
    *,
    can_pad_stride: bool,
    page_bytes_floor: int | None = None,
) -> Layout:
    """The layout of `kind` on the pages that waste least. `page_bytes_floor` is per plane.

    Raises `GeometryError` when all waste too much, naming a number of tokens and a page that work.
    """

    def lay(candidate: LayoutSpec) -> Layout:
        planes = candidate.planes(kind)
        block_bytes = candidate.parts // planes * candidate.payload_bytes
        geometry = choose_geometry(
            block_bytes, num_blocks, granularity_bytes, planes=planes, can_pad_stride=can_pad_stride, page_bytes_floor=page_bytes_floor
        )
        return Layout(candidate, geometry)

    try:
        return lay(spec)
    except GeometryError as error:
        working = _first_that_works(lay, _other_block_tokens(spec, kind, granularity_bytes))
        tokens, page_bytes = working.spec.block_tokens, working.geometry.page_bytes
        raise GeometryError(f"{error}, as do {tokens} tokens per block on pages of {page_bytes} bytes") from error


def _other_block_tokens(spec: LayoutSpec, kind: LayoutKind, granularity_bytes: int) -> list[LayoutSpec]:
    """Usual numbers of tokens, nearest first; last the least number whose blocks are whole pages, which always works."""
    token_bytes = spec.parts // spec.planes(kind) * spec.token_bytes
    tiling = granularity_bytes // gcd(token_bytes, granularity_bytes)
    usual = sorted(_USUAL_BLOCK_TOKENS, key=lambda tokens: abs(tokens - spec.block_tokens))
    return [replace(spec, block_tokens=tokens) for tokens in (*usual, tiling)]


def _first_that_works(lay: Callable[[LayoutSpec], Layout], candidates: list[LayoutSpec]) -> Layout:
    """The last candidate's refusal is passed on."""
    for candidate in candidates[:-1]:
        try:
            return lay(candidate)
        except GeometryError:  # the next one may do
            continue
    return lay(candidates[-1])
