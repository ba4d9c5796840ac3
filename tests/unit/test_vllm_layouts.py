# SPDX-License-Identifier: Apache-2.0
"""Interleaved where all that reads the KV cache follows strides, per layer where something does not; asked for against that, refused."""

from types import SimpleNamespace

import pytest

from kvcached.engines.vllm.layouts import LayoutChoice, choose_layout
from kvcached.errors import EngineNotSupported


class MambaSpec(SimpleNamespace):
    pass


class FullAttentionSpec(SimpleNamespace):
    pass


class MultipleOf(SimpleNamespace):
    pass


def backend(*sizes):
    return SimpleNamespace(get_supported_kernel_block_sizes=lambda: list(sizes))


def config(*specs, strided=True):
    tensor = SimpleNamespace(layer_stride=0) if strided else SimpleNamespace()
    groups = [SimpleNamespace(layer_names=[f"l{number}"], kv_cache_spec=spec) for number, spec in enumerate(specs)]
    return SimpleNamespace(kv_cache_tensors=[tensor], kv_cache_groups=groups)


ATTENTION, STATES = FullAttentionSpec(block_size=96), MambaSpec(block_size=1024)
MIXED_SPECS = SimpleNamespace(block_size=96, kv_cache_specs={"a": FullAttentionSpec(block_size=96), "b": MambaSpec(block_size=96)})


def choose(found, *sizes, dense_latents=False, wanted=None):
    return choose_layout(found, {"l0": backend(*sizes)}, dense_latents=dense_latents, wanted=wanted)


@pytest.mark.parametrize("sizes", [(96,), (64, 96), (MultipleOf(base=32),), (64, MultipleOf(base=16))])
def test_blocks_that_the_kernels_take_as_they_are_lie_side_by_side(sizes):
    assert choose(config(ATTENTION), *sizes) == LayoutChoice(interleaved=True)


@pytest.mark.parametrize("sizes", [(32,), (16, 32, 64), (MultipleOf(base=64),)])
def test_blocks_that_are_split_for_the_kernels_lie_layer_by_layer(sizes):
    choice = choose(config(ATTENTION), *sizes)
    assert not choice.interleaved
    assert "blocks of 96 tokens are split" in choice.because


def test_a_backend_that_cannot_follow_counts_wherever_it_is():
    backends = {"l0": backend(96), "l1": backend(32)}
    one_group = config(ATTENTION)
    one_group.kv_cache_groups[0].layer_names.append("l1")
    for found in (config(ATTENTION, ATTENTION), one_group):
        assert not choose_layout(found, backends, dense_latents=False, wanted=None).interleaved


@pytest.mark.parametrize("spec", [STATES, MIXED_SPECS])
def test_states_lie_layer_by_layer_where_vllm_views_them_dense(spec):
    assert "states" in choose(config(ATTENTION, spec, strided=False), 96).because
    assert choose(config(ATTENTION, spec, strided=True), 96).interleaved


def test_latents_on_a_cpu_lie_layer_by_layer():
    assert "MLA" in choose(config(ATTENTION), 96, dense_latents=True).because


def test_what_the_settings_ask_for_is_done_where_it_is_right_and_refused_where_not():
    assert choose(config(ATTENTION), 96, wanted=True).interleaved
    assert choose(config(ATTENTION), 96, wanted=False) == LayoutChoice(interleaved=False)
    assert not choose(config(ATTENTION), 32, wanted=False).interleaved
    with pytest.raises(EngineNotSupported, match=r"blocks of 96 tokens are split.*unset KVCACHED_CONTIGUOUS_LAYOUT"):
        choose(config(ATTENTION), 32, wanted=True)
