# SPDX-License-Identifier: Apache-2.0
"""Every order of the events of a small cluster, with at most so many faults anywhere; ranks that look the same are one."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kvcached.ranks.operations import Inbox
from kvcached.ranks.participant import Participant, _Entry
from kvcached.testing.ranksim.cluster import Cluster, Rank, Task
from kvcached.testing.ranksim.driver import Broken, Driver, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.ranks.coordinator import Coordinator

_IN_ORDER: Final = frozenset({"step_arrives", "step_finishes"})  # on each rank
_AT_OWNER: Final = frozenset({"answer_arrives", "remind", "lose"})
_OUT_OF_BAND: Final = frozenset({"message_arrives", "answer_arrives"})


class Move(NamedTuple):
    """One event. `task` is where in the list of what is pending; `fault` what goes wrong with it (None: nothing)."""

    task: int
    fault: str | Fault | None = None
    rank: int = -1


@dataclass(slots=True)
class Exploration:
    """`events`: events checked; `states`: different states seen; `ends`: of them with nothing left to happen; `complete`: that is all
    there are."""

    events: int = 0
    states: int = 0
    ends: int = 0
    complete: bool = True


class _State:
    """A cluster and what is pending. A fork shares with its origin what the next event cannot touch."""

    def __init__(self, cluster: Cluster, pending: list[Task], faults: int, rank_hashes: list[int]) -> None:
        self.cluster = cluster
        self.pending = pending
        self.faults = faults
        self.rank_hashes = rank_hashes

    def fork(self, rank: int, at_owner: bool) -> _State:
        """A copy in which one rank, or the owner, may change."""
        cluster = copy.copy(self.cluster)
        cluster.ranks = list(cluster.ranks)
        if at_owner:
            cluster.coordinator = _cloned(cluster.coordinator)
        elif rank >= 0:
            cluster.ranks[rank] = _cloned(cluster.ranks[rank])
        cluster.drivers = [each.driver for each in cluster.ranks]
        cluster.book = cluster.book.fork()
        cluster.out = []
        cluster.open = dict(cluster.open)
        cluster.recalls, cluster.promises = deque(cluster.recalls), deque(cluster.promises)
        return _State(cluster, list(self.pending), self.faults, list(self.rank_hashes))

    def touched(self, rank: int) -> None:
        if rank >= 0:
            self.rank_hashes[rank] = hash(_frozen(self.cluster.ranks[rank]))

    def gather(self) -> None:
        """What the last event left to be done. A rank's own news reaches it at once: what can race with it has raced with the action,
        or the step, before. Of reminders of one transaction only the newest can matter."""
        out = self.cluster.out
        while out:
            task = out.pop(0)
            if task.event == "performed" or (task.event == "step_passes" and task.arguments[1]):
                getattr(self.cluster, task.event)(task.rank, *task.arguments)
                continue
            if task.event == "remind":
                self.pending = [other for other in self.pending if other.event != "remind" or other.arguments[0] != task.arguments[0]]
            self.pending.append(task)


def explore(
    prepare: Callable[[Cluster], None], begin: Callable[[Cluster], None], cluster: Cluster, *, faults: int, most: int
) -> Exploration:
    """Run `prepare` in one order without faults, then `begin`, and from there every order of events with up to `faults` faults.

    Stops after `most` states. Raises `Broken`, with the way to it, when an invariant does not hold.
    """
    start = _State(cluster, [], faults, [0] * len(cluster.ranks))
    prepare(cluster)
    _run_quietly(start)
    begin(cluster)
    start.gather()
    for rank in range(len(cluster.ranks)):
        start.touched(rank)
    result, random = Exploration(), Random(0)
    seen = {_key(start)}
    todo: list[tuple[_State, tuple[str, ...]]] = [(start, ())]
    while todo and len(seen) < most:
        at = -1 if result.events % 2 else random.randrange(len(todo))  # if it is cut short, it has been deep, and everywhere a little
        todo[at], todo[-1] = todo[-1], todo[at]
        origin, path = todo.pop()
        for move in _moves(origin):
            state, taken = _after(origin, move, path)
            result.events += 1
            key = _key(state)
            if key not in seen:
                seen.add(key)
                todo.append((state, taken))
            result.ends += not state.pending
    result.states = len(seen)
    result.complete = not todo
    return result


def _run_quietly(state: _State) -> None:
    state.gather()
    while state.pending:
        move = next(_moves(state), None)
        if move is None:
            return
        _perform(state, Move(move.task))
        state.gather()


# ---------------------------------------------------------------------- moves


def _moves(state: _State) -> Iterator[Move]:
    """What can happen next. Reminders come when nothing else can, or early, as a fault."""
    served: set[tuple[str, int]] = set()
    seen: set[Task] = set()
    alone = _rank_on_its_own(state)
    quiet = all(task.event == "remind" or _is_timeout(task) for task in state.pending)
    for at, task in enumerate(state.pending):
        place = (task.event, task.rank)
        if task in seen or (alone is not None and task.rank != alone) or (task.event in _IN_ORDER and place in served):
            continue
        seen.add(task)
        served.add(place)
        if quiet or not (task.event == "remind" or _is_timeout(task)):
            yield Move(at)
        if state.faults:
            yield from _faults(state, at, task)
    if state.faults and state.pending:
        yield from (Move(-1, "crash", rank) for rank, at in enumerate(state.cluster.ranks) if at.alive)
        if state.cluster.owner_alive:
            yield Move(-1, "crash owner")


def _rank_on_its_own(state: _State) -> int | None:
    """Without an owner that acts, ranks have nothing to do with each other: what happens on one after the other is every case."""
    if state.cluster.owner_alive and not state.cluster.failed:
        return None
    state.pending = [task for task in state.pending if task.event not in _AT_OWNER]
    return min((task.rank for task in state.pending), default=None)


def _is_timeout(task: Task) -> bool:
    return task.event == "step_passes" and task.arguments[1] is False


def _faults(state: _State, at: int, task: Task) -> Iterator[Move]:
    if task.event in _OUT_OF_BAND:
        yield Move(at, "lose")
        yield Move(at, "repeat")
    elif task.event == "act":
        yield from (Move(at, fault) for fault in Fault)
    elif task.event == "remind" or _is_timeout(task):
        yield Move(at, "early")


def _after(origin: _State, move: Move, path: tuple[str, ...]) -> tuple[_State, tuple[str, ...]]:
    task = origin.pending[move.task] if move.task >= 0 else Task(str(move.fault), move.rank)
    taken = (*path, f"{task.event} rank {task.rank} {task.arguments} {move.fault or ''}")
    at_owner = task.event in _AT_OWNER
    state = origin.fork(task.rank, at_owner)
    try:
        _perform(state, move)
        state.gather()
        state.cluster.check_all()
        if not state.pending:
            state.cluster.check_end()
    except Broken as error:
        raise Broken("\n  ".join([str(error), *taken])) from error
    if not at_owner:
        state.touched(task.rank)
    return state, taken


def _perform(state: _State, move: Move) -> None:
    cluster = state.cluster
    state.faults -= move.fault is not None
    if move.fault == "crash":
        cluster.crash(move.rank)
        state.pending.append(Task("lose", move.rank))
        return
    if move.fault == "crash owner":
        cluster.crash_owner()
        state.pending += [Task("lose_owner", rank) for rank in range(len(cluster.ranks))]
        return
    task = state.pending[move.task]
    if move.fault != "repeat":
        del state.pending[move.task]
    if move.fault == "lose":
        return
    if isinstance(move.fault, Fault):
        cluster.act(task.rank, task.arguments[0], move.fault)  # type: ignore[arg-type]
    else:
        getattr(cluster, task.event)(task.rank, *task.arguments)


# ---------------------------------------------------------------------- which states are the same


_T = TypeVar("_T")


def _cloned(value: _T) -> _T:
    clone: _T = pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # the fastest deep copy; nothing leaves this process
    return clone


_SHAPES: Final[dict[type, Callable[[Any], Any]]] = {
    dict: lambda value: frozenset([(key, _frozen(item)) for key, item in value.items()]),
    Counter: lambda value: frozenset(value.items()),
    set: frozenset,
    list: lambda value: tuple([_frozen(item) for item in value]),
    deque: lambda value: tuple([_frozen(item) for item in value]),
    **dict.fromkeys((Rank, Driver, Participant, Inbox), lambda value: tuple([_frozen(item) for item in vars(value).values()])),
    _Entry: lambda value: (value.opening, value.phase, value.outcome, value.ending, value.waits_for),
}


def _frozen(value: Any) -> Any:
    """The value as something that can be compared and hashed."""
    shape = _SHAPES.get(type(value))
    return value if shape is None else shape(value)


def _key(state: _State) -> int:
    """Equal for states that differ only in which rank is which."""
    cluster = state.cluster
    tasks: dict[int, list[Task]] = {rank: [] for rank in range(-1, len(cluster.ranks))}
    for task in state.pending:
        tasks[task.rank].append(task)
    ranks = sorted(hash((state.rank_hashes[rank], _rank_key(cluster, rank, tasks[rank]))) for rank in range(len(cluster.ranks)))
    return hash(
        (
            tuple(ranks),
            tuple(tasks[-1]),
            _owner_key(cluster.coordinator),
            _frozen(cluster.book.states),
            _frozen(cluster.book.last_read),
            _frozen(cluster.open),
            (cluster.failed, cluster.owner_alive, state.faults, cluster.settled, cluster.step),
            (tuple(cluster.recalls), tuple(cluster.promises)),
        )
    )


def _rank_key(cluster: Cluster, rank: int, tasks: list[Task]) -> Any:
    """What the owner thinks of the rank, and what is under way for it."""
    under_way, outbox = cluster.coordinator._under_way, cluster.coordinator._outbox
    at_owner = tuple((tx, rank in each.awaited, each.failures.get(rank)) for tx, each in under_way.items())
    ordered = tuple((task.event, task.arguments) for task in tasks if task.event in _IN_ORDER)
    loose = frozenset(Counter((task.event, task.arguments) for task in tasks if task.event not in _IN_ORDER).items())
    return frozenset(cluster.book.promised[rank]), outbox._applied[rank], outbox._completed[rank], at_owner, ordered, loose


def _owner_key(coordinator: Coordinator) -> Any:
    outbox = coordinator._outbox
    transactions = tuple(
        (tx, transaction.ending, transaction.attempt, tuple(sorted(transaction.released_bytes)))
        for tx, transaction in coordinator._under_way.items()
    )
    return (
        transactions,
        coordinator.credits(),
        coordinator.failed,
        outbox.newest,
        outbox._sent,
        tuple(outbox._tail),
        frozenset(coordinator._stranded),
    )
