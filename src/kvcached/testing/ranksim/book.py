# SPDX-License-Identifier: Apache-2.0
"""What the simulated pool believes of its pages, and what must therefore be true on every rank."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from kvcached.ranks.api import Outcome, Verdict
from kvcached.testing.ranksim.driver import Broken

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcached.testing.ranksim.driver import Driver, Run


class State(Enum):
    """Of a run of pages, as the pool sees it."""

    UNMAPPED = 0
    MAPPING = 1  # a transaction maps it
    PROMISED = 2  # in band; steps may read it already
    MAPPED = 3
    RECALLED = 4  # in band
    SHRINKING = 5  # a transaction unmaps it
    QUARANTINED = 6


_MAY_BE_MAPPED_BY_A_RANK: Final = frozenset({State.MAPPING, State.SHRINKING})  # the latter: an abort
_MAY_BE_UNMAPPED_BY_A_RANK: Final = frozenset({State.RECALLED, State.SHRINKING, State.MAPPING})  # the last: a revert
_SETTLED: Final = {State.UNMAPPED: False, State.MAPPED: True}


class Book:
    """States of runs, the newest step that reads each, and what every rank was promised and has not mapped yet."""

    def __init__(self, runs: Sequence[Run], ranks: int) -> None:
        self.states: dict[Run, State] = dict.fromkeys(runs, State.UNMAPPED)
        self.last_read: dict[Run, int] = dict.fromkeys(runs, 0)
        self.promised: list[set[Run]] = [set() for _ in range(ranks)]
        self.quarantined: set[int] = set()

    def fork(self) -> Book:
        """A copy that can change without this one."""
        twin = Book((), 0)
        twin.states, twin.last_read = dict(self.states), dict(self.last_read)
        twin.promised, twin.quarantined = [set(promised) for promised in self.promised], set(self.quarantined)
        return twin

    def of(self, *states: State) -> list[Run]:
        return [run for run, state in self.states.items() if state in states]

    def set(self, runs: Iterable[Run], state: State) -> None:
        for run in runs:
            self.states[run] = state

    def promise(self, runs: tuple[Run, ...]) -> None:
        self.set(runs, State.PROMISED)
        for promised in self.promised:
            promised.update(runs)

    def take_back(self, run: Run) -> None:
        """Nobody was told of the promise: nobody will ever map it."""
        self.states[run] = State.UNMAPPED
        for promised in self.promised:
            promised.remove(run)

    def settle(self, runs: tuple[Run, ...], outcome: Outcome, done: State, otherwise: State) -> None:
        """As a pool does: what is named is quarantined, the rest is what the verdict says."""
        pages = set(outcome.pages) if outcome.verdict is Verdict.UNKNOWN else set()
        for run in runs:
            bad = not pages.isdisjoint(range(run[0], run[0] + run[1]))
            self.states[run] = State.QUARANTINED if bad else done if outcome.verdict is Verdict.DONE else otherwise
            if self.states[run] is State.MAPPED and any(run in promised for promised in self.promised):
                self.states[run] = State.PROMISED  # as it was before: covered, and not mapped by every rank yet
        self.quarantined |= pages

    # ------------------------------------------------------------------ invariants

    def must_agree(self, runs: Iterable[Run], drivers: Sequence[Driver]) -> None:
        """Where a run's state is settled, every rank has it so, and knows it."""
        for run in runs:
            mapped = _SETTLED.get(self.states[run])
            if mapped is None:
                continue
            for rank, driver in enumerate(drivers):
                if (run in driver.mapped) is not mapped:
                    raise Broken(f"{run} is {self.states[run].name} and rank {rank} has it {'un' if mapped else ''}mapped")
                if driver.quarantined and not driver.quarantined.isdisjoint(range(run[0], run[0] + run[1])):
                    raise Broken(f"{run} is {self.states[run].name} and rank {rank} does not know it")

    def may_map(self, rank: int, runs: Iterable[Run]) -> None:
        """A rank may map what a transaction maps or maps again, and what it was promised, once."""
        promised = self.promised[rank]
        for run in runs:
            if run in promised:
                promised.remove(run)
            elif self.states[run] not in _MAY_BE_MAPPED_BY_A_RANK:
                raise Broken(f"rank {rank} maps {run}, which is {self.states[run].name}")

    def may_unmap(self, rank: int, runs: Iterable[Run], finished_step: int) -> None:
        """A rank may unmap what is on its way out, or back, and what no step in flight there may read."""
        for run in runs:
            if self.states[run] not in _MAY_BE_UNMAPPED_BY_A_RANK:
                raise Broken(f"rank {rank} unmaps {run}, which is {self.states[run].name}")
            if self.last_read[run] > finished_step:
                raise Broken(f"rank {rank} unmaps {run}, which step {self.last_read[run]} reads, and it has finished {finished_step}")

    def must_cover(self, rank: int, credit: dict[int, int], driver: Driver) -> None:
        """The rank holds what the owner may still promise and what it has promised."""
        promised: dict[int, int] = dict(credit)
        for _, count in self.promised[rank]:
            promised[count] = promised.get(count, 0) + 1
        for run_pages, count in promised.items():
            if driver.handles[run_pages] < count:
                raise Broken(f"{count} runs of {run_pages} pages are promised or can be, rank {rank} holds {driver.handles[run_pages]}")
