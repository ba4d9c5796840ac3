# SPDX-License-Identifier: Apache-2.0
"""Every order of the events of a small cluster, with at most so many faults anywhere; ranks that look the same are one."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from kvcached.testing.ranksim.moves import State
from kvcached.testing.ranksim.reduction import sufficient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.testing.ranksim.cluster import Cluster
    from kvcached.testing.ranksim.sameness import Key


@dataclass(slots=True)
class Exploration:
    """`events`: events checked; `states`: different states seen; `ends`: of them with nothing left to happen; `complete`: that is all
    there are."""

    events: int = 0
    states: int = 0
    ends: set[Key] = field(default_factory=set)
    complete: bool = True

    def __str__(self) -> str:
        return f"{self.states} states, {self.events} events, {len(self.ends)} ends{'' if self.complete else ', not complete'}"


def explore(
    prepare: Callable[[Cluster], None],
    begin: Callable[[Cluster], None],
    cluster: Cluster,
    *,
    faults: int,
    most: int,
    reduced: bool = True,
) -> Exploration:
    """Run `prepare` in one order without faults, then `begin`, and from there every order of events with up to `faults` faults.

    Stops after `most` states. Raises `Broken`, with the way to it, when an invariant does not hold. `reduced` False: also those orders
    that `reduction` leaves out because others stand for them.
    """
    start = started(prepare, begin, cluster, faults)
    result, random = Exploration(), Random(0)
    seen = {start.key()}
    todo = [start]
    while todo and len(seen) < most:
        at = -1 if result.events % 2 else random.randrange(len(todo))  # if it is cut short, it has been deep, and everywhere a little
        todo[at], todo[-1] = todo[-1], todo[at]
        for state in successors(todo.pop(), reduced):
            result.events += 1
            if not state.pending:
                result.ends.update(state.keys_of_end())
            key = state.key()
            if key not in seen:
                seen.add(key)
                todo.append(state)
    result.states = len(seen)
    result.complete = not todo
    return result


def started(prepare: Callable[[Cluster], None], begin: Callable[[Cluster], None], cluster: Cluster, faults: int) -> State:
    """Where an exploration begins."""
    start = State(cluster, faults)
    prepare(cluster)
    start.run_quietly()
    begin(cluster)
    start.begin()
    return start


def successors(state: State, reduced: bool = True) -> Iterator[State]:
    """What can be after the next event."""
    for after in sufficient(state) if reduced else map(state.after, state.moves()):
        if reduced and after.is_apart and after.alone < 0:
            yield from after.parts()
        else:
            yield after
