# SPDX-License-Identifier: Apache-2.0
"""Copies of what the next event may change, and keys: equal for states that go on in the same way.

What no event can tell apart counts as the same: which rank is which, the numbers of actions, messages to a process that has ended,
counts of reminders, the operations that a message carried once they are accepted.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvcached.ranks.coordinator import Coordinator
from kvcached.ranks.courses import Course, Transaction
from kvcached.ranks.operations import Inbox, Outbox
from kvcached.ranks.participant import Participant, _Entry
from kvcached.testing.ranksim.cluster import Rank
from kvcached.testing.ranksim.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvcached.ranks.transactions import Opening
    from kvcached.testing.ranksim.cluster import Cluster, Task

AT_OWNER: Final = frozenset({"answer_arrives", "remind", "lose"})
IN_ORDER: Final = frozenset({"step_arrives", "step_finishes"})  # on each rank
Key = int

# ---------------------------------------------------------------------- copies

_T = TypeVar("_T")
_MACHINES: Final = (Rank, Driver, Participant, Inbox, Coordinator, Outbox)
_RECORDS: Final = (_Entry, Transaction)


def cloned(value: _T) -> _T:
    """A copy that shares what never changes with its origin."""
    kind = type(value)
    copy = _COPIES.get(kind)
    if copy is None:
        copy = _COPIES[kind] = _copy_of(kind)
    clone: _T = copy(value)
    return clone


def _copy_of(kind: type) -> Callable[[Any], Any]:
    if issubclass(kind, _MACHINES):
        return _copy_of_machine
    if issubclass(kind, _RECORDS):
        return _copy_of_record
    parameters = getattr(kind, "__dataclass_params__", None)
    if issubclass(kind, (Enum, tuple)) or (parameters is not None and parameters.frozen):
        return _itself
    raise TypeError(f"nobody has said how {kind.__name__} is copied")


def _itself(value: _T) -> _T:
    return value


def _copy_of_machine(value: Any) -> Any:
    clone = object.__new__(type(value))
    clone.__dict__.update({name: cloned(item) for name, item in vars(value).items()})
    return clone


def _copy_of_record(value: Any) -> Any:
    clone = object.__new__(type(value))
    for name in type(value).__slots__:
        setattr(clone, name, cloned(getattr(value, name)))
    return clone


def _copy_of_counter(value: Counter[Any]) -> Counter[Any]:
    clone: Counter[Any] = Counter.__new__(Counter)
    dict.update(clone, value)
    return clone


_COPIES: Final[dict[type, Callable[[Any], Any]]] = {
    **dict.fromkeys((int, str, bool, float, bytes, tuple, frozenset, type, type(None)), _itself),
    dict: lambda value: {key: cloned(item) for key, item in value.items()},
    Counter: _copy_of_counter,
    set: set.copy,
    list: lambda value: [cloned(item) for item in value],
    deque: lambda value: deque([cloned(item) for item in value]),
    Course: _itself,
}

# ---------------------------------------------------------------------- keys
# Data classes of different types have one hash when their fields are the same, so a message or an action comes with its type.

_SHAPES: Final[dict[type, Callable[[Any], Any]]] = {
    dict: lambda value: frozenset([(key, _frozen(item)) for key, item in value.items()]),
    Counter: lambda value: frozenset([item for item in value.items() if item[1]]),
    set: frozenset,
    list: lambda value: tuple([_frozen(item) for item in value]),
    deque: lambda value: tuple([_frozen(item) for item in value]),
    Inbox: lambda value: (value.applied, value.completed, frozenset(value._finished)),
    Driver: lambda value: tuple([_frozen(item) for item in vars(value).values()]),
}
_NAMED_BELOW: Final = frozenset({"_history", "_running", "_newest_id"})


def _frozen(value: Any) -> Any:
    """The value as something that can be compared and hashed."""
    shape = _SHAPES.get(type(value))
    return value if shape is None else shape(value)


def rank_key(at: Rank) -> Key:
    """The rank itself. Of one that has ended only its memory is left to be looked at."""
    if not at.alive:
        return hash((False, _frozen(at.driver)))
    participant, names = at.participant, _names(at)
    history = [
        (tx, type(entry.opening), _accepted(entry.opening), entry.phase, entry.outcome, entry.ending, names.get(entry.waits_for))
        for tx, entry in participant._history.items()
    ]
    return hash(
        (
            _frozen(at.driver),
            tuple(history),
            frozenset([(names[id], type(deed), deed) for id, deed in participant._running.items()]),
            tuple([_frozen(item) for name, item in vars(participant).items() if name not in _NAMED_BELOW]),
            frozenset([(names.get(id), type(effect.action), effect.action) for id, effect in at.actions.items()]),
            frozenset([(names.get(id), step) for id, step in at.waiting.items()]),
            (tuple(at.steps), at.started, at.finished_step),
        )
    )


def _names(at: Rank) -> dict[int, int]:
    """Actions and awaited steps, numbered from 0: only their order can matter."""
    return {id: name for name, id in enumerate(sorted(at.participant._running))}


def _accepted(opening: Opening | None) -> Opening | None:
    return replace(opening, ops=()) if opening is not None and opening.ops else opening


def tasks_key(at: Rank, tasks: Iterable[Task]) -> Key:
    """What is under way to and from the rank."""
    names = _names(at)
    ordered: list[tuple[Any, ...]] = []
    loose: list[tuple[Any, ...]] = []
    for task in tasks:
        if task.event in IN_ORDER:
            ordered.append((task.event, task.arguments))
        elif task.event in ("act", "step_passes"):
            loose.append((task.event, names.get(task.arguments[0]), task.arguments[1:]))  # type: ignore[call-overload]
        elif task.event == "message_arrives":
            loose.append((type(task.arguments[0]), _news(at, task.arguments[0])))
        else:
            loose.append((task.event, task.arguments))
    return hash((tuple(ordered), frozenset(Counter(loose).items())))


def _news(at: Rank, message: Any) -> Any:
    """Without the operations that the rank has accepted."""
    applied = at.participant._inbox.applied
    if not message.ops or message.ops[0].number > applied:
        return message
    return replace(message, ops=tuple([op for op in message.ops if op.number > applied]))


def views_of_owner(cluster: Cluster) -> Iterator[Any]:
    """What the owner, and the book, think of each rank."""
    under_way, outbox = cluster.coordinator._under_way, cluster.coordinator._outbox
    for rank, promised in enumerate(cluster.book.promised):
        awaited = tuple([(tx, rank in each.awaited, each.failures.get(rank)) for tx, each in under_way.items()])
        yield frozenset(promised), outbox._applied[rank], outbox._completed[rank], awaited


def owner_key(cluster: Cluster) -> Key:
    """The owner, its pool's book and what it has promised; nothing of single ranks."""
    coordinator = cluster.coordinator
    outbox = coordinator._outbox
    transactions = [
        (tx, each.ending, each.attempt % 2, () if each.failures else tuple(sorted(each.released_bytes)))
        for tx, each in coordinator._under_way.items()
    ]
    return hash(
        (
            tuple(transactions),
            (coordinator.credits(), bool(coordinator.failed), outbox.newest, outbox._sent, tuple(outbox._tail)),
            frozenset(coordinator._stranded),
            book_key(cluster),
            (_frozen(cluster.open), cluster.failed, cluster.owner_alive, cluster.settled, cluster.step),
            (tuple(cluster.recalls), tuple(cluster.promises)),
        )
    )


def belief(cluster: Cluster) -> Any:
    """What invariants compare with the ranks."""
    coordinator = cluster.coordinator
    return cluster.failed, cluster.settled, coordinator.credits(), coordinator.completed_everywhere, book_key(cluster)


def book_key(cluster: Cluster) -> Key:
    return hash((_frozen(cluster.book.states), _frozen(cluster.book.last_read)))
