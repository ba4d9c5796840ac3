# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcached.engines.vllm.growth import PAUSE_S, Growth


class World:
    """A pool that grants what `grants` says, one after the other, then nothing; time passes by rests alone."""

    def __init__(self, *grants: int) -> None:
        self.now_s = 0.0
        self.grants = list(grants)
        self.asked: list[int] = []
        self.growth = Growth(SimpleNamespace(grow=self.grow), lambda: self.now_s)

    def grow(self, blocks: int) -> int:
        self.asked.append(blocks)
        return self.grants.pop(0) if self.grants else 0

    def rest(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("runs", [False, True])
def test_a_pool_that_refused_is_not_asked_again_at_once(runs: bool) -> None:
    world = World()
    assert [world.growth.ask(3, runs=runs), world.growth.ask(3, runs=runs)] == [0, 0]
    assert (world.asked, world.growth.was_refused()) == ([3], True)
    world.rest(PAUSE_S)
    assert not world.growth.was_refused()
    world.growth.ask(2, runs=runs)
    assert world.asked == [3, 2]


def test_a_request_that_runs_is_asked_for_although_one_that_waits_was_refused() -> None:
    world = World(0, 1)
    assert [world.growth.ask(9, runs=False), world.growth.ask(1, runs=True)] == [0, 1]
    assert world.asked == [9, 1]
