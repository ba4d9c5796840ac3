# SPDX-License-Identifier: Apache-2.0
"""Which layout an engine gets: interleaved, unless something that reads the KV cache cannot follow its strides.

What cannot is found in vLLM's own configuration and in its attention backends, before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """`because` says what forbids the interleaved layout; empty where nothing does."""

    interleaved: bool
    because: str = ""


def choose_layout(config: Any, backends: Mapping[str, Any], *, dense_latents: bool, wanted: bool | None) -> LayoutChoice:
    """`config`: a `KVCacheConfig`. `backends`: each layer's attention backend. `dense_latents`: whether MLA's kernels are a CPU's.
    `wanted`: what the settings ask for, None for whatever suits.

    Raises `EngineNotSupported` when the settings ask for the interleaved layout and it would give wrong answers.
    """
    because = next(_obstacles(config, backends, dense_latents), "")
    if wanted and because:
        raise EngineNotSupported(f"the interleaved layout cannot be used: {because}; unset KVCACHED_CONTIGUOUS_LAYOUT")
    return LayoutChoice(not because if wanted is None else wanted, because)


def backends_of(vllm_config: Any) -> dict[str, Any]:
    """The attention backend of each layer that has one."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    return {name: layer.get_attn_backend() for name, layer in layers.items()}


def _obstacles(config: Any, backends: Mapping[str, Any], dense_latents: bool) -> Iterator[str]:
    if dense_latents:
        yield "MLA on a CPU views a layer as one dense tensor"
    strided = hasattr(config.kv_cache_tensors[0], "layer_stride")
    for group in config.kv_cache_groups:
        kinds = {type(spec).__name__ for spec in specs_of(group.kv_cache_spec)}
        if "MambaSpec" in kinds:
            if not strided:
                yield "vLLM before 0.29 views the states of a layer as one dense tensor"
        elif not all(_takes(backends[layer], group.kv_cache_spec.block_size) for layer in group.layer_names if layer in backends):
            yield f"blocks of {group.kv_cache_spec.block_size} tokens are split for the attention kernels, which needs dense blocks"


def specs_of(spec: Any) -> tuple[Any, ...]:
    """The specs of a group's layers: one for all of them, or one for each."""
    return tuple(getattr(spec, "kv_cache_specs", {"": spec}).values())


def _takes(backend: Any, block_tokens: int) -> bool:
    """Whether a backend's kernels take blocks of this size as they are."""
    for size in backend.get_supported_kernel_block_sizes():
        if block_tokens == size if isinstance(size, int) else block_tokens % size.base == 0:
            return True
    return False
