# SPDX-License-Identifier: Apache-2.0
"""The fleet against engines, clients and accidents: any order of events, and 24 hours of virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from controller_world import World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcached.controller.states import AT_REST, UNDER_WAY, Admit, Refuse, Spec, State, Why
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
CARDS = {"cuda:0": 100, "cuda:1": 60}
SPECS = (
    Spec("chat", concurrency=4, queue=20, queue_timeout_s=600, ttl_s=300, card="cuda:0", cost_bytes=40, priority=5, wake_guess_s=2),
    Spec("code", concurrency=2, queue=5, queue_timeout_s=300, ttl_s=60, card="cuda:0", cost_bytes=50, wake_guess_s=20),
    Spec("large", concurrency=8, queue=50, queue_timeout_s=900, ttl_s=120, card="cuda:0", cost_bytes=80, wake_guess_s=40),
    Spec("thin", ttl_s=100, queue_timeout_s=500, card="cuda:0", cost_bytes=30, rest_bytes=25, wake_guess_s=0.1),
    Spec("left", group="twins", ttl_s=200, queue_timeout_s=400, card="cuda:1", cost_bytes=30),
    Spec("right", group="twins", queue_timeout_s=400, card="cuda:1", cost_bytes=30, sleep_stops=True),
    Spec("kept", keep=True, pin=True, card="cuda:1", cost_bytes=20, ttl_s=10),
    Spec("far", can_sleep=False, can_stop=False),
)
NAMES = [spec.name for spec in SPECS]


class FleetMachine(RuleBasedStateMachine):
    """Hypothesis picks what happens and how much time passes."""

    @initialize(seed=st.integers(0, 2**16), faults=st.sampled_from([0.0, 0.3, 1.0]), hold_s=st.sampled_from([0.0, 5.0]))
    def begin(self, seed: int, faults: float, hold_s: float) -> None:
        self.world = World(SPECS, seed, CARDS, faults, hold_s)
        self.tickets: list[int] = []

    def stays(self, name: str) -> bool:
        return name in self.world.fleet.models and not self.world.fleet.models[name].retiring

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 12))
    def ask(self, name: str, count: int) -> None:
        for _ in range(count):
            if name in self.world.fleet.models:
                self.tickets.append(self.world.ask(name))

    @rule(pick=st.integers(0, 1000))
    def hang_up(self, pick: int) -> None:
        if self.tickets:
            self.world.leave(self.tickets[pick % len(self.tickets)])

    @rule(name=st.sampled_from(NAMES[:-1]), hurry=st.booleans())
    def sleep(self, name: str, hurry: bool) -> None:
        if name in self.world.fleet.models:
            self.world.perform(self.world.fleet.wish_sleep(name, self.world.now_s, hurry))

    @rule(name=st.sampled_from(NAMES))
    def wake(self, name: str) -> None:
        if self.stays(name):
            self.world.perform(self.world.fleet.wish_wake(name, self.world.now_s))

    @rule(name=st.sampled_from(NAMES))
    def change(self, name: str) -> None:
        if self.stays(name):
            self.world.perform(self.world.fleet.renew(self.world.fleet.models[name].spec, self.world.now_s))

    @rule(name=st.sampled_from(NAMES))
    def retire(self, name: str) -> None:
        if name in self.world.fleet.models:
            self.world.perform(self.world.fleet.retire(name, self.world.now_s))

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: str) -> None:
        if name not in self.world.fleet.models:
            self.world.perform(self.world.fleet.add(self.world.engines[name].spec, self.world.now_s))

    @rule(name=st.sampled_from(NAMES))
    def refuse_what_is_leaving(self, name: str) -> None:
        if name in self.world.fleet.models and not self.stays(name):
            for misuse in (self.world.fleet.add, self.world.fleet.renew):
                with pytest.raises(Misuse):
                    misuse(self.world.engines[name].spec, self.world.now_s)

    @rule(name=st.sampled_from(NAMES))
    def crash(self, name: str) -> None:
        self.world.crash(name)

    @rule(passed_s=st.sampled_from([0.01, 0.5, 3.0, 20.0, 100.0, 1000.0]))
    def wait(self, passed_s: float) -> None:
        self.world.run(self.world.now_s + passed_s)

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            come_to_rest(self.world)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def come_to_rest(world: World) -> None:
    """No more faults and no more requests: everything is settled, and what may sleep does."""
    world.faults = 0.0
    world.run(world.now_s + 3 * HOUR_S)
    world.check()
    assert not world.fleet._owner, "a request waits for ever"
    for name, model in world.fleet.models.items():
        assert not model.retiring, f"{name} never goes"
        assert model.state not in UNDER_WAY, f"{name} is stuck: {model.state.value}"
        assert model.state in (*AT_REST, State.READY), f"{name} is stuck: {model.state.value}"
        if model.spec.ttl_s is not None and model.sleeps_by_itself:
            assert model.state in AT_REST, f"{name} is awake for ever"


class Day:
    """Random traffic: bursts, long streams, clients that hang up, actions, accidents."""

    def __init__(self, seed: int, faults: float) -> None:
        self.world = World(SPECS, seed, CARDS, faults)
        self.random = self.world.random
        self.world.durations_s = lambda: self.random.choice([0.2, 3.0, 30.0, 700.0]) * self.random.random()
        for name in NAMES:
            self.later(600.0, lambda name=name: self.burst(name))
            self.later(7200.0, lambda name=name: self.act(name))
            self.later(6000.0, lambda name=name: self.accident(name))

    def later(self, mean_s: float, action: Callable[[], None]) -> None:
        time_s = self.world.now_s + self.random.expovariate(1 / mean_s)
        if time_s < DAY_S:
            self.world.at(time_s, action)

    def burst(self, name: str) -> None:
        for _ in range(self.random.choice([1, 1, 2, 8, 40])):
            ticket = self.world.ask(name)
            if self.random.random() < 0.1:
                self.later(20.0, lambda ticket=ticket: self.world.leave(ticket))
        self.later(self.random.choice([5.0, 120.0, 2000.0]), lambda: self.burst(name))

    def act(self, name: str) -> None:
        fleet, now_s = self.world.fleet, self.world.now_s
        if self.random.random() < 0.5 and fleet.models[name].spec.can_sleep:
            self.world.perform(fleet.wish_sleep(name, now_s, hurry=self.random.random() < 0.3))
        else:
            self.world.perform(fleet.wish_wake(name, now_s))
        self.later(7200.0, lambda: self.act(name))

    def accident(self, name: str) -> None:
        self.world.crash(name)
        if self.random.random() < 0.2:
            self.world.perform(self.world.fleet.renew(self.world.fleet.models[name].spec, self.world.now_s))
        self.later(6000.0, lambda: self.accident(name))


@pytest.mark.parametrize(("seed", "faults"), [(1, 0.0), (2, 0.1), (3, 0.5)])
def test_a_day(seed: int, faults: float) -> None:
    day = Day(seed, faults)
    day.world.run(DAY_S)
    come_to_rest(day.world)
    admitted = sum(isinstance(effect, Admit) for effect in day.world.settled.values())
    assert len(day.world.asked) > 5_000
    assert admitted > len(day.world.asked) / 4
    assert day.world.counts["Wake"] > 50
    if not faults:  # what failed then was a crash, and those are too few to lose patience with
        reasons = {effect.why for effect in day.world.settled.values() if isinstance(effect, Refuse)}
        assert reasons <= {Why.QUEUE_FULL, Why.QUEUE_TIMEOUT}


def test_two_busy_models_that_exclude_each_other_both_serve() -> None:
    specs = [Spec(name, group="g", queue=1000, queue_timeout_s=600.0) for name in ("a", "b")]
    world = World(specs, 7, {})
    world.durations_s = lambda: 2.0

    def again(name: str) -> None:
        world.ask(name)
        if world.now_s < HOUR_S:
            world.after(1.0, lambda: again(name))

    again("a")
    again("b")
    world.run(2 * HOUR_S)
    refused = [effect for effect in world.settled.values() if isinstance(effect, Refuse)]
    assert not refused
    assert len(world.settled) == len(world.asked) > 7000
