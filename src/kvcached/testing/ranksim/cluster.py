# SPDX-License-Identifier: Apache-2.0
"""One owner and its ranks: the real state machines, model drivers, and a pool that plans. Every method is one event, checked.

An event leaves in `out` what must happen later; who runs the cluster decides when, in which order, and whether.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvcached.ranks.actions import Action, MapFresh, MapHeld
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.coordinator import Coordinator, Remind, Send, Settle
from kvcached.ranks.coordinator import Effect as OwnerEffect
from kvcached.ranks.participant import Participant, Perform, Reply
from kvcached.testing.ranksim.book import Book, State
from kvcached.testing.ranksim.driver import Broken, Driver, Fault, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcached.ranks.operations import Op
    from kvcached.ranks.participant import Effect
    from kvcached.ranks.transactions import Answer, Classes, RankMessage


class Task(NamedTuple):
    """A method of `Cluster`, its arguments, and after how many seconds at the earliest it makes sense (0: any time)."""

    event: str
    rank: int
    arguments: tuple[object, ...] = ()
    after_s: float = 0.0


class Step(NamedTuple):
    number: int
    ops: tuple[Op, ...]
    reads: tuple[Run, ...]


class Rank:
    """A mapper's process: its state machine, its memory, the actions it was asked for and its stream of steps."""

    def __init__(self, driver: Driver, participant: Participant) -> None:
        self.participant = participant
        self.driver = driver
        self.actions: dict[int, Perform] = {}
        self.steps: deque[Step] = deque()  # arrived, not on the stream yet
        self.started = False  # the first of them has had its operations taken
        self.finished_step = 0
        self.waiting: dict[int, int] = {}  # id of an awaited step: the step
        self.alive = True


class Cluster:
    """`page_bytes`: of each rank; `budget_bytes`: of each rank's card; `runs`: the pool's pages, cut into runs for good."""

    coordinator_class: type[Coordinator] = Coordinator
    participant_class: type[Participant] = Participant

    def __init__(self, page_bytes: Sequence[int], budget_pages: int, runs: Sequence[Run]) -> None:
        count = len(page_bytes)
        self.coordinator = self.coordinator_class(count, page_bytes)
        self.ranks = [Rank(Driver(size, budget_pages * size), self.participant_class()) for size in page_bytes]
        self.drivers = [rank.driver for rank in self.ranks]
        self.book = Book(runs, count)
        self.out: list[Task] = []
        self.step = 0
        self.failed = False
        self.owner_alive = True
        self.settled = 0
        self.open: dict[int, tuple[str, tuple[Run, ...]]] = {}  # transactions: what for, on which runs
        self.recalls: deque[tuple[int, Run]] = deque()
        self.promises: deque[tuple[int, tuple[Run, ...]]] = deque()
        self._promised_by: dict[Run, int] = {}
        self._seen_credit: Classes = ()
        self._completed = 0

    # ------------------------------------------------------------------ what the pool decides

    def grow_credit(self, classes: Classes, urgent: bool) -> None:
        self._begin("credit", (), self.coordinator.grow_credit(classes, urgent))

    def release_credit(self, classes: Classes) -> None:
        self._begin("release", (), self.coordinator.release_credit(classes))

    def map_now(self, runs: tuple[Run, ...], urgent: bool) -> None:
        self.book.set(runs, State.MAPPING)
        self._begin("map", runs, self.coordinator.map_now(runs, urgent))

    def shrink(self, runs: tuple[Run, ...]) -> None:
        after_step = max(self.book.last_read[run] for run in runs)
        self.book.set(runs, State.SHRINKING)
        self._begin("shrink", runs, self.coordinator.shrink(runs, after_step))

    def promise(self, runs: tuple[Run, ...]) -> bool:
        """Whether it was promised; then the next step may read it."""
        if not self.coordinator.promise(runs):
            return False
        if self.failed:
            raise Broken("a pool that has failed promised memory")
        self.book.promise(runs)
        self.promises.append((self.coordinator.newest_operation, runs))
        self._promised_by.update(dict.fromkeys(runs, self.coordinator.newest_operation))
        self._check_credit()
        return True

    def recall(self, run: Run) -> None:
        number = self.coordinator.recall((run,), self.book.last_read[run])
        if number == 0:
            self.book.take_back(run)
        elif number is not None:
            self.book.states[run] = State.RECALLED
            self.recalls.append((number, run))
        self._check_credit()

    def run_step(self, reads: tuple[Run, ...]) -> None:
        """Build a step that reads these runs and send it to every rank."""
        self.step += 1
        for run in reads:
            self.book.last_read[run] = self.step
        step = Step(self.step, self.coordinator.tail(), reads)
        self.out.extend(Task("step_arrives", rank, (step,)) for rank in range(len(self.ranks)))

    def drop_step(self) -> None:
        """Build a step that is never executed."""
        self.coordinator.tail()

    def flush(self) -> None:
        self._carry_out(self.coordinator.flush())

    def _begin(self, purpose: str, runs: tuple[Run, ...], asked: tuple[int, Iterable[OwnerEffect]]) -> None:
        tx, effects = asked
        if tx in self.open:
            raise Broken(f"transaction {tx} was begun twice")
        self.open[tx] = (purpose, runs)
        self._carry_out(effects)
        self._check_credit()

    # ------------------------------------------------------------------ events at the owner

    def answer_arrives(self, rank: int, answer: Answer) -> None:
        if self.owner_alive:
            self._carry_out(self.coordinator.answered(rank, answer))
            self._check_completed()
            self._check_credit()

    def remind(self, rank: int, tx: int, attempt: int) -> None:
        if self.owner_alive:
            self._carry_out(self.coordinator.reminded(tx, attempt))

    def lose(self, rank: int) -> None:
        """The owner hears that the rank is gone."""
        if self.owner_alive:
            self._carry_out(self.coordinator.lost(rank, "its process ended"))

    def _carry_out(self, effects: Iterable[OwnerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.out.append(Task("message_arrives", effect.rank, (effect.message,)))
            elif isinstance(effect, Remind):
                self.out.append(Task("remind", -1, (effect.tx, effect.attempt), effect.after_s))
            elif isinstance(effect, Settle):
                self._settle(effect.tx, effect.outcome)
            else:
                self._fail()

    def _settle(self, tx: int, outcome: Outcome) -> None:
        if tx not in self.open:
            raise Broken(f"transaction {tx} was settled twice, or never begun")
        purpose, runs = self.open.pop(tx)
        self.settled += 1
        if outcome.verdict is Verdict.BROKEN:
            return  # the pool fails: nothing is believed of these runs any more
        if purpose == "map":
            self.book.settle(runs, outcome, State.MAPPED, State.UNMAPPED)
        elif purpose == "shrink":
            self.book.settle(runs, outcome, State.UNMAPPED, State.MAPPED)
        elif outcome.verdict is Verdict.UNKNOWN:
            raise Broken(f"{purpose} ended UNKNOWN, and nobody is told which memory that is")
        self.book.must_agree(runs, self.drivers)

    def _fail(self) -> None:
        if self.failed:
            raise Broken("the pool was failed twice")
        self.failed = True
        if self.open:
            raise Broken(f"the pool has failed and {len(self.open)} transactions are still open")

    # ------------------------------------------------------------------ events at a rank

    def message_arrives(self, rank: int, message: RankMessage) -> None:
        at = self.ranks[rank]
        if at.alive:
            self._follow(rank, at, at.participant.received(message))

    def step_arrives(self, rank: int, step: Step) -> None:
        at = self.ranks[rank]
        if at.alive:
            at.steps.append(step)
            self._launch(rank, at)

    def act(self, rank: int, id: int, fault: Fault | None = None) -> None:
        """Perform one of the actions that the rank was asked for; they may come in any order."""
        at = self.ranks[rank]
        if not at.alive:
            return
        effect = at.actions.pop(id)
        at.driver.fault = fault
        outcome = at.driver.perform(effect.action, lambda runs: self.book.may_unmap(rank, runs, at.finished_step))
        self._check_maps(rank, effect.action, outcome)
        if not self.failed and self.owner_alive and outcome.verdict is not Verdict.BROKEN:
            self.book.must_cover(rank, dict(self._seen_credit), at.driver)
        self.out.append(Task("performed", rank, (effect.id, outcome)))

    def performed(self, rank: int, id: int, outcome: Outcome) -> None:
        at = self.ranks[rank]
        if at.alive:
            self._follow(rank, at, at.participant.performed(id, outcome))
            self._launch(rank, at)

    def step_finishes(self, rank: int, number: int) -> None:
        at = self.ranks[rank]
        if at.alive:
            at.finished_step = max(at.finished_step, number)
            for id in [id for id, step in at.waiting.items() if step <= number]:
                self.step_passes(rank, id, True)

    def step_passes(self, rank: int, id: int, ok: bool) -> None:
        """An awaited step has passed, or is given up."""
        at = self.ranks[rank]
        if at.alive and at.waiting.pop(id, None) is not None:
            self._follow(rank, at, at.participant.step_passed(id, ok))

    def crash(self, rank: int) -> None:
        """The rank's process ends, with everything it had."""
        self.ranks[rank].alive = False

    def crash_owner(self) -> None:
        self.owner_alive = False

    def lose_owner(self, rank: int) -> None:
        """The rank hears that its owner is gone."""
        at = self.ranks[rank]
        if at.alive:
            self._follow(rank, at, at.participant.owner_lost())

    def _follow(self, rank: int, at: Rank, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.out.append(Task("answer_arrives", rank, (effect.answer,)))
            elif isinstance(effect, Perform):
                at.actions[effect.id] = effect
                self.out.append(Task("act", rank, (effect.id,)))
            else:
                at.waiting[effect.id] = effect.step
                passed = effect.step <= at.finished_step
                self.out.append(Task("step_passes", rank, (effect.id, passed), 0.0 if passed else 2.0))

    def _launch(self, rank: int, at: Rank) -> None:
        """Put steps on the stream as soon as all maps that came before them are performed."""
        while at.steps and at.participant.broken is None:
            step = at.steps[0]
            if not at.started:
                at.started = True
                self._follow(rank, at, at.participant.step_ops(step.ops))
            if step.ops and at.participant.maps_pending:
                return
            for run in step.reads:
                if run not in at.driver.mapped:
                    raise Broken(f"rank {rank} runs step {step.number}, which reads {run}, and has not mapped it")
            at.steps.popleft()
            at.started = False
            self.out.append(Task("step_finishes", rank, (step.number,)))

    # ------------------------------------------------------------------ invariants

    def _check_maps(self, rank: int, action: Action, outcome: Outcome) -> None:
        if isinstance(action, MapHeld | MapFresh) and outcome.verdict is Verdict.DONE and not self.failed:
            self.book.may_map(rank, action.runs)

    def _check_credit(self) -> None:
        credits = self.coordinator.credits()
        if credits != self._seen_credit:
            self._seen_credit = credits
            if not self.failed:
                for rank, at in enumerate(self.ranks):
                    self.book.must_cover(rank, dict(credits), at.driver)

    def _check_completed(self) -> None:
        """What the owner takes for finished everywhere is."""
        completed = self.coordinator.completed_everywhere
        if completed == self._completed or self.failed:
            return
        self._completed = completed
        while self.promises and self.promises[0][0] <= completed:
            number, runs = self.promises.popleft()
            still = [run for run in runs if self.book.states[run] is State.PROMISED and self._promised_by[run] == number]
            self.book.set(still, State.MAPPED)
            self.book.must_agree(still, self.drivers)
        while self.recalls and self.recalls[0][0] <= completed:
            number, run = self.recalls.popleft()
            if self.coordinator.stranded(number):
                self.book.states[run] = State.QUARANTINED
                self.book.quarantined.update(range(run[0], run[0] + run[1]))
            else:
                self.book.states[run] = State.UNMAPPED
            self.book.must_agree((run,), self.drivers)

    def check_all(self) -> None:
        """Everything at once: what the events check one by one is true of every run and every rank."""
        for driver in self.drivers:
            driver.check()
            if driver.held_bytes > driver.lease_bytes:
                raise Broken("more is held than leased")
        if not self.failed and self.owner_alive:
            self.book.must_agree(self.book.states, self.drivers)
            for rank, driver in enumerate(self.drivers):
                self.book.must_cover(rank, dict(self.coordinator.credits()), driver)

    def check_end(self) -> None:
        """Nothing is under way any more: every transaction has settled, and every rank holds the same."""
        self.check_all()
        if self.failed or not self.owner_alive:
            return
        if self.open or self.recalls or self.promises:
            raise Broken(f"open for ever: {self.open} {list(self.recalls)} {list(self.promises)}")
        if not self.coordinator.is_idle:
            raise Broken("the owner still waits for something")
        for rank, at in enumerate(self.ranks):
            if at.actions or at.waiting or at.driver.aside:
                raise Broken(f"rank {rank} has not ended what it began: {at.actions} {at.waiting} {at.driver.aside}")
