# SPDX-License-Identifier: Apache-2.0
"""The states of layers with linear attention: one slot has those of all layers and kinds, side by side in a padded cell.

A state is as large as thousands of tokens, so a cell may be larger than a page usually is; cells tile the page all the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvcached.engines.sglang.memory import PoolMemory
from kvcached.engines.sglang.placement import ALIGNMENT_BYTES
from kvcached.units import round_up

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from kvcached.engines.sglang.memory import EngineMemory

STATES_OF_A_REQUEST: Final = 3
"""What a running request may have to hold at the same time: its own, the one that it has put into the prefix tree, and the next of those.
With SGLang's extra buffers come those that it keeps between."""


class State(NamedTuple):
    """One kind of state, of `layers` layers."""

    layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Of one layer in a cell."""
        return round_up(math.prod(self.shape) * self.dtype.itemsize, ALIGNMENT_BYTES)


def states_of(arguments: Mapping[str, Any]) -> list[State]:
    """`arguments`: what SGLang's pool of states is made with."""
    params, layers = arguments["cache_params"], len(arguments["mamba_layer_ids"])
    convolutions = [State(layers, tuple(shape), params.dtype.conv) for shape in params.shape.conv]
    return [*convolutions, State(layers, tuple(params.shape.temporal), params.dtype.temporal)]


class StateMemory(PoolMemory):
    """The memory of SGLang's pool of states; a page of its allocator is one slot."""

    def __init__(self, engine: EngineMemory, state_pool: Any, states: Sequence[State], *, slots: int) -> None:
        self._states = states
        rows_bytes = [state.row_bytes for state in states for _ in range(state.layers)]
        super().__init__(engine, state_pool, rows_bytes, slots=slots, page_slots=1, part="states")

    def tensors(self) -> list[torch.Tensor]:
        """One tensor `[layers, slots, *shape]` for each kind."""
        tensors, row = [], 0
        for state in self._states:
            size = state.dtype.itemsize
            dense = [math.prod(state.shape[place + 1 :]) for place in range(len(state.shape))]
            strides = (state.row_bytes // size, self.placement.slot_bytes // size, *dense)
            shape = (state.layers, self.slots, *state.shape)
            tensors.append(self.view(self.placement.offsets_bytes[row], shape, strides, state.dtype))
            row += state.layers
        return tensors
