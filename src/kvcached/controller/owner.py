# SPDX-License-Identifier: Apache-2.0
"""The one owner of all models in a running gateway: it tells the fleet what happens and carries out what follows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from kvcached.controller.api_errors import ApiError, no_such_model, refused, shutting_down
from kvcached.controller.backends import Backend, BackendFailed
from kvcached.controller.fleet import Fleet
from kvcached.controller.states import Admit, Effect, Hurry, Interrupt, Left, Refuse, Removed, Renewed, Sleep, Spec, Start, State, Wake
from kvcached.controller.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping

_log = logging.getLogger("kvcached.controller")
_POLL_S: Final = 0.05
_MOVING: Final = frozenset({State.DRAINING, State.GOING_TO_SLEEP, State.WAKING})


class Owner:
    """All calls come from one event loop. Use it as an asynchronous context manager: leaving it ends what it started.

    By an error that leaves it, what is ready or asleep is left to the next gateway: it took long to load, and did nothing wrong.

    `backends`: by name, one for each of `specs`. `grace_s`: how long open streams may take at the end. `found`: models whose servers
    are there already, READY or ASLEEP.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec],
        backends: Mapping[str, Backend],
        card_bytes: Mapping[str, int] | None = None,
        hold_s: float = 5.0,
        grace_s: float = 30.0,
        found: Mapping[str, State] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.fleet = Fleet(specs.values(), self.now_s, card_bytes, hold_s)
        self.backends = dict(backends)
        self.traffic = {name: Traffic(self.now_s) for name in specs}
        self.operations: Counter[tuple[str, str, bool]] = Counter()
        """by model and what was done (start, wake up, sleep, end): how often it succeeded, and failed"""
        self.leaving = False
        """It ends or hands over: nothing new is taken up"""
        self._grace_s = grace_s
        self._found = found
        self._tickets: dict[int, asyncio.Future[None]] = {}
        self._holders: dict[int, asyncio.Task[object]] = {}
        self._hurried: dict[int, ApiError] = {}
        self._renewals: dict[str, Backend] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def now_s(self) -> float:
        return self._loop.time()

    async def __aenter__(self) -> Owner:
        self.perform(self.fleet.begin(self.now_s, self._found))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.perform(self.fleet.let_go(self.now_s))
        await self.close()

    async def close(self) -> None:
        """Nothing more is let in; open streams end within `grace_s`, and are ended after it."""
        self.leaving = True
        self.perform(self.fleet.close(self.now_s))
        if not await self._until(lambda: not self.fleet.models):
            self._hurry(self._holders, shutting_down())
            if not await self._until(lambda: not self.fleet.models):
                _log.error("did not end in time: %s", ", ".join(self.fleet.models))
                await asyncio.gather(*(self.backends[name].stop() for name in self.fleet.models), return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def hand_over(self, drained: Callable[[], bool]) -> None:
        """What is ready or asleep is left to the next gateway, after the requests; these are ended after `grace_s`.

        `drained`: whether all have ended, those that wait too. What is left here is for `close`.
        """
        self.leaving = True
        if not await self._until(lambda: drained() and self._is_calm):
            self._hurry(self._holders, shutting_down())
            await self._until(lambda: not self._holders and self._is_calm)
        self.perform(self.fleet.let_go(self.now_s))

    @property
    def _is_calm(self) -> bool:
        """Whether each model is in a state that can be told to another gateway, or is nothing that one could have."""
        return not any(model.state in _MOVING for model in self.fleet.models.values())

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """False when it is not so within the grace."""
        deadline_s = self.now_s + self._grace_s
        while not (is_so := condition()) and self.now_s < deadline_s:
            await asyncio.sleep(_POLL_S)
        return is_so

    # ------------------------------------------------------------------ requests

    @contextlib.asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[None]:
        """The model is ready, and stays so, within. Raises `ApiError` when it is not, or when the request is ended by an action."""
        if name not in self.fleet.models:  # removed while the request was tried again
            raise self.absent(name)
        ticket, effects = self.fleet.asked(name, self.now_s)
        admitted = self._tickets[ticket] = self._loop.create_future()
        task = asyncio.current_task()
        assert task is not None
        self._holders[ticket] = task
        try:
            self.perform(effects)
            await admitted
            yield
        except asyncio.CancelledError:
            error = self._hurried.get(ticket)
            if error is None:
                raise
            _uncancel(task)
            raise error from None
        finally:
            for place in (self._tickets, self._holders, self._hurried):
                place.pop(ticket, None)
            self.perform(self.fleet.left(ticket, self.now_s))

    def absent(self, name: str) -> ApiError:
        """Why nobody has this model. In an orderly end the first are gone while others still answer: that is no reason to give up."""
        return shutting_down() if self.fleet.closing else no_such_model(name)

    # ------------------------------------------------------------------ effects

    def perform(self, effects: list[Effect]) -> None:
        """Carry out, in order; then set the clock."""
        for effect in effects:
            self._perform(effect)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self.fleet.next_tick_s(self.now_s)
        self._timer = None if due_s is None else self._loop.call_at(due_s, self._tick)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Admit(ticket):
                self._settle(ticket, None)
            case Refuse(ticket):
                self._settle(ticket, refused(effect))
            case Start(name, attempt):
                self._launch(name, attempt, "start", self.backends[name].start())
            case Wake(name, attempt):
                self._launch(name, attempt, "wake up", self.backends[name].wake())
            case Sleep(name, attempt, stop):
                backend = self.backends[name]
                self._launch(name, attempt, "end" if stop else "sleep", backend.stop() if stop else backend.sleep())
            case Hurry(name):
                self._hurry(self.fleet.models[name].open, ApiError(503, f"{name} was put to sleep by an action", "model_put_to_sleep", 1.0))
            case Interrupt(name, attempt):
                self._keep(self._interrupt(name, attempt))
            case _:
                self._resettle(effect)

    def _resettle(self, effect: Effect) -> None:
        """What becomes of a model's servers as a whole."""
        match effect:
            case Removed(name):
                _log.info("%s: removed", name)
                del self.backends[name], self.traffic[name]
            case Left(name):
                self.backends.pop(name).leave()
                del self.traffic[name]
            case Renewed(name):
                self.backends[name] = self._renewals.pop(name)

    def _settle(self, ticket: int, error: ApiError | None) -> None:
        future = self._tickets.get(ticket)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def _hurry(self, tickets: Iterable[int], error: ApiError) -> None:
        """Those requests end, and are told why."""
        for ticket in tickets:
            if ticket in self._holders and ticket not in self._hurried:
                self._hurried[ticket] = error
                self._holders[ticket].cancel()

    def _launch(self, name: str, attempt: int, what: str, work: Coroutine[object, object, None]) -> None:
        _log.info("%s: %s (attempt %d)", name, what, attempt)
        self._keep(self._operate(name, attempt, what, work))

    def _keep(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _interrupt(self, name: str, attempt: int) -> None:
        """More than once, if need be: at the first time there may be no process yet."""
        backend = self.backends[name]
        while self.fleet.under_way(name, attempt) is not None:
            await backend.stop()
            await asyncio.sleep(_POLL_S)

    async def _operate(self, name: str, attempt: int, what: str, work: Coroutine[object, object, None]) -> None:
        start_s = self.now_s
        try:
            await work
        except (BackendFailed, OSError, asyncio.TimeoutError) as error:
            reason = str(error) or type(error).__name__
            _log.warning("%s: could not %s: %s", name, what, reason)
            self.operations[name, what, False] += 1
            no_memory = isinstance(error, BackendFailed) and error.no_memory
            self.perform(self.fleet.failed(name, attempt, reason, self.now_s, no_memory))
        else:
            self.operations[name, what, True] += 1
            _log.info("%s: %s took %.2f s", name, what, self.now_s - start_s)
            self.perform(self.fleet.done(name, attempt, self.now_s))

    def _tick(self) -> None:
        self.perform(self.fleet.tick(self.now_s))

    # ------------------------------------------------------------------ a new file

    def add(self, spec: Spec, backend: Backend) -> None:
        """A new model. Raises `Misuse` while one of that name is being removed."""
        effects = self.fleet.add(spec, self.now_s)
        self.backends[spec.name] = backend
        self.traffic[spec.name] = Traffic(self.now_s)
        self.perform(effects)

    def change(self, spec: Spec) -> None:
        """New facts that its servers do not have to know."""
        self.perform(self.fleet.add(spec, self.now_s))

    def renew(self, spec: Spec, backend: Backend) -> None:
        """New servers, when the last stream of the old ones has ended."""
        self._renewals[spec.name] = backend
        self.perform(self.fleet.renew(spec, self.now_s))

    def retire(self, name: str) -> None:
        """No more requests; its servers end when its last stream has ended."""
        self.perform(self.fleet.retire(name, self.now_s))

    # ------------------------------------------------------------------ what others see

    def ended(self, name: str, reason: str) -> None:
        """The servers of a model ended by themselves, or nobody answers there any more."""
        _log.warning("%s: %s", name, reason)
        self.perform(self.fleet.ended(name, reason, self.now_s))

    def sleep(self, name: str, hurry: bool) -> None:
        self.perform(self.fleet.wish_sleep(name, self.now_s, hurry))

    def wake(self, name: str) -> None:
        self.perform(self.fleet.wish_wake(name, self.now_s))

    async def settled(self, name: str, state: frozenset[State], timeout_s: float) -> bool:
        """Wait until the model is in one of these states. False when it is not in time."""
        deadline_s = self.now_s + timeout_s
        while name in self.fleet.models and self.fleet.models[name].state not in state:
            if self.now_s >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return name in self.fleet.models


def _uncancel(task: asyncio.Task[object]) -> None:
    """Python 3.11 counts cancellations; the one that was ours is over."""
    if hasattr(task, "uncancel"):
        task.uncancel()
