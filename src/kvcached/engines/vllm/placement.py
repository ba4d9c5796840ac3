# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's KV tensors lie in an arena: reads and rewrites the strides of a `KVCacheConfig`.

Interleaved: all layers of a block side by side, one plane. Per layer: one plane for each layer. vLLM's own reshape code makes
the views from the numbers that are set here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from kvcached.core.geometry import BlockGeometry


@dataclass(frozen=True, slots=True)
class Allocation:
    """One `torch.zeros` that vLLM will ask for: its size, and where in the arena it lies. Both in bytes."""

    size_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """What an arena must offer: `planes` planes with blocks of `block_bytes` each."""

    block_bytes: int
    planes: int
    can_pad_stride: bool


def layer_bytes(config: Any, layer: str) -> int:
    """Bytes of one block in one layer."""
    for group in config.kv_cache_groups:
        if layer in group.layer_names:
            spec = group.kv_cache_spec
            return int(getattr(spec, "kv_cache_specs", {}).get(layer, spec).page_size_bytes)
    raise EngineNotSupported(f"layer {layer} belongs to no KV cache group")


def _is_strided(config: Any) -> bool:
    """Since 0.29 one tensor record places many layers by strides in one allocation."""
    return hasattr(config.kv_cache_tensors[0], "layer_stride")


def _is_packed(config: Any) -> bool:
    """Whether vLLM itself has put the layers of a block side by side."""
    first = config.kv_cache_tensors[0]
    if _is_strided(config):
        return bool(first.block_stride == first.size // config.num_blocks)
    return bool(first.block_stride > 0)


def measure(config: Any, *, interleaved: bool) -> Need:
    """What the arena must offer for this config. Raises `EngineNotSupported` for tensors that cannot be laid out so."""
    blocks = config.num_blocks
    if interleaved or _is_packed(config):
        first = config.kv_cache_tensors[0]
        whole = _is_strided(config) or _is_packed(config)
        block_bytes = first.size // blocks if whole else sum(tensor.size // blocks for tensor in config.kv_cache_tensors)
        return Need(block_bytes, 1, can_pad_stride=True)
    sizes = {layer_bytes(config, layer) for tensor in config.kv_cache_tensors for layer in _layers(tensor)}
    if len(sizes) != 1:
        raise EngineNotSupported(
            f"layers with blocks of {sorted(sizes)} bytes cannot have planes of their own, which the per-layer layout needs"
        )
    page_bytes = sizes.pop()
    planes = config.kv_cache_tensors[0].size // (page_bytes * blocks) if _is_strided(config) else len(config.kv_cache_tensors)
    return Need(page_bytes, planes, can_pad_stride=False)


def _layers(tensor: Any) -> list[str]:
    return list(tensor.layers if hasattr(tensor, "layers") else tensor.shared_by)


def place(config: Any, geometry: BlockGeometry) -> list[Allocation]:
    """Rewrite the strides for `geometry`, and say what vLLM will allocate, in its order."""
    if geometry.planes > 1:
        return _place_strided_planes(config, geometry) if _is_strided(config) else _place_planes(config, geometry)
    if _is_strided(config):
        _interleave_strided(config, geometry.block_stride_bytes)
    else:
        _interleave(config, geometry.block_stride_bytes)
    return [Allocation(config.kv_cache_tensors[0].size, 0)]


def _interleave_strided(config: Any, stride_bytes: int) -> None:
    packed = _is_packed(config)
    for tensor in config.kv_cache_tensors:
        if not packed:
            tensor.offset = _exact(tensor.offset, config.num_blocks)
            tensor.layer_stride = _exact(tensor.layer_stride, config.num_blocks)
        tensor.block_stride = stride_bytes
        tensor.size = stride_bytes * config.num_blocks


def _interleave(config: Any, stride_bytes: int) -> None:
    packed, offset_bytes = _is_packed(config), 0
    for tensor in config.kv_cache_tensors:
        if not packed:
            tensor.offset = offset_bytes
            offset_bytes += _exact(tensor.size, config.num_blocks)
        tensor.block_stride = stride_bytes
        tensor.size = stride_bytes * config.num_blocks


def _place_strided_planes(config: Any, geometry: BlockGeometry) -> list[Allocation]:
    plane_bytes = geometry.block_bytes * config.num_blocks
    for tensor in config.kv_cache_tensors:
        tensor.offset = _exact(tensor.offset, plane_bytes) * geometry.plane_bytes
        tensor.layer_stride = _exact(tensor.layer_stride, plane_bytes) * geometry.plane_bytes
        tensor.size = geometry.range_bytes
    return [Allocation(geometry.range_bytes, 0)]


def _place_planes(config: Any, geometry: BlockGeometry) -> list[Allocation]:
    return [Allocation(tensor.size, plane * geometry.plane_bytes) for plane, tensor in enumerate(config.kv_cache_tensors)]


def _exact(value: int, divisor: int) -> int:
    if value % divisor:
        raise EngineNotSupported(f"vLLM places KV memory at {value} bytes, which {divisor} blocks or bytes do not divide")
    return value // divisor
