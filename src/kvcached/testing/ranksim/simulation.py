# SPDX-License-Identifier: Apache-2.0
"""Schedules and faults drawn from a seed, on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Final

from kvcached.ranks.actions import AcquireHandles, MapHeld, ReleaseHandles
from kvcached.testing.ranksim.book import State
from kvcached.testing.ranksim.cluster import Cluster, Task
from kvcached.testing.ranksim.driver import Broken, Fault, Run

RUNS: Final[tuple[Run, ...]] = tuple((first, 1) for first in range(16)) + tuple((first, 4) for first in range(16, 48, 4))
BUDGET_PAGES: Final = 44
_FULL_CHECK_EVENTS: Final = 64
_FATAL: Final = (AcquireHandles, ReleaseHandles, MapHeld)
"""Of these nobody can say afterwards what there is: the pool fails."""
_DRAIN_EVENTS: Final = 200_000


@dataclass(frozen=True, slots=True)
class Profile:
    """What may go wrong in one simulation: chances per message or per call. `crash_at`: the event at which a process ends (0: none);
    `crash_rank`: whose (-1: the owner's)."""

    lose: float = 0.0
    repeat: float = 0.0
    late: float = 0.0
    fail: float = 0.0
    undo_fails: float = 0.0
    breaks: float = 0.0
    slow_steps: float = 0.0
    slow_calls: float = 0.0
    early_reminders: float = 0.0
    crash_at: int = 0
    crash_rank: int = 0

    @classmethod
    def draw(cls, random: Random, ranks: int, events: int) -> Profile:
        """A profile in which each kind of fault is present or not, so that runs differ and some go far."""

        def chance(of_presence: float, largest: float) -> float:
            return random.uniform(0, largest) if random.random() < of_presence else 0.0

        crashes = random.random() < 0.25
        return cls(
            lose=chance(0.5, 0.2),
            repeat=chance(0.5, 0.2),
            late=chance(0.6, 0.3),
            fail=chance(0.6, 0.1),
            undo_fails=chance(0.3, 0.08),
            breaks=chance(0.1, 0.003),
            slow_steps=chance(0.3, 0.2),
            slow_calls=chance(0.3, 0.3),
            early_reminders=chance(0.3, 0.5),
            crash_at=random.randrange(1, events) if crashes else 0,
            crash_rank=random.randrange(-1, ranks),
        )


class Simulation:
    """One run of a cluster of `ranks` ranks in each of `stages` stages, which differ in bytes per page. The same seed is the same run."""

    def __init__(
        self,
        seed: int,
        ranks: int,
        stages: int = 1,
        events: int = 0,
        profile: Profile | None = None,
        cluster_class: type[Cluster] = Cluster,
    ) -> None:
        self.random = Random(f"{seed} {ranks} {stages}")
        page_bytes = [stage + 1 for stage in range(stages) for _ in range(ranks)]
        self.events = events or 300 + 40 * len(page_bytes)  # a transaction takes more of them the more ranks there are
        self.profile = Profile.draw(self.random, len(page_bytes), self.events) if profile is None else profile
        self.cluster = cluster_class(page_bytes, BUDGET_PAGES, RUNS)
        self.checked = 0
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Task]] = []
        self._sequence = 0
        self._step_due_s = [0.0] * len(page_bytes)  # steps arrive in order on each rank, and finish in order
        self._step_end_s = [0.0] * len(page_bytes)
        self._calm = False

    def run(self) -> int:
        """Until `events` events have happened and everything under way has ended. Returns the events checked; raises `Broken`."""
        self._plan_later()
        while self._heap and self.checked < self.events:
            self._next()
        self._calm = True  # no faults, no plans from here on: everything must come to an end
        while self._heap:
            self._next()
            if self.checked > self.events + _DRAIN_EVENTS:
                raise Broken("what is under way does not end")
        self._end()
        return self.checked

    def _end(self) -> None:
        cluster = self.cluster
        if not cluster.failed and cluster.owner_alive:
            cluster.flush()
            self._schedule_all()
            while self._heap:
                self._next()
        cluster.check_end()

    def _next(self) -> None:
        self.now_s, _, task = heappop(self._heap)
        self.checked += 1
        if task.event == "plan":
            self._plan()
        elif task.event == "act":
            self._act(task)
        elif task.rank == -1:
            self.cluster.remind(-1, *task.arguments)  # type: ignore[arg-type]
        else:
            getattr(self.cluster, task.event)(task.rank, *task.arguments)
        if self.checked == self.profile.crash_at:
            self._crash(self.profile.crash_rank)
        self._schedule_all()
        if self.checked % _FULL_CHECK_EVENTS == 0:
            self.cluster.check_all()

    # ------------------------------------------------------------------ when things happen

    def _schedule_all(self) -> None:
        out = self.cluster.out
        if out:
            for task in out:
                _DELAYS[task.event](self, task)
            out.clear()

    def _at(self, time_s: float, task: Task) -> None:
        self._sequence += 1
        heappush(self._heap, (time_s, self._sequence, task))

    def _send(self, task: Task) -> None:
        """Out of band: lost, repeated and overtaken."""
        random, profile = self.random.random, self.profile
        if not self._calm:
            if random() < profile.lose:
                return
            if random() < profile.repeat:
                self._at(self.now_s + random() * 3.0, task)
        self._at(self.now_s + (random() * 3.0 if random() < profile.late else 0.01 + random() * 0.01), task)

    def _soon(self, task: Task) -> None:
        slow = self.random.random() < self.profile.slow_calls
        self._at(self.now_s + self.random.random() * (1.0 if slow else 0.01), task)

    def _after(self, task: Task) -> None:
        early = self.random.random() < self.profile.early_reminders
        self._at(self.now_s + task.after_s * (self.random.random() * 0.1 if early else 1.0), task)

    def _step_arrives(self, task: Task) -> None:
        """In band: in order, never lost, each rank with its own lag."""
        lag_s = self.random.random() * (1.0 if self.random.random() < self.profile.slow_steps else 0.02)
        due_s = self._step_due_s[task.rank] = max(self._step_due_s[task.rank], self.now_s + lag_s)
        self._at(due_s, task)

    def _step_finishes(self, task: Task) -> None:
        length_s = self.random.random() * (3.0 if self.random.random() < self.profile.slow_steps else 0.05)
        end_s = self._step_end_s[task.rank] = max(self._step_end_s[task.rank], self.now_s) + length_s
        self._at(end_s, task)

    # ------------------------------------------------------------------ faults

    def _act(self, task: Task) -> None:
        id: int = task.arguments[0]  # type: ignore[assignment]
        at = self.cluster.ranks[task.rank]
        fault = self._draw_fault() if at.alive and not self._calm else None
        if fault is Fault.UNDO_FAILS and isinstance(at.actions[id].action, _FATAL) and self.random.random() < 0.9:
            fault = None  # or hardly any pool would live to see the rest
        self.cluster.act(task.rank, id, fault)

    def _draw_fault(self) -> Fault | None:
        drawn, profile = self.random.random(), self.profile
        if drawn < profile.breaks:
            return Fault.BREAK
        if drawn < profile.breaks + profile.undo_fails:
            return Fault.UNDO_FAILS
        if drawn < profile.breaks + profile.undo_fails + profile.fail:
            return Fault.FAIL
        return None

    def _crash(self, rank: int) -> None:
        cluster = self.cluster
        if rank >= 0:
            cluster.crash(rank)
            self._at(self.now_s + self.random.random(), Task("lose", rank))
        else:
            cluster.crash_owner()
            for each in range(len(cluster.ranks)):
                self._at(self.now_s + self.random.random(), Task("lose_owner", each))

    # ------------------------------------------------------------------ the pool's plans

    def _plan_later(self) -> None:
        if not self._calm and self.cluster.owner_alive and not self.cluster.failed:
            self._at(self.now_s + self.random.random() * 0.05, Task("plan", -1))

    def _plan(self) -> None:
        cluster, random = self.cluster, self.random
        if not self._calm and cluster.owner_alive and not cluster.failed:
            random.choices(_PLANS, _WEIGHTS)[0](self)
            if random.random() < 0.05:
                driver = random.choice(cluster.drivers)
                driver.budget_bytes = random.randrange(BUDGET_PAGES // 2, BUDGET_PAGES + 8) * driver.page_bytes
        self._plan_later()

    def _some(self, *states: State, most: int = 3) -> tuple[Run, ...]:
        runs = self.cluster.book.of(*states)
        return tuple(self.random.sample(runs, min(len(runs), self.random.randint(1, most))))

    def _grow_credit(self) -> None:
        wanted = {run_pages: self.random.randint(0, 3) for run_pages in (1, 4)}
        classes = tuple((run_pages, count) for run_pages, count in wanted.items() if count)
        if classes:
            self.cluster.grow_credit(classes, self.random.random() < 0.5)

    def _release_credit(self) -> None:
        held = self.cluster.coordinator.credits()
        if held:
            run_pages, count = self.random.choice(held)
            self.cluster.release_credit(((run_pages, self.random.randint(1, count)),))

    def _map_now(self) -> None:
        runs = self._some(State.UNMAPPED)
        if runs:
            self.cluster.map_now(runs, self.random.random() < 0.5)

    def _shrink(self) -> None:
        runs = self._some(State.MAPPED, State.MAPPED, State.PROMISED)
        if runs:
            self.cluster.shrink(runs)

    def _recall(self) -> None:
        for run in self._some(State.MAPPED, State.PROMISED, most=2):
            self.cluster.recall(run)

    def _step(self) -> None:
        """As an engine does: promise what the step needs, and send it along."""
        self.cluster.promise(self._some(State.UNMAPPED, most=2))
        if self.random.random() < 0.1:
            self.cluster.drop_step()
            return
        self.cluster.run_step(self._some(State.PROMISED, most=4) + self._some(State.MAPPED, most=2))

    def _promise_only(self) -> None:
        self.cluster.promise(self._some(State.UNMAPPED, most=2))

    def _flush(self) -> None:
        self.cluster.flush()


_DELAYS: Final = {
    "message_arrives": Simulation._send,
    "answer_arrives": Simulation._send,
    "act": Simulation._soon,
    "performed": Simulation._soon,
    "step_passes": Simulation._after,
    "remind": Simulation._after,
    "step_arrives": Simulation._step_arrives,
    "step_finishes": Simulation._step_finishes,
}
_PLANS: Final = (
    Simulation._grow_credit,
    Simulation._release_credit,
    Simulation._map_now,
    Simulation._shrink,
    Simulation._recall,
    Simulation._step,
    Simulation._promise_only,
    Simulation._flush,
)
_WEIGHTS: Final = (4, 1, 2, 4, 3, 8, 1, 1)
