# SPDX-License-Identifier: Apache-2.0
"""Engines, clients and operators on a virtual clock around a fleet, and what must hold at every moment."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from kvcached.controller.fleet import Fleet
from kvcached.controller.states import AWAKE, Admit, Effect, Hurry, Interrupt, Refuse, Removed, Renewed, Sleep, Spec, Start, State, Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SLACK_S = 400.0  # sleep that fails is tried again after pauses of a minute at most, and ends the server then


@dataclass(slots=True)
class Engine:
    """What the world knows by itself: the server, not the fleet's opinion of it."""

    spec: Spec
    awake: bool = False
    running: bool = False
    attempt: int | None = None
    begun: int = 0
    open: set[int] = field(default_factory=set)

    @property
    def taken_bytes(self) -> int:
        return self.spec.cost_bytes if self.awake else self.spec.rest_bytes if self.running else 0


class World:
    """`faults`: how likely an operation fails."""

    def __init__(self, specs: Iterable[Spec], seed: int, card_bytes: dict[str, int], faults: float = 0.0, hold_s: float = 5.0) -> None:
        specs = list(specs)
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.faults = faults
        self.card_bytes = card_bytes
        self.fleet = Fleet(specs, 0.0, card_bytes, hold_s)
        self.engines = {spec.name: Engine(spec) for spec in specs}
        self.asked: dict[int, tuple[str, float]] = {}
        self.settled: dict[int, Effect] = {}
        self.counts: dict[str, int] = {}
        self.durations_s: Callable[[], float] = lambda: self.random.expovariate(1 / 20)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._tick_s: float | None = None
        self._last_tick_s = -1.0
        self._ticks_at_once = 0
        self.perform(self.fleet.begin(0.0))

    # ------------------------------------------------------------------ the clock

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, action)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
            self.check()
        self.now_s = until_s

    def _remind(self) -> None:
        due_s = self.fleet.next_tick_s(self.now_s)
        if due_s is not None and (self._tick_s is None or due_s < self._tick_s):
            self._tick_s = due_s
            self.at(due_s, self._tick)

    def _tick(self) -> None:
        self._tick_s = None
        self._ticks_at_once = self._ticks_at_once + 1 if self._last_tick_s == self.now_s else 0
        self._last_tick_s = self.now_s
        assert self._ticks_at_once < 50, "ticks that change nothing"
        self.perform(self.fleet.tick(self.now_s))

    # ------------------------------------------------------------------ what the shell does

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            kind = type(effect).__name__
            self.counts[kind] = self.counts.get(kind, 0) + 1
            match effect:
                case Admit(ticket) | Refuse(ticket):
                    self._settle(ticket, effect)
                case Start(name, attempt) | Wake(name, attempt):
                    self._rouse(self.engines[name], attempt, isinstance(effect, Wake))
                case Sleep(name, attempt, stop):
                    self._lay_down(self.engines[name], attempt, stop)
                case Hurry(name):
                    for ticket in list(self.engines[name].open):
                        self.after(0.0, lambda ticket=ticket: self.leave(ticket))
                case Interrupt(name, attempt):
                    engine = self.engines[name]
                    assert engine.attempt == attempt, "there is nothing to be ended"
                    self.after(self.random.uniform(0, 2), lambda engine=engine, begun=engine.begun: self._interrupted(engine, begun))
                case Removed(name):
                    assert not self.engines[name].running
                    assert not self.engines[name].open
                case Renewed(name):
                    assert not self.engines[name].running
                    assert not self.engines[name].open
        self._remind()

    def _settle(self, ticket: int, effect: Effect) -> None:
        assert ticket not in self.settled, "a ticket was settled twice"
        self.settled[ticket] = effect
        if isinstance(effect, Admit):
            name, asked_s = self.asked[ticket]
            assert self.now_s - asked_s <= self.engines[name].spec.queue_timeout_s + 1e-6
            self.engines[name].open.add(ticket)
            self.after(self.durations_s(), lambda: self.leave(ticket))

    def _rouse(self, engine: Engine, attempt: int, is_wake: bool) -> None:
        assert engine.attempt is None, "two operations at once"
        assert engine.running == is_wake
        assert not engine.awake
        engine.attempt, engine.awake, engine.running = attempt, True, True
        engine.begun += 1
        begun, takes_s = engine.begun, self.random.uniform(0.1, 3) if is_wake else self.random.uniform(5, 60)
        self.after(takes_s, lambda: self._roused(engine, begun, attempt, is_wake))

    def _interrupted(self, engine: Engine, begun: int) -> None:
        if (attempt := engine.attempt) is not None and engine.begun == begun:
            engine.attempt, engine.awake, engine.running = None, False, False
            self.perform(self.fleet.failed(engine.spec.name, attempt, "it was ended", self.now_s))

    def _roused(self, engine: Engine, begun: int, attempt: int, is_wake: bool) -> None:
        if engine.begun != begun or engine.attempt != attempt:
            return  # it was interrupted
        engine.attempt = None
        if self.random.random() >= self.faults:
            self.perform(self.fleet.done(engine.spec.name, attempt, self.now_s))
            return
        no_memory = self.random.random() < 0.5
        engine.awake, engine.running = False, no_memory and is_wake
        self.perform(self.fleet.failed(engine.spec.name, attempt, "bad luck", self.now_s, no_memory))

    def _lay_down(self, engine: Engine, attempt: int, stop: bool) -> None:
        assert engine.attempt is None, "two operations at once"
        assert not engine.open, "put to sleep with an open stream"
        engine.attempt = attempt
        self.after(self.random.uniform(0.1, 5), lambda: self._lain(engine, attempt, stop))

    def _lain(self, engine: Engine, attempt: int, stop: bool) -> None:
        engine.attempt = None
        if not stop and self.random.random() < self.faults:
            self.perform(self.fleet.failed(engine.spec.name, attempt, "bad luck", self.now_s))
            return
        engine.awake, engine.running = False, not stop
        self.perform(self.fleet.done(engine.spec.name, attempt, self.now_s))

    # ------------------------------------------------------------------ clients, operators and accidents

    def ask(self, name: str) -> int:
        ticket, effects = self.fleet.asked(name, self.now_s)
        self.asked[ticket] = (name, self.now_s)
        self.perform(effects)
        return ticket

    def leave(self, ticket: int) -> None:
        """The last byte, or a client that hangs up."""
        self.engines[self.asked[ticket][0]].open.discard(ticket)
        self.perform(self.fleet.left(ticket, self.now_s))

    def crash(self, name: str) -> None:
        """`kill -9`, where no operation is under way; its streams break."""
        engine = self.engines[name]
        if engine.attempt is not None or not engine.running:
            return
        engine.running = engine.awake = False
        self.perform(self.fleet.ended(name, "killed", self.now_s))
        for ticket in list(engine.open):
            self.leave(ticket)

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        awake = [engine for engine in self.engines.values() if engine.awake]
        for card, most in self.card_bytes.items():
            assert sum(engine.taken_bytes for engine in self.engines.values() if engine.spec.card == card) <= most, "more than the card has"
        groups = [engine.spec.group for engine in awake if engine.spec.group is not None]
        assert len(groups) == len(set(groups)), "two of a group are awake"
        for name, model in self.fleet.models.items():
            self._check_model(self.engines[name], model.state)

    def _check_model(self, engine: Engine, state: State) -> None:
        model = self.fleet.models[engine.spec.name]
        if state is not State.GOING_TO_SLEEP:  # a server that sleeps is ended from there, too
            assert engine.awake == (state in AWAKE), f"{engine.spec.name} is {state.value}, its server is otherwise"
        assert not engine.open or state in (State.READY, State.DRAINING), "an open stream on a model that is not awake"
        assert len(model.open) <= engine.spec.concurrency
        assert len(model.waiting) <= engine.spec.queue
        assert not (state is State.READY and model.waiting and model.has_room), "a request waits for nothing"
        ttl_s = engine.spec.ttl_s
        if ttl_s is not None and model.sleeps_by_itself and state is State.READY:
            assert model.idle_s(self.now_s) <= ttl_s + SLACK_S, "awake for ever"
