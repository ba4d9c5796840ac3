# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvcached.engines.vllm.growth import PATIENCE_S, PAUSE_S, Growth

PAGE = 1 << 20


class World:
    """A pool that grants what `grants` says, one after the other, then nothing; time passes by rests alone."""

    def __init__(self, *grants: int, spare_bytes: int = 0, held_pages: int = 1) -> None:
        self.now_s = 0.0
        self.grants = list(grants)
        self.asked: list[int] = []
        self.pool = SimpleNamespace(
            grow=self.grow,
            counts=lambda: SimpleNamespace(held_pages=held_pages, limit_pages=8),
            others_spare_bytes=lambda: spare_bytes,
            geometry=SimpleNamespace(release_step_bytes=PAGE),
        )
        self.growth = Growth(self.pool, lambda: self.now_s, self.rest)

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


def test_for_a_request_that_runs_others_are_asked_again_while_they_hold_what_they_can_give() -> None:
    world = World(1, 0, 0, 2, spare_bytes=PAGE)
    assert world.growth.ask(3, runs=True) == 3
    assert world.asked == [3, 2, 2, 2]
    assert not world.growth.was_refused()


def test_patience_has_an_end() -> None:
    world = World(spare_bytes=PAGE)
    assert world.growth.ask(1, runs=True) == 0
    assert PATIENCE_S <= world.now_s < 2 * PATIENCE_S


@pytest.mark.parametrize(("runs", "spare_bytes", "held_pages"), [(False, PAGE, 1), (True, PAGE - 1, 1), (True, PAGE, 8)])
def test_nobody_insists_who_only_waits_or_where_others_have_nothing_or_the_pool_is_at_its_limit(
    runs: bool, spare_bytes: int, held_pages: int
) -> None:
    world = World(spare_bytes=spare_bytes, held_pages=held_pages)
    assert world.growth.ask(1, runs=runs) == 0
    assert world.asked == [1]
