# SPDX-License-Identifier: Apache-2.0
"""Faults that such protocols have had, put into ours one at a time: the simulation finds each, and nothing without them."""

from dataclasses import replace
from itertools import product

import pytest

from kvcached.errors import StateUnknown
from kvcached.ranks.actions import UnmapRelease
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.coordinator import Coordinator
from kvcached.ranks.operations import OpKind, Outbox
from kvcached.ranks.participant import AwaitStep, Participant, Perform
from kvcached.ranks.transactions import Abort, Commit, MapNow, Phase, Revert
from kvcached.testing.ranksim.cluster import Cluster
from kvcached.testing.ranksim.driver import Broken
from kvcached.testing.ranksim.simulation import Simulation

DONE = Outcome(Verdict.DONE)
SEEDS = range(150)
SIZES = [(1, 1), (2, 2)]


class FailureIsSuccess(Participant):
    """A rank's failure to map, for want of memory, is answered as if it had worked."""

    def performed(self, id, outcome):
        return super().performed(id, DONE if outcome.verdict is Verdict.EXHAUSTED else outcome)


class UndoTakesOlderPages(Participant):
    """An undo unmaps what the transaction before it mapped, too."""

    def __init__(self):
        super().__init__()
        self.older = ()

    def received(self, message):
        effects = super().received(message)
        if isinstance(message, Revert):
            return [self.more(effect) for effect in effects]
        if isinstance(message, MapNow) and self._history[message.tx].phase is Phase.DONE:
            self.older = message.runs
        return effects

    def performed(self, id, outcome):
        deed = self._running[id]
        effects = super().performed(id, outcome)
        opening = getattr(self._history.get(getattr(deed, "tx", 0)), "opening", None)
        if isinstance(opening, MapNow) and deed.goal is Phase.DONE and outcome.verdict is Verdict.DONE:
            self.older = opening.runs
        return effects

    def more(self, effect):
        if isinstance(effect, Perform) and isinstance(effect.action, UnmapRelease):
            older = tuple(run for run in self.older if run not in effect.action.runs)
            return replace(effect, action=UnmapRelease(effect.action.runs + older))
        return effect


class UndoFailureIsSwallowed(Coordinator):
    """An undo that left pages unknown passes for one that worked."""

    def _went_well(self, transaction, rank, outcome):
        return super()._went_well(transaction, rank, outcome if outcome.verdict is Verdict.DONE else DONE)


class LateAnswerCountsForTheNext(Coordinator):
    """Answers are matched by their order, not by their transaction."""

    def answered(self, rank, answer):
        if answer.tx and answer.tx not in self._under_way and self._under_way:
            answer = replace(answer, tx=next(iter(self._under_way)))
        return super().answered(rank, answer)


class AbortAfterCommit(Coordinator):
    """A commit that is not answered in time is aborted."""

    def reminded(self, tx, attempt):
        transaction = self._under_way.get(tx)
        if transaction is not None and transaction.attempt == attempt and transaction.ending is Commit:
            transaction.ending = Abort
        return super().reminded(tx, attempt)


class UnmapsWithoutWaiting(Participant):
    """The step after which a page may go is not waited for."""

    def _await(self, step, deed):
        return AwaitStep(super()._await(step, deed).id, 0)


class StaleWorldSize(Coordinator):
    """The number of ranks was read before the last one had started."""

    def __init__(self, ranks, page_bytes=(), names=()):
        super().__init__(max(1, ranks - 1), page_bytes, names)

    def answered(self, rank, answer):
        return super().answered(rank, answer) if rank < self.ranks else []


class CountsCreditOfOneRank(Coordinator):
    """Credit is what the first rank that answered holds, not what all hold."""

    def _went_well(self, transaction, rank, outcome):
        transaction.awaited = {rank}
        return super()._went_well(transaction, rank, outcome)


class SettlesBeforeTheUndo(Coordinator):
    """A failure is told before the other ranks have gone back."""

    def _went_wrong(self, transaction, rank, outcome):
        effects = super()._went_wrong(transaction, rank, outcome)
        transaction.awaited.clear()
        return effects + self._settle(transaction) if transaction.opening.tx in self._under_way else effects


class CommitIsNotRepeated(Coordinator):
    """A commit is sent once."""

    def reminded(self, tx, attempt):
        transaction = self._under_way.get(tx)
        return [] if transaction is not None and transaction.ending is Commit else super().reminded(tx, attempt)


class ForgetsTheTail(Coordinator):
    """Operations are sent once, with the next message, executed or not."""

    def tail(self):
        tail = super().tail()
        self._outbox._tail.clear()
        return tail


class MapsBeforeAllHaveUnmapped(Outbox):
    """A recalled page is free when one rank has unmapped it."""

    def note(self, rank, applied, completed):
        done = super().note(rank, applied, completed)
        self._leaving.clear()
        self.completed_everywhere = max(self._completed)
        return done


class FreesPagesEarly(Coordinator):
    """See `MapsBeforeAllHaveUnmapped`."""

    def __init__(self, ranks, page_bytes=(), names=()):
        super().__init__(ranks, page_bytes, names)
        self._outbox = MapsBeforeAllHaveUnmapped(ranks)


class PreparesAfterItsAbort(Participant):
    """An end that comes before its beginning leaves no trace."""

    def _close_unheard(self, tx, kind):
        effects = super()._close_unheard(tx, kind)
        self._history.pop(tx, None)
        return effects


class PerformsRepeats(Participant):
    """What comes twice is done twice."""

    def _open(self, message):
        entry = self._history.get(message.tx)
        if entry is not None and entry.phase is Phase.DONE:
            del self._history[message.tx]
        return super()._open(message)


class RevertsWithoutWaiting(Participant):
    """A revert that comes while its transaction runs finds nothing to undo."""

    def _close(self, message):
        entry = self._history.get(message.tx)
        if isinstance(message, Revert) and entry is not None and entry.phase is Phase.RUNNING:
            return [self._answer(message.tx, Phase.REVERTED, DONE)]
        return super()._close(message)


class StepOvertakesItsMaps(Participant):
    """A step runs before the maps that another channel brought are performed."""

    @property
    def maps_pending(self):
        return 0


class MapIsAppliedWhenItIsQueued(Participant):
    """A map is acknowledged before it is performed, so that no later step brings it, and none waits for it."""

    def _progress(self):
        return self._inbox.applied, self._inbox.completed


class UnmapOvertakesItsMap(Participant):
    """A run is unmapped while the map that came before is still being performed."""

    def _unmap_deferred(self):
        mapping, self._mapping = self._mapping, set()
        effects = super()._unmap_deferred()
        self._mapping = mapping
        return effects


class UnmapCompletesWhenItIsApplied(Participant):
    """An unmap is called complete when it is queued."""

    def _accept(self, ops):
        effects = super()._accept(ops)
        for op in ops:
            if op.kind is OpKind.UNMAP and op.number > self._inbox.completed:
                self._inbox.finish(op.number)
        return effects


class StrandedPagesAreFree(Coordinator):
    """An unmap that failed on a rank passes for one that worked."""

    def answered(self, rank, answer):
        return super().answered(rank, replace(answer, stranded=()))


class NamesStrandedPagesOnce(Participant):
    """An unmap that failed is told with one answer, which may be lost."""

    def _answer(self, tx, phase, outcome):
        reply = super()._answer(tx, phase, outcome)
        self._stranded = ()
        return reply


MUTANTS = [
    StrandedPagesAreFree,
    NamesStrandedPagesOnce,
    FailureIsSuccess,
    UndoTakesOlderPages,
    UndoFailureIsSwallowed,
    LateAnswerCountsForTheNext,
    AbortAfterCommit,
    UnmapsWithoutWaiting,
    StaleWorldSize,
    CountsCreditOfOneRank,
    SettlesBeforeTheUndo,
    CommitIsNotRepeated,
    ForgetsTheTail,
    FreesPagesEarly,
    PreparesAfterItsAbort,
    PerformsRepeats,
    RevertsWithoutWaiting,
    StepOvertakesItsMaps,
    MapIsAppliedWhenItIsQueued,
    UnmapOvertakesItsMap,
    UnmapCompletesWhenItIsApplied,
]


def cluster_with(mutant):
    role = "coordinator_class" if issubclass(mutant, Coordinator) else "participant_class"
    return type(f"With{mutant.__name__}", (Cluster,), {role: mutant})


def first_seed_that_finds(cluster_class):
    for seed, size in product(SEEDS, SIZES):
        try:
            Simulation(seed, *size, cluster_class=cluster_class).run()
        except (Broken, StateUnknown) as error:
            return seed, size, str(error)
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_finds_it(mutant):
    found = first_seed_that_finds(cluster_with(mutant))
    assert found is not None, f"{mutant.__doc__} Nobody noticed"
    print("seed {}, {}: {}".format(*found))


def test_the_same_seeds_find_nothing_without_them():
    assert first_seed_that_finds(Cluster) is None
