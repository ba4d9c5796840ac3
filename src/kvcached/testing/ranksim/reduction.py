# SPDX-License-Identifier: Apache-2.0
"""Orders that others stand for are not explored.

Two events commute when neither can change what the other does: events on different ranks do, and events on a rank and at the owner. So
where some events commute with everything that can happen before them, it is enough to let them happen first (a persistent set). To be
left out safely they must also be *silent*: nothing changes that an invariant compares between the owner and a rank, so that no bad state
is passed by. All rules hold only once no fault is left, since a fault anywhere uses up what a fault elsewhere needs; a fault's own moment
is therefore always explored among all orders.

1. **A rank's post.** Messages and steps that reach a rank that has nothing to perform change only its state machine and its stream. They
   race with each other and with what the owner may yet send to it. The owner sends to a rank only: what ends a transaction, when all
   ranks have answered, or one has failed; reminders, when nothing else can happen; and an opening again, when the rank has said that
   it never heard of it. So when the owner waits for this rank in every transaction, no answer of it is under way, and no rank has
   failed one that could still be taken back, nothing new can come: all orders of this rank's events are explored, and no others.
2. **A silent answer.** An answer after which the owner sends nothing, settles nothing and believes nothing else of any page or credit,
   from a rank that has nothing else under way. It commutes with what others answer, as long as no rank has failed what could be taken back.
3. **A silent acknowledgement**, which belongs to no transaction. Acknowledgements only grow, and what a message carries beyond them its
   receiver has accepted: they commute with everything, as do answers that tell the owner nothing at all.

That an answer is silent is seen by performing it, with the owner as it is, wrong or not.

A call fails by a fault only: a case that runs out of memory by itself is refused. `explore(..., reduced=False)` leaves nothing out; the
tests compare both, and have the orders that are left find mutants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.ranks.api import Verdict
from kvcached.ranks.transactions import Phase
from kvcached.testing.ranksim.moves import Move, State, waits
from kvcached.testing.ranksim.sameness import AT_OWNER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcached.ranks.courses import Transaction
    from kvcached.ranks.transactions import Answer
    from kvcached.testing.ranksim.cluster import Rank, Task


def sufficient(state: State) -> Iterable[State]:
    """States after events that stand for all that can happen next."""
    moves = list(state.moves())
    if state.faults or state.is_apart or state.alone >= 0 or len(moves) < 2:
        return map(state.after, moves)
    may_go_back = _may_go_back(state)
    silent = _silent_answer(state, moves, may_go_back)
    if silent is not None:
        return [silent]
    return map(state.after, (not may_go_back and _post_of_a_rank(state, moves)) or moves)


def _may_go_back(state: State) -> bool:
    """A rank has failed, and the owner may send what takes back before others have answered."""
    coordinator = state.cluster.coordinator
    if all(each.ending is not None for each in coordinator._under_way.values()):
        return False
    answers = (task.arguments[0] for task in state.pending if task.event == "answer_arrives")
    return any(map(_has_failed, state.cluster.ranks)) or any(map(_says_failure, answers))  # type: ignore[arg-type]


def _says_failure(answer: Answer) -> bool:
    return answer.phase is Phase.FAILED or answer.outcome.verdict is not Verdict.DONE


def _has_failed(rank: Rank) -> bool:
    participant = rank.participant
    history = participant._history.values()
    return participant.broken is not None or any(
        entry.phase is Phase.FAILED or entry.outcome.verdict is not Verdict.DONE for entry in history
    )


# ---------------------------------------------------------------------- a rank's post


def _post_of_a_rank(state: State, moves: list[Move]) -> list[Move]:
    """All that can happen on one rank, where nothing else can come between; empty when there is no such rank."""
    mine: dict[int, list[Move]] = {}
    for move in moves:
        task = state.pending[move.task]
        if task.event not in AT_OWNER:
            mine.setdefault(task.rank, []).append(move)
    under_way = state.cluster.coordinator._under_way
    for rank, its_moves in mine.items():
        tasks = [task for task in state.pending if task.rank == rank]
        if all(rank in each.awaited for each in under_way.values()) and all(_is_post(task, under_way) for task in tasks):
            return its_moves
    return []


def _is_post(task: Task, under_way: dict[int, Transaction]) -> bool:
    if task.event == "answer_arrives":
        return task.arguments[0].tx not in under_way  # type: ignore[attr-defined]
    return task.event not in ("act", "lose") and not waits(task)


# ---------------------------------------------------------------------- a silent answer


def _silent_answer(state: State, moves: list[Move], may_go_back: bool) -> State | None:
    for move in moves:
        task = state.pending[move.task]
        if task.event == "answer_arrives":
            after = state.after(move)
            if after.is_silent_after(state) and _commutes(state, after, task, may_go_back):
                return after
    return None


def _commutes(state: State, after: State, task: Task, may_go_back: bool) -> bool:
    answer: Answer = task.arguments[0]  # type: ignore[assignment]
    transaction = state.cluster.coordinator._under_way.get(answer.tx)
    if answer.phase not in (Phase.UNHEARD, Phase.FAILED) and (answer.tx == 0 or after.is_same_owner(state)):
        return True
    if transaction is None or may_go_back or len(state.cluster.coordinator._under_way) > 1:
        return False
    return task.rank in transaction.awaited and sum(other.rank == task.rank for other in state.pending) == 1
