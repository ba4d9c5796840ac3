# SPDX-License-Identifier: Apache-2.0
"""Questions to several ranks that belong to no transaction: limits, reports, status. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcached.ranks.messages import Message

Answers = dict[int, "Message | None"]
"""By rank; None: it is gone."""


@dataclass(slots=True)
class _Inquiry:
    missing: set[int]
    answers: Answers
    then: Callable[[Answers], object]


class Inquiries:
    """What was asked and not answered by all. `then` is called once, when the last rank has answered or is gone."""

    def __init__(self) -> None:
        self._open: dict[int, _Inquiry] = {}
        self._newest = 0

    def open(self, asked: Iterable[int], answers: Answers, then: Callable[[Answers], object]) -> int:
        """Returns the number that the question and its answers carry. `answers` are those that are known already."""
        self._newest += 1
        inquiry = self._open[self._newest] = _Inquiry(set(asked), answers, then)
        self._end_if_complete(self._newest, inquiry)
        return self._newest

    def answered(self, rank: int, number: int, message: Message) -> None:
        """What nobody asked, or no more, is ignored."""
        inquiry = self._open.get(number)
        if inquiry is not None and rank in inquiry.missing:
            inquiry.missing.remove(rank)
            inquiry.answers[rank] = message
            self._end_if_complete(number, inquiry)

    def lost(self, rank: int) -> None:
        """Nothing more comes from it."""
        for number, inquiry in list(self._open.items()):
            inquiry.missing.discard(rank)
            self._end_if_complete(number, inquiry)

    def _end_if_complete(self, number: int, inquiry: _Inquiry) -> None:
        if not inquiry.missing and number in self._open:
            del self._open[number]
            inquiry.then(inquiry.answers)
