# SPDX-License-Identifier: Apache-2.0
"""The one owner of all model states, without I/O: events in, effects out. Pure.

Fifty requests to a sleeping model make one wake-up; an open stream is activity until its last byte; what leaves, leaves whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvcached.controller.placement import Room
from kvcached.controller.states import (
    AT_REST,
    CLOSING,
    PATIENCE,
    UNDER_WAY,
    Admit,
    Effect,
    Hurry,
    Interrupt,
    Left,
    Model,
    Refuse,
    Removed,
    Renewed,
    Sleep,
    Spec,
    Start,
    State,
    Wake,
    Why,
)
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
HEALTHY_S: Final = 60.0
"""A failure after so long awake counts as the first."""


class Fleet:
    """Not safe for threads: its shell serialises the calls and carries out the effects in order.

    `card_bytes`: what models may take of each card together. `hold_s`: how long a model that requests wait for may serve before it
    has to leave for others. Every call takes the time of one monotonic clock, and tells the shell when to say `tick`: see `next_tick_s`.
    """

    def __init__(self, specs: Iterable[Spec], now_s: float, card_bytes: Mapping[str, int] | None = None, hold_s: float = 5.0) -> None:
        self.models: dict[str, Model] = {}
        self.card_bytes = dict(card_bytes or {})
        self._hold_s = hold_s
        self._newest_ticket = 0
        self._owner: dict[int, str] = {}
        self.closing = False
        for spec in specs:
            self._insert(spec, now_s)

    # ------------------------------------------------------------------ the file

    def begin(self, now_s: float, found: Mapping[str, State] | None = None) -> list[Effect]:
        """Start what is to be kept awake. `found`: models whose servers are there already, READY or ASLEEP."""
        for name, state in (found or {}).items():
            self.models[name].was_found(state, now_s)
        return self._after(now_s, [])

    def add(self, spec: Spec, now_s: float) -> list[Effect]:
        """A new model, or new facts: what is open stays open, what failed is tried at once. Raises `Misuse` while the old one leaves."""
        old = self.models.get(spec.name)
        if old is None:
            self._insert(spec, now_s)
        elif old.retiring:
            raise Misuse(f"{spec.name} is being removed; add it again when it is gone")
        elif old.renewal is not None:
            old.renewal = spec
        else:
            old.spec = spec
            old.forget_failures(now_s)
        return self._after(now_s, [])

    def renew(self, spec: Spec, now_s: float) -> list[Effect]:
        """New facts that need a new server: open streams end, the old server ends, `Renewed` is said; a start is ended. Raises `Misuse`."""
        model = self.models[spec.name]
        if model.retiring:
            raise Misuse(f"{spec.name} is being removed; change it again when it is gone")
        model.renewal = spec
        return self._after(now_s, self._interrupt(model))

    def retire(self, name: str, now_s: float) -> list[Effect]:
        """It takes no further request; when its last stream has ended its server ends too, and `Removed` is said."""
        model = self.models[name]
        model.retiring, model.renewal, model.wanted_since_s = True, None, None
        why, retry_after_s, reason = (Why.CLOSING, 5.0, CLOSING) if self.closing else (Why.GONE, 0.0, f"{name} was removed")
        refused = self._refuse_all(model, why, retry_after_s, reason)
        if model.state is State.READY:
            model.move(State.DRAINING, now_s, "it was removed")
        return self._after(now_s, [*refused, *self._interrupt(model)])

    def _interrupt(self, model: Model) -> list[Effect]:
        return [Interrupt(model.name, model.attempt)] if model.state is State.STARTING else []

    def close(self, now_s: float) -> list[Effect]:
        """Everything is retired, and nothing is let in."""
        self.closing = True
        return [effect for name in list(self.models) for effect in self.retire(name, now_s)]

    def let_go(self, now_s: float) -> list[Effect]:
        """The same, but what is ready or asleep, and has no request, is `Left` to another gateway."""
        left = [name for name, model in self.models.items() if model.can_be_left]
        for name in left:
            del self.models[name]
        return [*map(Left, left), *self.close(now_s)]

    def _insert(self, spec: Spec, now_s: float) -> None:
        model = Model(spec, born_s=now_s, since_s=now_s, active_s=now_s)
        if spec.keep:
            model.wanted_since_s = now_s
        self.models[spec.name] = model

    # ------------------------------------------------------------------ requests

    def asked(self, name: str, now_s: float) -> tuple[int, list[Effect]]:
        """A request: its ticket, and what follows. `Admit` or `Refuse` comes for it once, here or later. Raises `KeyError`."""
        model = self.models[name]
        self._newest_ticket += 1
        ticket = self._newest_ticket
        refusal = self._refusal(model, ticket, now_s)
        if refusal is not None:
            return ticket, [refusal]
        self._owner[ticket] = name
        model.active_s = now_s
        model.waiting[ticket] = now_s + model.spec.queue_timeout_s
        return ticket, self._after(now_s, [])

    def _refusal(self, model: Model, ticket: int, now_s: float) -> Refuse | None:
        if self.closing:
            return Refuse(ticket, Why.CLOSING, 5.0, CLOSING)
        if model.retiring:
            return Refuse(ticket, Why.GONE, 0.0, f"{model.name} was removed")
        if model.state is State.FAILED and model.failures >= PATIENCE:
            return Refuse(ticket, Why.FAILED, max(1.0, model.retry_at_s - now_s), f"{model.name} failed: {model.reason}")
        admissible = model.state is State.READY and model.has_room and not model.waiting
        if len(model.waiting) >= model.spec.queue and not admissible:
            return Refuse(ticket, Why.QUEUE_FULL, 1.0, f"{model.spec.queue} requests wait for {model.name} already")
        return None

    def left(self, ticket: int, now_s: float) -> list[Effect]:
        """The last byte was sent, or the client went away, or the request failed. A ticket that is void or unknown does nothing."""
        name = self._owner.pop(ticket, None)
        if name is None:
            return []
        model = self.models[name]
        model.open.discard(ticket)
        model.waiting.pop(ticket, None)
        model.active_s = now_s
        return self._after(now_s, [])

    def _refuse_all(self, model: Model, why: Why, retry_after_s: float, reason: str) -> list[Effect]:
        refused: list[Effect] = [Refuse(ticket, why, retry_after_s, reason) for ticket in model.waiting]
        for ticket in model.waiting:
            del self._owner[ticket]
        model.waiting.clear()
        return refused

    # ------------------------------------------------------------------ actions

    def wish_sleep(self, name: str, now_s: float, hurry: bool = False) -> list[Effect]:
        """An action. While it starts or wakes the wish waits; requests that wait are served first. Raises `Misuse`, `KeyError`."""
        model = self.models[name]
        if not model.spec.can_sleep:
            raise Misuse(f"{name} cannot sleep")
        model.wanted_since_s = None
        if model.state in (State.READY, State.STARTING, State.WAKING):
            model.wants_sleep = True
        hurried: list[Effect] = [Hurry(name)] if hurry and model.open and model.state in (State.READY, State.DRAINING) else []
        return self._after(now_s, hurried)

    def wish_wake(self, name: str, now_s: float) -> list[Effect]:
        """An action. A model that goes to sleep just now wakes after it. Raises `Misuse` if it is being removed, `KeyError`."""
        model = self.models[name]
        if model.retiring:
            raise Misuse(f"{name} is being removed")
        model.wants_sleep = False
        model.active_s = now_s
        if model.state is not State.READY and model.wanted_since_s is None:
            model.wanted_since_s = now_s
        if model.state is State.FAILED:
            model.retry_at_s = now_s
        return self._after(now_s, [])

    # ------------------------------------------------------------------ reports

    def done(self, name: str, attempt: int, now_s: float) -> list[Effect]:
        """What was asked with this attempt has succeeded. A report of an earlier attempt does nothing."""
        model = self.under_way(name, attempt)
        if model is None:
            return []
        if model.state is State.GOING_TO_SLEEP:
            self._fell_asleep(model, now_s)
        else:
            self._became_ready(model, now_s)
        return self._after(now_s, [])

    def _fell_asleep(self, model: Model, now_s: float) -> None:
        ended = model.ending
        model.failures, model.evicted = 0, False
        model.sleep_failures, model.retry_at_s, model.wants_sleep = 0, 0.0, False
        model.move(State.STOPPED if ended else State.ASLEEP, now_s)

    def _became_ready(self, model: Model, now_s: float) -> None:
        took_s = now_s - model.since_s
        known = model.wake_cost_s
        if model.state is State.STARTING:
            model.start_cost_s = took_s
        if model.state is State.WAKING or model.spec.sleep_stops:
            model.wake_cost_s = took_s if known is None else 0.7 * known + 0.3 * took_s
        model.wanted_since_s, model.retry_at_s, model.active_s = None, 0.0, now_s
        model.move(State.READY, now_s)

    def failed(self, name: str, attempt: int, reason: str, now_s: float, no_memory: bool = False) -> list[Effect]:
        """What was asked with this attempt has failed. `no_memory`: it is as it was before, and may succeed later.

        After a start or a wake-up that failed otherwise the shell has ended what was left of the server.
        """
        model = self.under_way(name, attempt)
        if model is None:
            return []
        if model.state is State.GOING_TO_SLEEP:
            return self._after(now_s, self._stayed_awake(model, reason, now_s))
        if no_memory:
            state = State.ASLEEP if model.state is State.WAKING else State.STOPPED
            model.failures += 1
            model.retry_at_s = now_s + self._pause_s(model.failures)
            model.move(state, now_s, reason)
            return self._after(now_s, [*self._make_way(model, now_s), *self._lose_patience(model, now_s)])
        return self._after(now_s, self._fail(model, reason, now_s))

    def _make_way(self, model: Model, now_s: float) -> list[Effect]:
        """The bytes in the file were too few or none: the idle model that is soonest back leaves the card."""
        room = Room(list(self.models.values()), self.card_bytes, now_s, self._hold_s)
        idle = [other for other in room.movable(model) if not other.busy]
        return [effect for victim in idle[:1] for effect in self._send_away(victim, model, True, now_s)]

    def _send_away(self, victim: Model, model: Model, must_end: bool, now_s: float) -> list[Effect]:
        reason = f"makes room for {model.name}"
        if victim.state is State.ASLEEP:
            return self._end_sleeper(victim, reason, now_s)
        victim.evicted = must_end
        victim.move(State.DRAINING, now_s, reason)
        return self._depart(victim, now_s)

    def _end_sleeper(self, model: Model, reason: str, now_s: float) -> list[Effect]:
        model.move(State.GOING_TO_SLEEP, now_s, reason)
        model.ending = True
        return [Sleep(model.name, model.next_attempt(), stop=True)]

    def ended(self, name: str, reason: str, now_s: float) -> list[Effect]:
        """All its servers ended by themselves. Nothing, where that was asked for, or is reported as `failed`."""
        model = self.models.get(name)
        if model is None or not model.can_end_by_itself:
            return []
        if model.state in (State.READY, State.DRAINING) and not model.retiring and not model.wants_sleep and model.wanted_since_s is None:
            model.wanted_since_s = now_s if model.busy or model.spec.keep else None
        return self._after(now_s, self._fail(model, reason, now_s))

    def under_way(self, name: str, attempt: int) -> Model | None:
        """The model, if `done` or `failed` with this attempt is still to come."""
        model = self.models.get(name)
        return model if model is not None and model.state in UNDER_WAY and model.attempt == attempt else None

    def _stayed_awake(self, model: Model, reason: str, now_s: float) -> list[Effect]:
        model.sleep_failures += 1
        model.retry_at_s = now_s + self._pause_s(model.sleep_failures)
        model.move(State.READY, now_s, f"could not sleep: {reason}")
        if model.retiring or model.renewal is not None or (model.sleep_failures >= PATIENCE and model.spec.can_stop):
            model.move(State.DRAINING, now_s, f"is ended, since it could not sleep: {reason}")
        return []

    def _fail(self, model: Model, reason: str, now_s: float) -> list[Effect]:
        awake_s = now_s - model.since_s if model.state is State.READY else 0.0
        model.failures = 1 if awake_s >= HEALTHY_S else model.failures + 1
        model.retry_at_s = now_s + self._pause_s(model.failures)
        model.wants_sleep = model.evicted = False
        if model.spec.keep and not model.retiring and model.wanted_since_s is None:
            model.wanted_since_s = now_s
        model.move(State.FAILED, now_s, reason)
        return self._lose_patience(model, now_s)

    def _lose_patience(self, model: Model, now_s: float) -> list[Effect]:
        if model.failures < PATIENCE or model.renewal is not None:
            return []
        if not model.spec.keep:
            model.wanted_since_s = None
        return self._refuse_all(model, Why.FAILED, max(1.0, model.retry_at_s - now_s), f"{model.name} failed: {model.reason}")

    def _pause_s(self, failures: int) -> float:
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(2 ** min(failures - 1, 10)))

    # ------------------------------------------------------------------ time

    def tick(self, now_s: float) -> list[Effect]:
        """It is `next_tick_s`, or later. May be said at any time."""
        return self._after(now_s, [])

    def next_tick_s(self, now_s: float) -> float | None:
        """When `tick` has to be said next, on the owner's clock; None while only events matter."""
        times = [time for model in self.models.values() for time in model.times_s(now_s, self._hold_s)]
        return min((max(time, now_s) for time in times), default=None)

    # ------------------------------------------------------------------ what follows

    def _after(self, now_s: float, effects: list[Effect]) -> list[Effect]:
        """Whatever happened: the same rules in the same order bring every model on."""
        for model in list(self.models.values()):
            effects += self._expire(model, now_s)
            effects += self._admit(model)
            self._wind_down(model, now_s)
            effects += self._depart(model, now_s)
        for model in [model for model in self.models.values() if model.retiring or model.renewal is not None]:
            effects += self._bury(model, now_s)
        return effects + self._bring_up(now_s)

    def _expire(self, model: Model, now_s: float) -> list[Effect]:
        """Requests that have waited too long; and a failure's pause that is over."""
        refused: list[Effect] = []
        while model.deadline_s is not None and model.deadline_s <= now_s:
            ticket, _ = model.waiting.popitem(last=False)
            del self._owner[ticket]
            reason = f"waited {model.spec.queue_timeout_s:g} s for {model.name}, which is {model.state.value}"
            refused.append(Refuse(ticket, Why.QUEUE_TIMEOUT, 1.0, reason))
        if model.state is State.FAILED and model.retry_at_s <= now_s:
            model.move(State.STOPPED, model.since_s, model.reason)
        return refused

    def _admit(self, model: Model) -> list[Effect]:
        admitted: list[Effect] = []
        while model.state is State.READY and model.waiting and model.has_room:
            ticket, _ = model.waiting.popitem(last=False)
            model.open.add(ticket)
            admitted.append(Admit(ticket))
        return admitted

    def _wind_down(self, model: Model, now_s: float) -> None:
        """A ready model that an action, its ttl or its removal sends away."""
        if model.state is not State.READY:
            return
        ttl_s = model.spec.ttl_s
        is_idle = ttl_s is not None and not model.busy and now_s >= max(model.active_s + ttl_s, model.retry_at_s)
        if model.retiring or model.renewal is not None:
            model.move(State.DRAINING, now_s, "it was removed" if model.retiring else "it was changed")
        elif model.wants_sleep and model.retry_at_s <= now_s:
            model.move(State.DRAINING, now_s, "an action asked for sleep")
        elif is_idle and model.sleeps_by_itself:
            model.move(State.DRAINING, now_s, f"no request for {ttl_s:g} s")

    def _depart(self, model: Model, now_s: float) -> list[Effect]:
        """A draining model whose last byte was sent."""
        if model.state is not State.DRAINING or model.open or model.retry_at_s > now_s:
            return []
        model.move(State.GOING_TO_SLEEP, now_s, model.reason)
        model.ending = model.leaves_by_ending
        return [Sleep(model.name, model.next_attempt(), model.ending)]

    def _bury(self, model: Model, now_s: float) -> list[Effect]:
        if model.open or model.state not in AT_REST:
            return []
        if model.state is State.ASLEEP:
            return self._end_sleeper(model, "it was removed" if model.retiring else "it was changed", now_s)
        if model.renewal is not None:
            model.spec, model.renewal, model.wake_cost_s = model.renewal, None, None
            model.forget_failures(now_s)
            model.wanted_since_s = now_s if model.spec.keep else model.wanted_since_s
            return [Renewed(model.name)]
        del self.models[model.name]
        return [Removed(model.name)]

    def _bring_up(self, now_s: float) -> list[Effect]:
        """Those that are wanted, the most important and then the oldest wish first; whoever is in the way leaves."""
        effects: list[Effect] = []
        room = Room(list(self.models.values()), self.card_bytes, now_s, self._hold_s)
        for model in self._wanted(now_s):
            victims = room.place(model)
            if victims is not None and not victims:
                effects.append(self._rouse(model, now_s))
            must_end = bool(victims) and room.must_end(model, victims or ())
            for victim in victims or ():
                effects += self._send_away(victim, model, must_end, now_s)
        return effects

    def _wanted(self, now_s: float) -> list[Model]:
        free = [model for model in self.models.values() if model.may_rise(now_s)]
        wanted = [(model, since_s) for model in free if (since_s := model.wanted_at_s()) is not None]
        return [model for model, _ in sorted(wanted, key=lambda pair: (-pair[0].spec.priority, pair[1]))]

    def _rouse(self, model: Model, now_s: float) -> Effect:
        kind: Callable[[str, int], Effect] = Wake if model.state is State.ASLEEP else Start
        model.move(State.WAKING if kind is Wake else State.STARTING, now_s)
        return kind(model.name, model.next_attempt())
