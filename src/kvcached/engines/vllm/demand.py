# SPDX-License-Identifier: Apache-2.0
"""How many blocks a request needs, by the rules of vLLM's managers, one for each group of layers.

A window gives back what slid out of it, and a state what came before it, so their requests hold only so many at one time, whatever their
length. vLLM says that there are too few blocks, never how many it lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence


class Demand:
    """`managers`: those of an engine's groups, in their order."""

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._most = [_most_at_one_time(manager) for manager in managers]

    def held_at_most(self, tokens: int) -> int:
        """Blocks that a request of so many tokens holds at one time."""
        return sum(self._capped(group, _blocks_of(manager, tokens)) for group, manager in enumerate(self._managers))

    def missing(self, request_id: str, tokens: int) -> int:
        """New blocks that a request asks for which is to have so many tokens. Its list keeps a place for each block that it gave back."""
        return sum(
            self._capped(group, max(0, _blocks_of(manager, tokens) - len(manager.req_to_blocks.get(request_id, ()))))
            for group, manager in enumerate(self._managers)
        )

    def upper_bound(self, tokens: int) -> int:
        """More than vLLM can ever ask for at once: as if nothing were shared or given back, and a copy in each group."""
        return sum(_blocks_of(manager, tokens) + 1 for manager in self._managers)

    def waits_for_a_state(self, computed: Any) -> bool:
        """Whether vLLM puts a request off to the next step, since the state that it begins with is written in this one: it says so by
        asking for more blocks than there are, and no memory would help. `computed`: blocks found in the cache, by group, or None.
        """
        if computed is None:
            return False
        return any(
            bool(blocks) and blocks[-1].block_hash in getattr(manager, "cached_blocks_this_step", ())
            for manager, blocks in zip(self._managers, computed.blocks, strict=True)
        )

    def _capped(self, group: int, blocks: int) -> int:
        most = self._most[group]
        return blocks if most is None else min(blocks, most)


def _blocks_of(manager: Any, tokens: int) -> int:
    """With those that hold the states of tokens which are only guessed."""
    return ceil_div(tokens, manager.block_size) + int(getattr(manager, "num_speculative_blocks", 0))


def _most_at_one_time(manager: Any) -> int | None:
    """Blocks of one request, however long; None where they grow with it."""
    for name in ("max_admission_blocks_per_request", "_max_admission_blocks_per_request"):
        cap = getattr(manager, name, None)
        if cap is not None:
            return int(cap)
    if getattr(manager, "mamba_cache_mode", "") != "align":
        return None
    spec = manager.kv_cache_spec  # a state and the one that is made of it, what is guessed, and one inside a long prompt
    return 2 + int(spec.num_speculative_blocks) + int(getattr(spec, "num_prefill_checkpoint_blocks", 0))
