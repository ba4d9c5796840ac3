# SPDX-License-Identifier: Apache-2.0
"""What a model can be, what one is told of it, and what is to be done: the words of the fleet's logic. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final


@unique
class State(Enum):
    """`value` is the word that people see."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """no request is let in; it goes to sleep, or ends, after the last byte of those that are open"""
    GOING_TO_SLEEP = "going to sleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"
    """nothing of it is left; tried again after a pause, if it is wanted then"""


AWAKE: Final = frozenset({State.STARTING, State.READY, State.DRAINING, State.GOING_TO_SLEEP, State.WAKING})
"""States in which it takes the memory of an awake model, and keeps the others of its group away."""
AT_REST: Final = frozenset({State.STOPPED, State.ASLEEP, State.FAILED})
LEAVING: Final = frozenset({State.DRAINING, State.GOING_TO_SLEEP})
UNDER_WAY: Final = frozenset({State.STARTING, State.WAKING, State.GOING_TO_SLEEP})
"""The owner waits for one report."""

CLOSING: Final = "the gateway is shutting down"
_START_GUESS_S: Final = 60.0
PATIENCE: Final = 3
"""After so many failures in a row requests are refused at once, and a model that does not fall asleep is ended."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What the logic must know of a model. `concurrency` and `queue` are of all its replicas together; `cost_bytes` while awake."""

    name: str
    concurrency: int = 256
    queue: int = 1024
    queue_timeout_s: float = 300.0
    ttl_s: float | None = None
    pin: bool = False
    can_sleep: bool = True
    sleep_stops: bool = False
    """asleep means that its server has ended"""
    can_stop: bool = True
    keep: bool = False
    """started at once, and again whenever it failed"""
    group: str | None = None
    priority: int = 0
    card: str = ""
    cost_bytes: int = 0
    rest_bytes: int = 0
    """what of that it goes on taking while it is asleep"""
    wake_guess_s: float = 10.0
    """how long a wake-up takes, until one was seen"""


# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Start:
    """Start it and tell `done` or `failed` with the same `attempt`. What was left of an earlier server is ended first."""

    name: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Wake:
    name: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """No request is open. `stop`: end the server instead."""

    name: str
    attempt: int
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """The request may be sent now. `left` must follow, whatever becomes of it."""

    ticket: int


@unique
class Why(Enum):
    """Why a request is refused; `value` is the code that clients see."""

    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    FAILED = "model_failed"
    CLOSING = "shutting_down"
    GONE = "model_removed"


@dataclass(frozen=True, slots=True)
class Refuse:
    """The ticket is void. `retry_after_s`: when it is worth to ask again."""

    ticket: int
    why: Why
    retry_after_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Hurry:
    """End the open requests: an action asked for sleep at once."""

    name: str


@dataclass(frozen=True, slots=True)
class Removed:
    """The model was taken out of the file and nothing of it is left."""

    name: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """Nothing of its old server is left: from here on the new facts hold."""

    name: str


@dataclass(frozen=True, slots=True)
class Left:
    """Its servers go on as they are, for another gateway."""

    name: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End the start that is under way, which then fails: nobody wants what it would start."""

    name: str
    attempt: int


Effect = Start | Wake | Sleep | Admit | Refuse | Hurry | Removed | Renewed | Left | Interrupt


# ---------------------------------------------------------------------- one model


@dataclass(slots=True)
class Model:
    """The record of one model. Times are of the owner's monotonic clock."""

    spec: Spec
    born_s: float
    state: State = State.STOPPED
    since_s: float = 0.0
    attempt: int = 0
    open: set[int] = field(default_factory=set)
    waiting: OrderedDict[int, float] = field(default_factory=OrderedDict)
    """ticket to deadline; first come, first served"""
    active_s: float = 0.0
    """when a request came or its last byte left, or when it became ready"""
    wanted_since_s: float | None = None
    """somebody wants it awake, without a request"""
    wants_sleep: bool = False
    """an action asked for sleep, and it is not asleep yet"""
    retiring: bool = False
    ending: bool = False
    """what was asked last is that its server ends, not that it sleeps"""
    renewal: Spec | None = None
    """new facts that need a new server; what waits goes on waiting for that"""
    failures: int = 0
    sleep_failures: int = 0
    retry_at_s: float = 0.0
    """not started, woken or put to sleep by itself before"""
    reason: str = ""
    wake_cost_s: float | None = None
    start_cost_s: float | None = None
    evicted: bool = False
    """it leaves for its memory: where sleep would keep some of that, its server ends"""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def busy(self) -> bool:
        return bool(self.open or self.waiting)

    @property
    def has_room(self) -> bool:
        return len(self.open) < self.spec.concurrency

    @property
    def bring_back_s(self) -> float:
        """How long it would take to have it awake again."""
        return self.spec.wake_guess_s if self.wake_cost_s is None else self.wake_cost_s

    @property
    def taken_bytes(self) -> int:
        """What it takes of its card now."""
        return self.spec.cost_bytes if self.state in AWAKE else self.spec.rest_bytes if self.state is State.ASLEEP else 0

    @property
    def kept_bytes(self) -> int:
        """What it will take when it has left."""
        ends = self.ending if self.state is State.GOING_TO_SLEEP else self.leaves_by_ending
        return 0 if ends else self.spec.rest_bytes

    @property
    def price_s(self) -> float:
        """How long it would take to have it awake again after it left for its memory."""
        if not self.spec.rest_bytes:
            return self.bring_back_s
        return _START_GUESS_S if self.start_cost_s is None else self.start_cost_s

    @property
    def deadline_s(self) -> float | None:
        """Of the request that waits longest."""
        return next(iter(self.waiting.values()), None)

    @property
    def can_end_by_itself(self) -> bool:
        """Whether its servers' end is news: it is not where they are asked to end, or where what is under way will report it."""
        asleep_soon = self.state is State.GOING_TO_SLEEP and not self.ending
        return asleep_soon or self.state in (State.READY, State.DRAINING, State.ASLEEP)

    @property
    def leaves_by_ending(self) -> bool:
        """Whether its server ends when it leaves: it is to be so, or its sleep does not work."""
        cannot_sleep = self.sleep_failures >= PATIENCE and self.spec.can_stop
        evicted = self.evicted and self.spec.rest_bytes > 0
        return self.retiring or self.renewal is not None or self.spec.sleep_stops or cannot_sleep or evicted

    @property
    def sleeps_by_itself(self) -> bool:
        return self.spec.can_sleep and not self.spec.pin

    @property
    def can_be_left(self) -> bool:
        """Whether another gateway can have it as it is."""
        stays = not self.retiring and self.renewal is None
        return stays and not self.busy and self.state in (State.READY, State.ASLEEP)

    def may_rise(self, now_s: float) -> bool:
        """Whether it may be started or woken now, if somebody wants it."""
        stays = not self.retiring and self.renewal is None
        return stays and self.state in (State.STOPPED, State.ASLEEP) and self.retry_at_s <= now_s

    def wanted_at_s(self) -> float | None:
        """Since when somebody waits for it to be awake; None when nobody does."""
        oldest_s = None if self.deadline_s is None else self.deadline_s - self.spec.queue_timeout_s
        return min((time for time in (oldest_s, self.wanted_since_s) if time is not None), default=None)

    def idle_s(self, now_s: float) -> float:
        """0 while a request is open or waits."""
        return 0.0 if self.busy else max(0.0, now_s - self.active_s)

    def times_s(self, now_s: float, hold_s: float) -> list[float]:
        """When something may have to be done for it, though nothing happens."""
        times = [] if self.deadline_s is None else [self.deadline_s]
        if self.state is State.READY and self.spec.ttl_s is not None and self.sleeps_by_itself and not self.busy:
            times.append(max(self.active_s + self.spec.ttl_s, self.retry_at_s))
        if self.retry_at_s > now_s:
            times.append(self.retry_at_s)
        if self.state is State.READY and self.since_s + hold_s > now_s:
            times.append(self.since_s + hold_s)
        return times

    def was_found(self, state: State, now_s: float) -> None:
        """Its servers are there already, READY or ASLEEP."""
        self.wanted_since_s, self.active_s = None, now_s
        self.move(state, now_s)

    def forget_failures(self, now_s: float) -> None:
        """Of one at rest: whatever it is wanted for is tried at once."""
        if self.state in AT_REST:
            self.failures, self.retry_at_s = 0, now_s
        if self.state is State.FAILED:
            self.move(State.STOPPED, self.since_s, self.reason)

    def move(self, state: State, now_s: float, reason: str = "") -> None:
        self.state, self.since_s, self.reason = state, now_s, reason

    def next_attempt(self) -> int:
        self.attempt += 1
        return self.attempt
