# SPDX-License-Identifier: Apache-2.0
"""How many blocks a request needs, by each kind of group. The groups' real managers are seen in `tests/engines`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcached.engines.vllm.demand import Demand


def full(block_size: int = 32, **held: int) -> SimpleNamespace:
    return SimpleNamespace(block_size=block_size, req_to_blocks={name: [None] * blocks for name, blocks in held.items()})


def window(cap: int, *, name: str = "max_admission_blocks_per_request") -> SimpleNamespace:
    return SimpleNamespace(**vars(full()), **{name: cap})


def states(mode: str, block_size: int, guesses: int = 0, inside: int = 0) -> SimpleNamespace:
    spec = SimpleNamespace(num_speculative_blocks=guesses, num_prefill_checkpoint_blocks=inside)
    return SimpleNamespace(**vars(full(block_size)), mamba_cache_mode=mode, num_speculative_blocks=guesses, kv_cache_spec=spec)


def test_full_attention_needs_a_block_for_each_begun_one() -> None:
    assert [Demand([full(), full()]).held_at_most(tokens) for tokens in (1, 32, 33)] == [2, 2, 4]


@pytest.mark.parametrize("name", ["max_admission_blocks_per_request", "_max_admission_blocks_per_request"])
def test_a_window_holds_only_so_many(name: str) -> None:
    demand = Demand([full(), window(5, name=name)])
    assert demand.held_at_most(64) == 2 + 2
    assert demand.held_at_most(3200) == 100 + 5
    assert demand.missing("new", 3200) == 100 + 5


@pytest.mark.parametrize(("guesses", "inside", "most"), [(0, 0, 2), (3, 0, 5), (0, 1, 3)])
def test_aligned_states_are_few_however_long_the_request(guesses: int, inside: int, most: int) -> None:
    demand = Demand([states("align", 32, guesses, inside)])
    assert demand.held_at_most(3200) == demand.missing("new", 3200) == most
    assert demand.held_at_most(1) == min(1 + guesses, most)


def test_one_state_for_a_whole_request_and_one_for_each_block() -> None:
    assert Demand([states("none", 4096)]).held_at_most(3200) == 1
    assert Demand([states("none", 4096, 2)]).held_at_most(3200) == 3
    assert Demand([states("all", 32)]).held_at_most(3200) == 100


def test_what_a_request_has_is_not_missing() -> None:
    demand = Demand([full(here=3)])
    assert [demand.missing("here", tokens) for tokens in (64, 96, 97)] == [0, 0, 1]
    assert demand.missing("other", 97) == 4


def test_the_upper_bound_counts_all_and_a_copy_in_each_group() -> None:
    assert Demand([full(), window(5), states("align", 32)]).upper_bound(3200) == 3 * 101


class TestPutOff:
    """A state that is written in this step can be read in the next one."""

    def computed(self, *hashes: str) -> SimpleNamespace:
        return SimpleNamespace(blocks=([SimpleNamespace(block_hash=name) for name in hashes], []))

    def demand(self) -> Demand:
        of_states = states("align", 32)
        of_states.cached_blocks_this_step = {"new"}
        return Demand([of_states, full()])

    def test_where_the_last_block_found_is_of_this_step(self) -> None:
        assert self.demand().waits_for_a_state(self.computed("old", "new"))

    @pytest.mark.parametrize("hashes", [(), ("old",), ("new", "old")])
    def test_not_where_it_is_older(self, hashes: tuple[str, ...]) -> None:
        assert not self.demand().waits_for_a_state(self.computed(*hashes))

    def test_not_where_nothing_was_looked_up(self) -> None:
        assert not self.demand().waits_for_a_state(None)
