# SPDX-License-Identifier: Apache-2.0
"""Limits that hold on every rank or on none. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.ranks.api import LimitsRequest, Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcached.ranks.inquiry import Answers
    from kvcached.ranks.messages import Message


class SharedLimits:
    """One change at a time. `ask(limits, ranks, then)` enters them on these ranks. `names`: how reasons call the ranks."""

    def __init__(self, names: Sequence[str], ask: Callable[[LimitsRequest, Sequence[int], Callable[[Answers], None]], None]) -> None:
        self._names = names
        self._ask = ask
        self._in_force: LimitsRequest | None = None
        self._changing = False

    def change(self, limits: LimitsRequest, then: Callable[[Outcome], None]) -> None:
        """Enter them everywhere. When a rank refuses, the former ones are put back where it did not."""
        if self._changing:
            then(Outcome(Verdict.BUSY, reason="the limits are being changed already"))
            return

        def answered(answers: Answers) -> None:
            refused = [rank for rank, answer in answers.items() if not _is_done(answer)]
            if not refused:
                self._in_force = limits
                ended(Outcome(Verdict.DONE))
                return
            refusal = self._refusal(refused[0], answers[refused[0]])
            former = self._in_force or replace(limits, floor_bytes=0)  # a floor that not every rank has is none
            self._ask(former, [rank for rank in answers if rank not in refused], lambda answers: ended(self._put_back(answers, refusal)))

        def ended(outcome: Outcome) -> None:
            self._changing = False
            then(outcome)

        self._changing = True
        self._ask(limits, range(len(self._names)), answered)

    def _refusal(self, rank: int, answer: Message | None) -> Outcome:
        if not isinstance(answer, Outcome):
            return Outcome(Verdict.BUSY, reason=f"rank {rank} ({self._names[rank]}) is gone")
        return replace(answer, reason=f"rank {rank} ({self._names[rank]}): {answer.reason}")

    def _put_back(self, answers: Answers, refusal: Outcome) -> Outcome:
        kept = [self._names[rank] for rank, answer in answers.items() if not _is_done(answer)]
        return replace(refusal, reason=f"{refusal.reason}; until the next change the others keep it: {kept}") if kept else refusal


def _is_done(answer: Message | None) -> bool:
    return isinstance(answer, Outcome) and answer.verdict is Verdict.DONE
