# SPDX-License-Identifier: Apache-2.0
"""A mapper's side of every transaction, without I/O: events in, effects out. Pure.

It decides what is performed, when, and once. Actions that it has asked for do not depend on each other: whoever runs it may perform
them at the same time and in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvcached.ranks.actions import (
    AbortRuns,
    AcquireHandles,
    Action,
    CommitRuns,
    MapFresh,
    MapHeld,
    PrepareRuns,
    ReleaseHandles,
    UnmapKeep,
    UnmapRelease,
)
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.operations import Inbox, Op, OpKind
from kvcached.ranks.transactions import (
    HISTORY,
    Abort,
    Acquire,
    Answer,
    Commit,
    Ending,
    MapNow,
    Opening,
    Phase,
    Prepare,
    Query,
    RankMessage,
    Release,
    Revert,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Perform:
    """Perform the action, then say `performed(id, outcome)`."""

    id: int
    action: Action


@dataclass(frozen=True, slots=True)
class AwaitStep:
    """Say `step_passed(id, ok)` when the stream has passed the step (at once if it has), `ok` False when it did not in time."""

    id: int
    step: int


@dataclass(frozen=True, slots=True)
class Reply:
    answer: Answer


Effect = Perform | AwaitStep | Reply

# ---------------------------------------------------------------------- the life of each kind of transaction


@dataclass(frozen=True, slots=True)
class _End:
    action: Callable[[Any], Action]
    phase: Phase


@dataclass(frozen=True, slots=True)
class _Life:
    """`begin` is performed when it opens, and `begun` is its phase then; `ends` are the messages that may end it."""

    begin: Callable[[Any], Action]
    begun: Phase
    ends: dict[type[Ending], _End] = field(default_factory=dict)


_LIVES: Final[dict[type[Opening], _Life]] = {
    Acquire: _Life(
        lambda opening: AcquireHandles(opening.classes, opening.urgent, opening.ticket),
        Phase.DONE,
        {Revert: _End(lambda opening: ReleaseHandles(opening.classes, opening.ticket), Phase.REVERTED)},
    ),
    MapNow: _Life(
        lambda opening: MapFresh(opening.runs, opening.urgent, opening.ticket),
        Phase.DONE,
        {Revert: _End(lambda opening: UnmapRelease(opening.runs, opening.ticket), Phase.REVERTED)},
    ),
    Release: _Life(lambda opening: ReleaseHandles(opening.classes), Phase.DONE),
    Prepare: _Life(
        lambda opening: PrepareRuns(opening.tx, opening.runs),
        Phase.PREPARED,
        {
            Commit: _End(lambda opening: CommitRuns(opening.tx), Phase.COMMITTED),
            Abort: _End(lambda opening: AbortRuns(opening.tx), Phase.ABORTED),
        },
    ),
}
_UNDONE: Final[dict[type[Ending], Phase]] = {Revert: Phase.REVERTED, Abort: Phase.ABORTED}
"""Endings of which the phase is reached by doing nothing where nothing had been done."""
_ENDED: Final = frozenset({Phase.COMMITTED, Phase.ABORTED, Phase.REVERTED})
_UNENDED: Final = frozenset({Phase.RUNNING, Phase.PREPARED})
_DONE: Final = Outcome(Verdict.DONE)
_MOST_STRANDED: Final = 64
"""Unmaps that may fail: a rank that lets so many pages down is broken, and every answer names them all."""


@dataclass(slots=True)
class _Entry:
    """A transaction here. `opening` is None when its end came first. `ending`: an end that came while something was running.
    `waits_for` is the id of an awaited step, before which nothing has been done."""

    opening: Opening | None
    phase: Phase
    outcome: Outcome = _DONE
    ending: type[Ending] | None = None
    waits_for: int = 0


@dataclass(frozen=True, slots=True)
class _Deed:
    """Something performed for a transaction, and its phase when that has succeeded."""

    tx: int
    goal: Phase


class Participant:
    """One rank's state machine. Every method takes one event and returns the effects, in order.

    A map that was promised and fails leaves the rank broken: it answers everything with that failure from then on. An unmap that fails,
    and says which pages it leaves behind, is complete: it is *stranded*, and the owner has its pages quarantined on all ranks.
    """

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._history: dict[int, _Entry] = {}
        self._forgotten = 0
        self._newest_tx = 0
        self._running: dict[int, _Deed | Op] = {}
        self._newest_id = 0
        self._mapping: set[int] = set()  # numbers of the maps that are being performed
        self._deferred: list[_Deed | Op] = []  # unmaps of which the step has passed, until those maps are done
        self._told = (0, 0)
        self._stranded: tuple[int, ...] = ()
        self._broken: Outcome | None = None
        self._orphaned = False

    @property
    def broken(self) -> Outcome | None:
        """Why this rank may differ from the others; None while it does not."""
        return self._broken

    @property
    def maps_pending(self) -> int:
        """In-band maps that are not performed yet; no step may run before they are."""
        return len(self._mapping)

    # ------------------------------------------------------------------ events

    def received(self, message: RankMessage) -> list[Effect]:
        """A message of the owner."""
        if self._orphaned:
            return []
        if self._broken is not None:
            return [self._answer(message.tx, Phase.FAILED, self._broken)]
        effects = self._accept(message.ops)
        if isinstance(message, Query):
            return effects + self._report(message.tx)
        if message.tx not in self._history and self._is_too_old(message.tx):
            refusal = Outcome(Verdict.REFUSED, reason=f"transaction {message.tx} is older than what this mapper remembers")
            return [*effects, self._answer(message.tx, Phase.FAILED, refusal)]
        if isinstance(message, Opening):
            return effects + self._open(message)
        return effects + self._close(message)

    def step_ops(self, ops: tuple[Op, ...]) -> list[Effect]:
        """The operations that a step brought. The step runs only when `maps_pending` is 0: another channel may have brought them before."""
        if self._broken is not None:
            return [self._answer(0, Phase.FAILED, self._broken)]
        effects = self._accept(ops)
        if ops and not effects:  # all of them old: the owner has not heard that they are applied
            self._told = (-1, -1)
        return effects + self._acknowledge()

    def performed(self, id: int, outcome: Outcome) -> list[Effect]:
        """The action of that effect has been performed."""
        deed = self._running.pop(id)
        if isinstance(deed, Op):
            return self._finish_op(deed, outcome)
        return self._finish_deed(deed, outcome) + self._acknowledge()

    def step_passed(self, id: int, ok: bool) -> list[Effect]:
        """An awaited step has passed, or did not in time: a Prepare gives up then, an operation waits again."""
        deed = self._running.pop(id, None)
        if deed is None:  # nobody waits for it any more
            return []
        if self._broken is not None:
            return [self._answer(0, Phase.FAILED, self._broken)]
        if isinstance(deed, Op):
            return self._unmap_in_turn(deed) if ok else [self._await(deed.after_step, deed)]
        self._history[deed.tx].waits_for = 0
        if not ok or self._orphaned:
            return self._finish_deed(deed, Outcome(Verdict.BUSY, reason="work in flight did not pass the step in time"))
        return self._unmap_in_turn(deed)

    def owner_lost(self) -> list[Effect]:
        """Nobody decides any more: no transaction goes on from here, and what is held stays held until the mapper is closed. Whoever runs
        this machine must let no step begin any more."""
        self._orphaned = True
        return []

    # ------------------------------------------------------------------ operations

    def _accept(self, ops: tuple[Op, ...]) -> list[Effect]:
        effects: list[Effect] = []
        for op in self._inbox.accept(ops) if ops else ():
            if not op.runs:  # its map was taken back before anybody heard of it
                self._inbox.finish(op.number)
            elif op.kind is OpKind.MAP:
                self._mapping.add(op.number)
                effects.append(self._perform(MapHeld(op.runs), op))
            else:
                effects.append(self._await(op.after_step, op))
        return effects

    def _finish_op(self, op: Op, outcome: Outcome) -> list[Effect]:
        self._mapping.discard(op.number)
        if op.kind is OpKind.UNMAP and outcome.verdict is Verdict.UNKNOWN and outcome.pages and len(self._stranded) < _MOST_STRANDED:
            self._stranded += (op.number,)
        elif outcome.verdict is not Verdict.DONE:
            reason = f"operation {op.number} ({op.kind.name}) was promised and failed: {outcome.verdict.name} {outcome.reason}"
            self._broken = self._broken or Outcome(Verdict.BROKEN, pages=outcome.pages, reason=reason)
            return [self._answer(0, Phase.FAILED, self._broken)]
        self._inbox.finish(op.number)
        return self._unmap_deferred() + self._acknowledge()

    def _unmap_in_turn(self, deed: _Deed | Op) -> list[Effect]:
        """A run may be on its way out before its map, of another channel, has been performed."""
        self._deferred.append(deed)
        return self._unmap_deferred()

    def _unmap_deferred(self) -> list[Effect]:
        if self._mapping:
            return []
        deferred, self._deferred = self._deferred, []
        return [self._perform(self._unmap_of(deed), deed) for deed in deferred]

    def _unmap_of(self, deed: _Deed | Op) -> Action:
        return UnmapKeep(deed.runs) if isinstance(deed, Op) else _LIVES[Prepare].begin(self._history[deed.tx].opening)

    def _acknowledge(self) -> list[Effect]:
        """Say what is applied and completed, once for all maps of a step."""
        if self._mapping or self._broken is not None or self._told == self._progress():
            return []
        return [self._answer(0, Phase.DONE, _DONE)]

    # ------------------------------------------------------------------ transactions

    def _open(self, message: Opening) -> list[Effect]:
        entry = self._history.get(message.tx)
        if entry is not None:
            return self._report(message.tx)
        entry = self._remember(message.tx, _Entry(message, Phase.RUNNING))
        life = _LIVES[type(message)]
        deed = _Deed(message.tx, life.begun)
        if isinstance(message, Prepare):
            waiting = self._await(message.after_step, deed)
            entry.waits_for = waiting.id
            return [waiting]
        return [self._perform(life.begin(message), deed)]

    def _close(self, message: Ending) -> list[Effect]:
        kind, entry = type(message), self._history.get(message.tx)
        if entry is None:
            return self._close_unheard(message.tx, kind)
        if entry.phase is not Phase.RUNNING:
            return self._end(message.tx, entry, kind)
        if not entry.waits_for or kind is not Abort:
            entry.ending = kind
            return self._report(message.tx)
        del self._running[entry.waits_for]
        entry.waits_for, entry.phase = 0, Phase.FAILED
        return self._end(message.tx, entry, kind)

    def _close_unheard(self, tx: int, kind: type[Ending]) -> list[Effect]:
        if kind not in _UNDONE:
            return [self._answer(tx, Phase.FAILED, Outcome(Verdict.REFUSED, reason=f"transaction {tx} was never prepared here"))]
        self._remember(tx, _Entry(None, _UNDONE[kind]))
        return self._report(tx)

    def _end(self, tx: int, entry: _Entry, kind: type[Ending]) -> list[Effect]:
        """End what has begun; where nothing was done, undoing it is nothing; what has ended stays as it is."""
        life = _LIVES[type(entry.opening)] if entry.opening is not None else None
        if life is not None and kind in life.ends and entry.phase is life.begun:
            entry.phase = Phase.RUNNING
            end = life.ends[kind]
            return [self._perform(end.action(entry.opening), _Deed(tx, end.phase))]
        if entry.phase is Phase.FAILED and kind in _UNDONE:
            entry.phase = _UNDONE[kind]
            if entry.outcome.verdict is not Verdict.UNKNOWN:
                entry.outcome = _DONE
        return self._report(tx)

    def _finish_deed(self, deed: _Deed, outcome: Outcome) -> list[Effect]:
        entry = self._history[deed.tx]
        entry.outcome = outcome
        entry.phase = deed.goal if outcome.verdict is Verdict.DONE or deed.goal in _ENDED else Phase.FAILED
        kind, entry.ending = entry.ending, None
        if kind is None:
            return self._report(deed.tx)
        said = self._report(deed.tx) if entry.phase is Phase.FAILED else []  # the owner wants to know why, too
        return said + self._end(deed.tx, entry, kind)

    def _report(self, tx: int) -> list[Effect]:
        entry = self._history.get(tx)
        if entry is not None:
            return [self._answer(tx, entry.phase, entry.outcome)]
        return [self._answer(tx, Phase.UNHEARD if tx else Phase.DONE, _DONE)]

    # ------------------------------------------------------------------ the bounded history

    def _is_too_old(self, tx: int) -> bool:
        """Also when more are unfinished than a careful owner leaves."""
        return tx <= self._forgotten or len(self._history) >= 2 * HISTORY

    def _remember(self, tx: int, entry: _Entry) -> _Entry:
        self._history[tx] = entry
        self._newest_tx = max(self._newest_tx, tx)
        oldest = next(iter(self._history))
        while oldest != tx and oldest <= self._newest_tx - HISTORY and self._history[oldest].phase not in _UNENDED:
            del self._history[oldest]
            self._forgotten = max(self._forgotten, oldest)
            oldest = next(iter(self._history))
        return entry

    # ------------------------------------------------------------------ effects

    def _perform(self, action: Action, deed: _Deed | Op) -> Perform:
        self._newest_id += 1
        self._running[self._newest_id] = deed
        return Perform(self._newest_id, action)

    def _await(self, step: int, deed: _Deed | Op) -> AwaitStep:
        self._newest_id += 1
        self._running[self._newest_id] = deed
        return AwaitStep(self._newest_id, step)

    def _progress(self) -> tuple[int, int]:
        """(applied, completed). A map that is being performed is not applied: its operation keeps riding on every step."""
        return min(self._mapping, default=self._inbox.applied + 1) - 1, self._inbox.completed

    def _answer(self, tx: int, phase: Phase, outcome: Outcome) -> Reply:
        self._told = self._progress()
        return Reply(Answer(tx, phase, outcome, *self._told, outcome.ticket, self._stranded))
