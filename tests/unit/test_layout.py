# SPDX-License-Identifier: Apache-2.0
"""Every element inside its block's pages, no two elements at one address, for odd shapes too."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcached.core.geometry import BlockGeometry
from kvcached.errors import GeometryError
from kvcached.units import KIB, MIB, ceil_div
from kvcached.views.dlpack import DeviceType, DLPackView
from kvcached.views.layout import Layout, LayoutKind, LayoutSpec, TensorLayout, choose_layout

GRANULARITIES = (64 * KIB, 2 * MIB, 4 * MIB)

specs = st.builds(
    LayoutSpec,
    layers=st.integers(1, 80),
    buffers=st.integers(1, 2),
    heads=st.integers(1, 8),
    head_size=st.integers(64, 576),
    element_bytes=st.integers(1, 2),
    block_tokens=st.integers(1, 1024),
)
small_specs = st.builds(
    LayoutSpec,
    layers=st.integers(1, 4),
    buffers=st.integers(1, 2),
    heads=st.integers(1, 8),
    head_size=st.integers(1, 12),
    element_bytes=st.integers(1, 2),
    block_tokens=st.integers(1, 8),
)


def offsets_of(tensor: TensorLayout) -> np.ndarray:
    """Offsets in bytes of all elements, in the tensor's shape."""
    axes = np.meshgrid(*(np.arange(size) for size in tensor.shape), indexing="ij", sparse=True)
    return np.asarray(tensor.offset_bytes + sum(axis * stride for axis, stride in zip(axes, tensor.strides_bytes, strict=True)))


@st.composite
def small_layouts(draw: st.DrawFn) -> Layout:
    spec = draw(small_specs)
    planes = draw(st.sampled_from([1, spec.parts]))
    block = spec.parts // planes * spec.payload_bytes
    stride = block + draw(st.integers(0, 6)) * spec.element_bytes
    page = block + draw(st.integers(0, 3 * block // spec.element_bytes)) * spec.element_bytes
    blocks = draw(st.integers(1, 7))
    return Layout(spec, BlockGeometry(block, stride, page, ceil_div(blocks * stride, page), planes, blocks))


@given(small_layouts())
def test_all_elements_lie_in_their_blocks_pages_and_no_two_share_a_byte(layout: Layout) -> None:
    spec, geometry = layout.spec, layout.geometry
    owners = np.zeros(geometry.range_bytes, np.int64)
    for layer, buffer in product(range(spec.layers), range(spec.buffers)):
        offsets = offsets_of(layout.tensor(layer, buffer))
        plane = (layer * spec.buffers + buffer) if geometry.planes > 1 else 0
        for byte in range(spec.element_bytes):
            np.add.at(owners, offsets.ravel() + byte, 1)
            pages = (offsets + byte - plane * geometry.plane_bytes) // geometry.page_bytes
            for block in range(geometry.num_blocks):
                if geometry.page_of(block) >= 0:
                    assert (pages[block] == geometry.page_of(block)).all()
    assert owners.max() == 1
    assert owners.sum() == geometry.num_blocks * spec.parts * spec.payload_bytes


def check_blocks(geometry: BlockGeometry) -> None:
    """A block that can be handed out lies on its page alone; blocks and planes follow each other without overlap."""
    per_page = geometry.max_blocks_per_page
    for block in {0, 1, per_page - 1, per_page, geometry.num_blocks // 2, geometry.num_blocks - 1} & set(range(geometry.num_blocks)):
        page = geometry.page_of(block)
        start = block * geometry.block_stride_bytes
        end = start + geometry.block_bytes
        assert end <= geometry.plane_bytes
        assert page < 0 or page * geometry.page_bytes <= start < end <= (page + 1) * geometry.page_bytes
        assert page < 0 or block in geometry.blocks_of(page)
    assert geometry.block_stride_bytes >= geometry.block_bytes
    assert geometry.waste <= 0.10
    assert geometry.usable_blocks > 0


def check_tensors(layout: Layout) -> None:
    """Strides nest, and the payloads of a block follow each other without overlap, so no two elements meet."""
    spec, geometry = layout.spec, layout.geometry
    first, last = layout.tensor(0, 0), layout.tensor(spec.layers - 1, spec.buffers - 1)
    assert first.strides_bytes == (
        geometry.block_stride_bytes,
        spec.heads * spec.head_size * spec.element_bytes,
        spec.head_size * spec.element_bytes,
        spec.element_bytes,
    )
    end = last.offset_of(0, spec.block_tokens - 1, spec.heads - 1, spec.head_size - 1) + spec.element_bytes
    assert end == last.offset_bytes + spec.payload_bytes
    second = layout.tensor((spec.parts > 1) // spec.buffers, (spec.parts > 1) % spec.buffers)
    step = second.offset_bytes - first.offset_bytes
    assert last.offset_bytes == (spec.parts - 1) * step
    if geometry.planes == 1:
        assert spec.parts == 1 or step >= spec.payload_bytes
        assert end <= geometry.block_bytes
    else:
        assert step >= geometry.plane_bytes
        assert end - (spec.parts - 1) * step <= geometry.block_bytes
        assert last.offset_bytes + geometry.plane_bytes <= geometry.range_bytes


def working_pair(refusal: str) -> tuple[int, int]:
    pair = re.search(r"as do (\d+) tokens per block on pages of (\d+) bytes$", refusal)
    assert pair, refusal
    return int(pair[1]), int(pair[2])


def layout_or_refusal(spec: LayoutSpec, kind: LayoutKind, blocks: int, granularity: int, can_pad: bool) -> Layout | str:
    try:
        return choose_layout(spec, kind, blocks, granularity, can_pad_stride=can_pad)
    except GeometryError as error:
        return str(error)


@given(specs, st.sampled_from(LayoutKind), st.integers(1, 100_000), st.sampled_from(GRANULARITIES), st.booleans())
def test_any_shape_is_laid_out_right_or_refused_with_a_pair_that_works(
    spec: LayoutSpec, kind: LayoutKind, blocks: int, granularity: int, can_pad: bool
) -> None:
    layout = layout_or_refusal(spec, kind, blocks, granularity, can_pad)
    if isinstance(layout, str):
        tokens, page_bytes = working_pair(layout)
        layout = choose_layout(replace(spec, block_tokens=tokens), kind, blocks, granularity, can_pad_stride=can_pad)
        assert layout.geometry.page_bytes == page_bytes
    check_blocks(layout.geometry)
    check_tensors(layout)
    assert layout.kind is kind or spec.parts == 1


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", LayoutKind)
@pytest.mark.parametrize("can_pad", [False, True], ids=["natural", "padded"])
def test_sweep_of_shapes(granularity: int, kind: LayoutKind, can_pad: bool) -> None:
    shapes = product(
        (1, 2, 3, 5, 8), (64, 80, 96, 128, 192, 256, 576), (1, 2), (1, 8, 16, 32, 64, 784, 1024), (1, 2, 28, 36, 61, 80), (1, 2)
    )
    geometries: dict[tuple[int, int], BlockGeometry | None] = {}
    for heads, head_size, element_bytes, tokens, layers, buffers in shapes:
        spec = LayoutSpec(layers, buffers, heads, head_size, element_bytes, tokens)
        key = (spec.payload_bytes * spec.parts, spec.planes(kind))
        if key not in geometries:
            layout = layout_or_refusal(spec, kind, 3000, granularity, can_pad)
            if isinstance(layout, str):
                other_tokens, page_bytes = working_pair(layout)
                layout = choose_layout(replace(spec, block_tokens=other_tokens), kind, 3000, granularity, can_pad_stride=can_pad)
                assert layout.geometry.page_bytes == page_bytes
                geometries[key] = None
            else:
                geometries[key] = layout.geometry
            check_blocks(layout.geometry)
        geometry = geometries[key]
        if geometry:
            check_tensors(Layout(spec, geometry))
    assert sum(geometry is None for geometry in geometries.values()) <= len(geometries) * (0.01 if can_pad else 0.4)


def test_interleaved_keeps_a_block_in_one_stretch() -> None:
    spec = LayoutSpec(layers=32, buffers=2, heads=8, head_size=128, element_bytes=2, block_tokens=16)
    layout = choose_layout(spec, LayoutKind.INTERLEAVED, 4096, 2 * MIB, can_pad_stride=True)
    assert (layout.geometry.page_bytes, layout.geometry.max_blocks_per_page) == (16 * MIB, 8)
    assert layout.tensor(3, 1).offset_bytes == 7 * 32 * KIB
    assert layout.tensor(3, 1).strides == (MIB, 1024, 128, 1)
    assert layout.tensor(3, 1).strides_bytes == (2 * MIB, 2048, 256, 2)
    assert layout.tensor(3, 1).shape == (4096, 16, 8, 128)


def test_per_layer_keeps_a_tensor_in_one_stretch() -> None:
    spec = LayoutSpec(layers=32, buffers=2, heads=8, head_size=128, element_bytes=2, block_tokens=16)
    layout = choose_layout(spec, LayoutKind.PER_LAYER, 4096, 2 * MIB, can_pad_stride=False, page_bytes_floor=4 * MIB)
    assert (layout.geometry.page_bytes, layout.geometry.planes) == (4 * MIB, 64)
    assert layout.tensor(3, 1).offset_bytes == 7 * layout.geometry.plane_bytes == 7 * 128 * MIB
    assert layout.tensor(3, 1).strides == (16 * 1024, 1024, 128, 1)


def test_a_refusal_names_the_usual_number_of_tokens_that_is_nearest() -> None:
    spec = LayoutSpec(layers=61, buffers=1, heads=1, head_size=576, element_bytes=2, block_tokens=500)
    with pytest.raises(GeometryError, match="as do 512 tokens per block on pages of 35979264 bytes"):
        choose_layout(spec, LayoutKind.INTERLEAVED, 100, 64 * KIB, can_pad_stride=False)


def test_a_refusal_names_whole_pages_when_no_usual_number_works() -> None:
    spec = LayoutSpec(layers=80, buffers=2, heads=8, head_size=65 * 1024 + 1, element_bytes=1, block_tokens=1)
    with pytest.raises(GeometryError, match="as do 8192 tokens per block") as refusal:
        choose_layout(spec, LayoutKind.INTERLEAVED, 100, 2 * MIB, can_pad_stride=False)
    tokens, page_bytes = working_pair(str(refusal.value))
    layout = choose_layout(replace(spec, block_tokens=tokens), LayoutKind.INTERLEAVED, 100, 2 * MIB, can_pad_stride=False)
    assert layout.geometry.page_bytes == page_bytes


@given(small_layouts())
def test_a_tensor_over_real_memory_agrees_with_the_arithmetic(layout: Layout) -> None:
    assume(layout.spec.element_bytes == 1)
    memory = np.zeros(layout.geometry.range_bytes, np.uint8)
    tensor = layout.tensor(layout.spec.layers - 1, layout.spec.buffers - 1)
    address = memory.ctypes.data + tensor.offset_bytes
    array = np.from_dlpack(DLPackView(address, tensor.shape, tensor.strides, "uint8", DeviceType.CPU, 0, memory))
    array[...] = 1
    assert set(np.flatnonzero(memory)) == set(offsets_of(tensor).ravel())


@pytest.mark.parametrize("name", ["layers", "buffers", "heads", "head_size", "element_bytes", "block_tokens"])
def test_every_number_must_be_positive(name: str) -> None:
    numbers = {"layers": 1, "buffers": 1, "heads": 1, "head_size": 64, "element_bytes": 2, "block_tokens": 16, name: 0}
    with pytest.raises(GeometryError, match=rf"^{name} is 0; 1 is the least that works"):
        LayoutSpec(**numbers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planes": 3}, "3 planes cannot hold 4 tensors; 1 or 4 planes work"),
        ({"block_bytes": 8}, "a block has 32 bytes in each plane, not 8; block_bytes=32 works"),
        ({"block_stride_bytes": 33}, "block_stride_bytes=33 cuts elements of 2 bytes; block_stride_bytes=34 works"),
        ({"page_bytes": 65}, "page_bytes=65 cuts elements of 2 bytes; page_bytes=66 works"),
    ],
)
def test_a_layout_over_another_geometry_is_refused(changes: dict[str, int], message: str) -> None:
    sizes = {"block_bytes": 32, "block_stride_bytes": 32, "page_bytes": 64, "pages": 20, "planes": 1, "num_blocks": 10, **changes}
    with pytest.raises(GeometryError, match=re.escape(message)):
        Layout(LayoutSpec(2, 2, 1, 4, 2, 1), BlockGeometry(**sizes))


@pytest.mark.parametrize(("layer", "buffer"), [(-1, 0), (2, 0), (0, -1), (0, 2)])
def test_a_tensor_that_does_not_exist_is_refused(layer: int, buffer: int) -> None:
    layout = choose_layout(LayoutSpec(2, 2, 1, 64, 2, 16), LayoutKind.PER_LAYER, 10, 64 * KIB, can_pad_stride=True)
    with pytest.raises(IndexError, match=rf"layer {layer}, buffer {buffer} of 2 layers with 2 buffers"):
        layout.tensor(layer, buffer)
