# SPDX-License-Identifier: Apache-2.0
"""One state of a cluster that is explored: what can happen next in it, with how many faults, and what then is."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvcached.ranks.api import Verdict
from kvcached.testing.ranksim import sameness
from kvcached.testing.ranksim.cluster import Cluster, Task
from kvcached.testing.ranksim.driver import Broken, Fault
from kvcached.testing.ranksim.sameness import AT_OWNER, IN_ORDER, Key

if TYPE_CHECKING:
    from collections.abc import Iterator

_OUT_OF_BAND: Final = frozenset({"message_arrives", "answer_arrives"})


class Move(NamedTuple):
    """One event. `task` is where in the list of what is pending; `fault` what goes wrong with it (None: nothing)."""

    task: int
    fault: str | Fault | None = None
    rank: int = -1


class Way(NamedTuple):
    """How a state was reached."""

    before: Way | None
    task: Task
    fault: str | Fault | None

    def __str__(self) -> str:
        steps: list[str] = []
        way: Way | None = self
        while way is not None:
            steps.append(f"{way.task.event} rank {way.task.rank} {way.task.arguments} {way.fault or ''}")
            way = way.before
        return "\n  ".join(reversed(steps))


class State:
    """A cluster and what is pending. A fork shares with its origin what the next event cannot touch.

    `alone`: the one rank that is looked at (-1: all, and the owner).
    """

    def __init__(self, cluster: Cluster, faults: int) -> None:
        self.cluster = cluster
        self.pending: list[Task] = []
        self.faults = faults
        self.alone = -1
        self.way: Way | None = None
        self._rank_keys = [0] * len(cluster.ranks)
        self._owner_key = 0

    def begin(self) -> None:
        """Everything may have changed."""
        self.gather()
        self._rank_keys = [sameness.rank_key(rank) for rank in self.cluster.ranks]
        self._owner_key = sameness.owner_key(self.cluster)

    def run_quietly(self) -> None:
        """In one order, without faults, until nothing is left to happen."""
        self.gather()
        while (move := next(self.moves(), None)) is not None:
            self._perform(Move(move.task))
            self.gather()

    # ------------------------------------------------------------------ what can happen

    def moves(self) -> Iterator[Move]:
        """What can happen next. Reminders come when nothing else can, or early, as a fault."""
        served: set[tuple[str, int]] = set()
        seen: set[Task] = set()
        quiet = self.is_quiet
        for at, task in enumerate(self.pending):
            place = (task.event, task.rank)
            if task in seen or (task.event in IN_ORDER and place in served):
                continue
            seen.add(task)
            served.add(place)
            if quiet or not waits(task):
                yield Move(at)
            if self.faults:
                yield from _faults(at, task)
        if self.faults and self.pending:
            yield from self._crashes()

    @property
    def is_quiet(self) -> bool:
        """Nothing happens until somebody's patience ends."""
        return all(waits(task) for task in self.pending)

    def _crashes(self) -> Iterator[Move]:
        for rank, at in enumerate(self.cluster.ranks):
            if at.alive and self.alone in (-1, rank):
                yield Move(-1, "crash", rank)
        if self.cluster.owner_alive:
            yield Move(-1, "crash owner")

    # ------------------------------------------------------------------ what then is

    def after(self, move: Move) -> State:
        """The state after it. Raises `Broken`, with the way to it, when an invariant does not hold."""
        task = self.pending[move.task] if move.task >= 0 else Task(str(move.fault), move.rank)
        at_owner = task.event in AT_OWNER or move.fault == "crash owner"
        state = self._fork(task.rank, at_owner)
        state.way = Way(self.way, task, move.fault)
        try:
            state._perform(move)
            state.gather()
            state.cluster.check_all()
            if not state.pending:
                state.cluster.check_end()
        except Broken as error:
            raise Broken(f"{error}\n  {state.way}") from error
        if at_owner:
            state._owner_key = sameness.owner_key(state.cluster)
        elif task.rank >= 0:
            state._rank_keys[task.rank] = sameness.rank_key(state.cluster.ranks[task.rank])
        return state

    def _fork(self, rank: int, at_owner: bool) -> State:
        """A copy in which one rank, or the owner, may change."""
        cluster = copy.copy(self.cluster)
        cluster.ranks = list(cluster.ranks)
        if at_owner:
            cluster.coordinator = sameness.cloned(cluster.coordinator)
        elif rank >= 0:
            cluster.ranks[rank] = sameness.cloned(cluster.ranks[rank])
        cluster.drivers = [each.driver for each in cluster.ranks]
        cluster.book = cluster.book.fork()
        cluster.out = []
        cluster.open = dict(cluster.open)
        cluster.recalls, cluster.promises = deque(cluster.recalls), deque(cluster.promises)
        state = copy.copy(self)
        state.cluster, state.pending, state._rank_keys = cluster, list(self.pending), list(self._rank_keys)
        return state

    def _perform(self, move: Move) -> None:
        cluster = self.cluster
        self.faults -= move.fault is not None
        if move.fault == "crash":
            cluster.crash(move.rank)
            self.pending = [task for task in self.pending if task.rank != move.rank or task.event == "answer_arrives"]
            self.pending.append(Task("lose", move.rank))
            return
        if move.fault == "crash owner":
            cluster.crash_owner()
            self.pending += [Task("lose_owner", rank) for rank in range(len(cluster.ranks))]
            return
        task = self.pending[move.task]
        if move.fault != "repeat":
            del self.pending[move.task]
        if move.fault == "lose":
            return
        if isinstance(move.fault, Fault):
            cluster.act(task.rank, task.arguments[0], move.fault)  # type: ignore[arg-type]
        else:
            getattr(cluster, task.event)(task.rank, *task.arguments)
            if task.event == "act" and any(_is_exhausted(news) for news in cluster.out):
                raise Broken("a rank has run out of memory: a small case must leave room, what fails in it are its faults")

    def gather(self) -> None:
        """What the last event left to be done. A rank's own news reaches it at once: what can race with it has raced with the action,
        or the step, before. Of reminders of one transaction only the newest can matter; to a rank that has ended nothing does."""
        out, cluster = self.cluster.out, self.cluster
        while out:
            task = out.pop(0)
            if task.event == "performed" or (task.event == "step_passes" and task.arguments[1]):
                getattr(cluster, task.event)(task.rank, *task.arguments)
                continue
            if task.event == "remind":
                self.pending = [other for other in self.pending if other.event != "remind" or other.arguments[0] != task.arguments[0]]
            if task.event != "message_arrives" or cluster.ranks[task.rank].alive:
                self.pending.append(task)
        self.pending = [task for task in self.pending if not self._is_over(task)]

    def _is_over(self, task: Task) -> bool:
        """Nobody waits for it any more."""
        if task.event == "step_passes":
            return task.arguments[0] not in self.cluster.ranks[task.rank].waiting
        return task.event == "remind" and task.arguments[0] != 0 and task.arguments[0] not in self.cluster.coordinator._under_way

    # ------------------------------------------------------------------ states that are the same

    def key(self) -> Key:
        """Equal for states that differ only in which rank is which."""
        cluster = self.cluster
        tasks = self._tasks()
        if self.alone >= 0:
            return self._key_of_one(self.alone, tasks[self.alone])
        ranks = sorted(
            hash((self._rank_keys[rank], view, sameness.tasks_key(cluster.ranks[rank], tasks[rank])))
            for rank, view in enumerate(sameness.views_of_owner(cluster))
        )
        reminders = tuple(sorted(task.arguments[0] for task in tasks[-1]))  # type: ignore[type-var]
        return hash((tuple(ranks), reminders, self._owner_key, self.faults))

    def keys_of_end(self) -> list[Key]:
        """Of a state with nothing left to happen. When ranks have nothing to do with each other any more, one for each."""
        if self.alone < 0 and self.is_apart:
            return [self._key_of_one(rank, []) for rank in range(len(self.cluster.ranks))]
        return [self.key()]

    def _key_of_one(self, rank: int, tasks: list[Task]) -> Key:
        cluster = self.cluster
        promised = frozenset(cluster.book.promised[rank])
        around = (cluster.failed, cluster.owner_alive, sameness.book_key(cluster), promised, self.faults)
        return hash((self._rank_keys[rank], sameness.tasks_key(cluster.ranks[rank], tasks), around))

    def _tasks(self) -> dict[int, list[Task]]:
        tasks: dict[int, list[Task]] = {rank: [] for rank in range(-1, len(self.cluster.ranks))}
        for task in self.pending:
            tasks[task.rank].append(task)
        return tasks

    def is_silent_after(self, before: State) -> bool:
        """Nothing is sent since `before`, and the owner believes the same of every page."""
        return len(self.pending) < len(before.pending) and sameness.belief(self.cluster) == sameness.belief(before.cluster)

    def is_same_owner(self, before: State) -> bool:
        """The owner has learnt nothing since `before`."""
        same_views = all(
            a == b for a, b in zip(sameness.views_of_owner(self.cluster), sameness.views_of_owner(before.cluster), strict=True)
        )
        return self._owner_key == before._owner_key and same_views

    # ------------------------------------------------------------------ parts

    @property
    def is_apart(self) -> bool:
        """Without an owner that acts, ranks have nothing to do with each other."""
        return self.cluster.failed or not self.cluster.owner_alive

    def parts(self) -> list[State]:
        """For each rank a state in which only it goes on."""
        parts = []
        for rank in range(len(self.cluster.ranks)):
            part = copy.copy(self)
            part.alone = rank
            part.pending = [task for task in self.pending if task.rank == rank and task.event not in AT_OWNER]
            parts.append(part)
        return parts


def _is_exhausted(news: Task) -> bool:
    return news.event == "performed" and news.arguments[1].verdict is Verdict.EXHAUSTED  # type: ignore[attr-defined]


def waits(task: Task) -> bool:
    """Whether it is a pause, or a timeout: over only when all else is done."""
    return task.event == "remind" or (task.event == "step_passes" and task.arguments[1] is False)


def _faults(at: int, task: Task) -> Iterator[Move]:
    if task.event in _OUT_OF_BAND:
        yield Move(at, "lose")
        yield Move(at, "repeat")
    elif task.event == "act":
        yield from (Move(at, fault) for fault in Fault)
    elif waits(task):
        yield Move(at, "early")
