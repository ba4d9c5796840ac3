# SPDX-License-Identifier: Apache-2.0
"""The owner's side of every transaction over all ranks, without I/O: events in, effects out. Pure.

It promises only what every rank holds, and keeps the ranks the same: all of them or none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.courses import COURSES, OPENING_PHASES, Transaction
from kvcached.ranks.operations import Op, OpKind, Outbox, pages_of
from kvcached.ranks.transactions import (
    HISTORY,
    MAX_RUNS,
    Acquire,
    Answer,
    Classes,
    Commit,
    MapNow,
    Opening,
    Phase,
    Prepare,
    Query,
    RankMessage,
    Release,
    classes_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST_PAUSE_S: Final = 0.5
"""How long an answer is waited for before it is asked about; the pause doubles each time."""
LONGEST_PAUSE_S: Final = 8.0

# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    rank: int
    message: RankMessage


@dataclass(frozen=True, slots=True)
class Settle:
    """The transaction has ended, once. `rank`: of a failure, whose bytes `outcome.size_bytes` are (-1: of no rank alone)."""

    tx: int
    outcome: Outcome
    rank: int = -1


@dataclass(frozen=True, slots=True)
class Remind:
    """Say `reminded(tx, attempt)` after so long; a reminder that is no longer needed does nothing."""

    tx: int
    attempt: int
    after_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """The ranks may differ, or one is gone: the pool refuses work from here on. Once."""

    reason: str


Effect = Send | Settle | Remind | Fail

_SEVERITY: Final = (Verdict.BROKEN, Verdict.UNKNOWN, Verdict.REFUSED, Verdict.BUSY, Verdict.EXHAUSTED)


class Coordinator:
    """One owner over `ranks` mappers. Not safe for threads: its shell serialises the calls and carries out the effects in order.

    `page_bytes`: bytes of one page on each rank, to find the tightest (default: all the same). `names`: how errors call the ranks.
    """

    def __init__(self, ranks: int, page_bytes: Sequence[int] = (), names: Sequence[str] = ()) -> None:
        self.ranks = ranks
        self._page_bytes = tuple(page_bytes) or (1,) * ranks
        self._names = tuple(names)
        self._outbox = Outbox(ranks)
        self._credit: Counter[int] = Counter()  # handles by class that every rank holds and nobody was promised
        self._under_way: dict[int, Transaction] = {}  # oldest first
        self._newest_tx = 0
        self._ticket = 0
        self._stranded: dict[int, int] = {}  # unmaps that failed on a rank: operation, rank
        self._flush_attempt = 0
        self._flush_pause_s = FIRST_PAUSE_S
        self._failure: Outcome | None = None

    # ------------------------------------------------------------------ credit and in-band operations

    @property
    def failed(self) -> str:
        """Why work is refused; empty while it is not."""
        return self._failure.reason if self._failure is not None else ""

    @property
    def completed_everywhere(self) -> int:
        """Operations up to this number are finished on every rank."""
        return self._outbox.completed_everywhere

    @property
    def newest_operation(self) -> int:
        """The number of the operation that was decided last."""
        return self._outbox.newest

    def stranded(self, number: int) -> str:
        """Why the pages of an unmap that is finished everywhere can never be mapped again; empty when they can."""
        rank = self._stranded.get(number)
        return "" if rank is None else f"{self._name(rank)}: could not unmap what is unmapped on the others"

    @property
    def is_idle(self) -> bool:
        """Whether every transaction has ended and every operation is finished on every rank."""
        return not self._under_way and not self._outbox.behind()

    def credit(self, run_pages: int) -> int:
        """Runs of so many pages that can be promised: every rank holds a handle for each."""
        return self._credit[run_pages] if self._failure is None else 0

    def credits(self) -> Classes:
        """All that can be promised."""
        return tuple(sorted((+self._credit).items())) if self._failure is None else ()

    def promise(self, runs: Iterable[tuple[int, int]]) -> bool:
        """Map the runs with the next step, from credit. False, and nothing changed: credit is short, a page is still on its way
        out somewhere, or a rank is too far behind."""
        runs = tuple(runs)
        need = classes_of(runs)
        if self._failure is not None or any(self._credit[run_pages] < count for run_pages, count in need):
            return False
        if self._outbox.is_leaving(runs) or not self._outbox.has_room(len(runs)):
            return False
        self._credit.subtract(dict(need))
        self._outbox.map(runs)
        return True

    def recall(self, runs: Iterable[tuple[int, int]], after_step: int) -> int | None:
        """Unmap with the next step what no step after `after_step` reads. Returns the number of the operation: the pages can be
        mapped again, and their handles are credit again, when `completed_everywhere` has reached it and it is not `stranded`. 0: at
        once, since nobody had been told to map them. None, and nothing changed: a rank is too far behind."""
        runs = tuple(runs)
        if self._failure is not None or not self._outbox.has_room(len(runs)):
            return None
        unheard = self._outbox.cancel(runs)
        self._credit.update(dict(classes_of(unheard)))
        left = tuple(run for run in runs if run not in unheard) if unheard else runs
        return self._outbox.unmap(left, after_step) if left else 0

    def tail(self) -> tuple[Op, ...]:
        """What a step message carries to every rank."""
        return self._outbox.tail()

    def flush(self) -> list[Effect]:
        """Bring the operations to ranks that have not finished them, without a step; asks again until they have."""
        self._flush_pause_s = FIRST_PAUSE_S
        return self._flush()

    def _flush(self) -> list[Effect]:
        behind = self._outbox.behind()
        if not behind or self._failure is not None:
            return []
        self._flush_attempt += 1
        query = Query(0, self._outbox.tail())
        return [*(Send(rank, query) for rank in behind), Remind(0, self._flush_attempt, self._flush_pause_s)]

    # ------------------------------------------------------------------ what is asked

    def grow_credit(self, classes: Classes, urgent: bool = False) -> tuple[int, list[Effect]]:
        """Every rank acquires so many handles, or none does. `urgent`: requests wait for it."""
        return self._open(Acquire(self._next_tx(), classes, urgent, self._ticket if urgent else 0), sum(count for _, count in classes))

    def map_now(self, runs: Iterable[tuple[int, int]], urgent: bool = False) -> tuple[int, list[Effect]]:
        """Every rank maps the runs with fresh memory now, or none does."""
        runs = tuple(runs)
        opening = MapNow(self._next_tx(), runs, urgent, self._ticket if urgent else 0)
        if self._outbox.is_leaving(runs):
            return opening.tx, [Settle(opening.tx, Outcome(Verdict.BUSY, reason="a page is still being unmapped on some rank"))]
        return self._open(opening, len(runs))

    def shrink(self, runs: Iterable[tuple[int, int]], after_step: int) -> tuple[int, list[Effect]]:
        """Every rank unmaps and releases the runs once its stream has passed the step, or none does."""
        runs = tuple(runs)
        return self._open(Prepare(self._next_tx(), runs, after_step), len(runs))

    def release_credit(self, classes: Classes) -> tuple[int, list[Effect]]:
        """Every rank gives so many handles back. REFUSED when that is more than the credit."""
        opening = Release(self._next_tx(), classes)
        if self._failure is None and any(self._credit[run_pages] < count for run_pages, count in classes):
            return opening.tx, [Settle(opening.tx, Outcome(Verdict.REFUSED, reason="there is less credit than that"))]
        effects = self._open(opening, 0)
        if opening.tx in self._under_way:
            self._credit.subtract(dict(classes))
        return effects

    def _next_tx(self) -> int:
        self._newest_tx += 1
        return self._newest_tx

    def _open(self, opening: Opening, runs: int) -> tuple[int, list[Effect]]:
        refusal = self._refusal(runs)
        if refusal is not None:
            return opening.tx, [Settle(opening.tx, refusal)]
        transaction = Transaction(opening, COURSES[type(opening)])
        self._under_way[opening.tx] = transaction
        return opening.tx, self._ask(transaction, range(self.ranks))

    def _refusal(self, runs: int) -> Outcome | None:
        if self._failure is not None:
            return self._failure
        if runs > MAX_RUNS:
            return Outcome(Verdict.REFUSED, reason=f"{runs} runs are more than the {MAX_RUNS} of one transaction")
        if self._under_way and self._newest_tx - next(iter(self._under_way)) >= HISTORY:
            return Outcome(Verdict.BUSY, reason=f"transaction {next(iter(self._under_way))} has not ended on every rank")
        return None

    # ------------------------------------------------------------------ events

    def answered(self, rank: int, answer: Answer) -> list[Effect]:
        """A rank said something. What it says of transactions that are unknown or settled is ignored."""
        if self._failure is not None:
            return []
        if answer.applied > self._outbox.newest:
            return self._fail(rank, f"acknowledged operation {answer.applied}, which nobody sent")
        self._stranded.update(dict.fromkeys(answer.stranded, rank))
        for op in self._outbox.note(rank, answer.applied, answer.completed):
            if op.kind is OpKind.UNMAP and op.number not in self._stranded:  # else not every rank holds the handles
                self._credit.update(dict(classes_of(op.runs)))
        if answer.outcome.verdict is Verdict.BROKEN:
            return self._fail(rank, answer.outcome.reason)
        transaction = self._under_way.get(answer.tx)
        if transaction is None or rank not in transaction.awaited:
            return []
        return self._heard(transaction, rank, answer)

    def reminded(self, tx: int, attempt: int) -> list[Effect]:
        """A pause is over: ask what became of it, then send it again, in turn, for as long as it takes."""
        if tx == 0:
            self._flush_pause_s = min(self._flush_pause_s * 2, LONGEST_PAUSE_S)
            return self._flush() if attempt == self._flush_attempt else []
        transaction = self._under_way.get(tx)
        if transaction is None or attempt != transaction.attempt:
            return []
        ops = self._outbox.tail()
        message = Query(tx, ops) if attempt % 2 else transaction.message(ops)
        transaction.pause_s = min(transaction.pause_s * 2, LONGEST_PAUSE_S)
        return [*(Send(rank, message) for rank in sorted(transaction.awaited)), self._remind(transaction)]

    def lost(self, rank: int, reason: str) -> list[Effect]:
        """The rank is gone, for good."""
        return self._fail(rank, reason) if self._failure is None else []

    # ------------------------------------------------------------------ one transaction

    def _ask(self, transaction: Transaction, ranks: Iterable[int]) -> list[Effect]:
        """Send what it is at now, and wait for all of them."""
        transaction.awaited = set(ranks)
        transaction.pause_s = FIRST_PAUSE_S
        transaction.attempt = (transaction.attempt + 1) // 2 * 2  # the first reminder asks, the next sends again
        if not transaction.awaited:
            return self._settle(transaction)
        message = transaction.message(self._outbox.tail())
        return [*(Send(rank, message) for rank in transaction.awaited), self._remind(transaction)]

    def _remind(self, transaction: Transaction) -> Remind:
        transaction.attempt += 1
        return Remind(transaction.opening.tx, transaction.attempt, transaction.pause_s)

    def _heard(self, transaction: Transaction, rank: int, answer: Answer) -> list[Effect]:
        if answer.phase is Phase.UNHEARD:
            return [Send(rank, transaction.message(self._outbox.tail()))]
        if answer.phase is transaction.expected:
            return self._went_well(transaction, rank, answer.outcome)
        if answer.phase is Phase.FAILED and transaction.ending is None:
            return self._went_wrong(transaction, rank, answer.outcome)
        if answer.phase is Phase.FAILED and transaction.ending is not Commit:
            transaction.failures[rank] = answer.outcome  # and it still has to say that it is back
            return []
        if answer.phase in OPENING_PHASES:
            return []  # said before it heard of the end
        return self._fail(rank, f"answered {answer.phase.name} where {transaction.expected.name} was due: {answer.outcome.reason}")

    def _went_well(self, transaction: Transaction, rank: int, outcome: Outcome) -> list[Effect]:
        """The rank is where it should be, except for what `outcome` says of an end that did not work."""
        transaction.awaited.remove(rank)
        if outcome.verdict not in (Verdict.DONE, Verdict.UNKNOWN):
            return self._fail(rank, f"{transaction.expected.name}, but {outcome.verdict.name}: {outcome.reason}")
        if outcome.verdict is Verdict.UNKNOWN:
            transaction.failures[rank] = outcome
        transaction.released_bytes.append(outcome.size_bytes)
        return [] if transaction.awaited else self._move_on(transaction)

    def _went_wrong(self, transaction: Transaction, rank: int, outcome: Outcome) -> list[Effect]:
        """One rank could not: all others go back, also those that have not been heard of."""
        transaction.awaited.remove(rank)
        transaction.failures[rank] = outcome
        if transaction.course.back is None:
            return [] if transaction.awaited else self._settle(transaction)
        transaction.ending = transaction.course.back
        return self._ask(transaction, (other for other in range(self.ranks) if other != rank))

    def _move_on(self, transaction: Transaction) -> list[Effect]:
        if transaction.ending is None and transaction.course.forward is not None:
            transaction.ending = transaction.course.forward
            transaction.released_bytes.clear()
            return self._ask(transaction, range(self.ranks))
        return self._settle(transaction)

    # ------------------------------------------------------------------ how it ends

    def _settle(self, transaction: Transaction) -> list[Effect]:
        opening = transaction.opening
        rank, outcome = self._verdict(transaction)
        if outcome.verdict is Verdict.BROKEN or (outcome.verdict is Verdict.UNKNOWN and not outcome.pages):
            return self._fail(rank, outcome.reason)
        del self._under_way[opening.tx]
        if isinstance(opening, Acquire) and outcome.verdict is Verdict.DONE:
            self._credit.update(dict(opening.classes))
        if isinstance(opening, Acquire | MapNow) and opening.urgent:
            tickets = [failure.ticket for failure in transaction.failures.values() if failure.ticket]
            self._ticket = 0 if outcome.verdict is Verdict.DONE else min(tickets, default=self._ticket)
        return [Settle(opening.tx, outcome, rank)]

    def _verdict(self, transaction: Transaction) -> tuple[int, Outcome]:
        """The worst that a rank said, and which rank; of refusals, the tightest."""
        failures = transaction.failures
        if not failures:
            return -1, Outcome(Verdict.DONE, min(transaction.released_bytes))
        rank, worst = min(failures.items(), key=lambda item: (_SEVERITY.index(item[1].verdict), self._grantable_pages(*item)))
        if worst.verdict is Verdict.UNKNOWN:
            worst = replace(worst, pages=self._unknown_pages(transaction))
        return rank, replace(worst, reason=f"{self._name(rank)}: {worst.reason}")

    def _unknown_pages(self, transaction: Transaction) -> tuple[int, ...]:
        """None when a rank cannot name them. Once a commit was sent, pages are gone on the other ranks: none may be taken for mapped."""
        opening, named = (
            transaction.opening,
            [outcome.pages for outcome in transaction.failures.values() if outcome.verdict is Verdict.UNKNOWN],
        )
        if not all(named):
            return ()
        if transaction.ending is Commit and isinstance(opening, Prepare):
            return pages_of(opening.runs)
        return tuple(sorted({page for pages in named for page in pages}))

    def _grantable_pages(self, rank: int, outcome: Outcome) -> int:
        return outcome.size_bytes // self._page_bytes[rank]

    def _fail(self, rank: int, reason: str) -> list[Effect]:
        """The whole pool refuses work: nobody can tell any more that the ranks are the same."""
        text = f"{self._name(rank)}: {reason}"
        self._failure = Outcome(Verdict.BROKEN, reason=text)
        under_way, self._under_way = self._under_way, {}
        return [*(Settle(tx, self._failure, rank) for tx in under_way), Fail(text)]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._names[rank]})" if self._names else f"rank {rank}"
