# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's layers come to lie: every byte of a block within its block's pages, no two layers in one place, in both eras."""

from types import SimpleNamespace

import pytest

from kvcached.core.geometry import choose_geometry
from kvcached.engines.vllm.placement import Allocation, measure, place
from kvcached.errors import EngineNotSupported
from kvcached.units import KIB, MIB

BLOCKS = 96


def group(layers, page_bytes):
    return SimpleNamespace(layer_names=list(layers), kv_cache_spec=SimpleNamespace(page_size_bytes=page_bytes))


def old(pages, groups=1):
    """Up to 0.28: a tensor for each place, shared by one layer of each group."""
    tensors = [
        SimpleNamespace(size=page * BLOCKS, shared_by=[f"g{number}l{place}" for number in range(groups)], offset=0, block_stride=0)
        for place, page in enumerate(pages)
    ]
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[group([f"g{number}l{place}" for place in range(len(pages))], pages[0]) for number in range(groups)],
    )


def new(page, layers, groups=1):
    """Since 0.29: a tensor for each group, all layers of it by strides, the groups over each other."""
    names = [[f"g{number}l{place}" for place in range(layers)] for number in range(groups)]
    tensors = [
        SimpleNamespace(size=page * BLOCKS * layers, layers=name, layer_stride=page * BLOCKS, block_stride=page, offset=0) for name in names
    ]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group(name, page) for name in names])


def extents(config, allocations, block):
    """layer -> (first byte, bytes) of one block, as vLLM computes it from the numbers that were set."""
    found = {}
    for index, tensor in enumerate(config.kv_cache_tensors):
        layers = getattr(tensor, "layers", None)
        if layers is not None:
            page = config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
            for place, name in enumerate(layers):
                found[name] = (tensor.offset + place * tensor.layer_stride + block * tensor.block_stride, page)
        elif tensor.block_stride:
            for name in tensor.shared_by:
                found[name] = (tensor.offset + block * tensor.block_stride, None)
        else:
            page = tensor.size // config.num_blocks
            for name in tensor.shared_by:
                found[name] = (allocations[index].offset_bytes + block * page, page)
    return found


def laid(config, interleaved):
    need = measure(config, interleaved=interleaved)
    geometry = choose_geometry(need.block_bytes, BLOCKS, 256 * KIB, planes=need.planes, can_pad_stride=need.can_pad_stride)
    return geometry, place(config, geometry)


@pytest.mark.parametrize("make", [lambda: old([48 * KIB] * 5, groups=2), lambda: new(48 * KIB, 5, groups=2)], ids=["old", "new"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_each_block_lies_on_its_own_pages_in_every_layer(make, interleaved):
    config = make()
    geometry, allocations = laid(config, interleaved)
    assert geometry.planes == (1 if interleaved else 5)
    for block in range(BLOCKS):
        page = geometry.page_of(block)
        places = extents(config, allocations, block)
        assert len(set(places.values())) == 5  # layers of two groups lie over each other, layers of one never
        for first, _ in places.values():
            within = first % geometry.plane_bytes
            assert page == -1 or page * geometry.page_bytes <= within <= (page + 1) * geometry.page_bytes - 48 * KIB
    assert sum(allocation.size_bytes for allocation in allocations) <= geometry.range_bytes


def test_interleaved_is_one_allocation_with_the_padded_distance():
    for config in (old([40 * KIB, 40 * KIB, 40 * KIB]), new(40 * KIB, 3)):
        geometry, allocations = laid(config, True)
        assert allocations == [Allocation(geometry.block_stride_bytes * BLOCKS, 0)]
        assert {tensor.block_stride for tensor in config.kv_cache_tensors} == {geometry.block_stride_bytes}
        assert {tensor.size for tensor in config.kv_cache_tensors} == {geometry.block_stride_bytes * BLOCKS}


def test_layers_of_different_sizes_can_be_interleaved_and_not_put_in_planes():
    pages = [32 * KIB, 64 * KIB, 32 * KIB]
    config = old(pages)
    for name, page in zip(("g0l0", "g0l1", "g0l2"), pages, strict=True):
        config.kv_cache_groups.append(group([name], page))
    config.kv_cache_groups = config.kv_cache_groups[1:]
    with pytest.raises(EngineNotSupported, match="cannot have planes of their own"):
        measure(config, interleaved=False)
    laid(config, True)
    assert [tensor.offset for tensor in config.kv_cache_tensors] == [0, 32 * KIB, 96 * KIB]


def test_a_layout_that_is_interleaved_already_is_only_padded():
    config = new(40 * KIB, 3)
    for tensor in config.kv_cache_tensors:
        tensor.layer_stride, tensor.block_stride = 40 * KIB, 120 * KIB
    geometry, _ = laid(config, False)
    (tensor,) = config.kv_cache_tensors
    assert (tensor.layer_stride, tensor.block_stride) == (40 * KIB, geometry.block_stride_bytes)


def test_places_that_the_blocks_do_not_divide_are_refused():
    config = new(40 * KIB, 3)
    config.kv_cache_tensors[0].offset = 1
    with pytest.raises(EngineNotSupported, match="do not divide"):
        laid(config, True)


def test_a_layer_of_no_group_is_refused():
    config = new(40 * KIB, 2)
    config.kv_cache_groups = [group(["other"], MIB)]
    with pytest.raises(EngineNotSupported, match="g0l0"):
        measure(config, interleaved=False)
