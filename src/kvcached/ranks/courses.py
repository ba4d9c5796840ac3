# SPDX-License-Identifier: Apache-2.0
"""The course of each kind of transaction as its owner sees it, and one transaction that is under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvcached.ranks.transactions import Abort, Acquire, Commit, Ending, MapNow, Opening, Phase, Prepare, RankMessage, Release, Revert

if TYPE_CHECKING:
    from kvcached.ranks.api import Outcome
    from kvcached.ranks.operations import Op


@dataclass(frozen=True, slots=True)
class Course:
    """`begun`: what a rank answers when the opening worked. `forward`: what all are sent when it worked on all, None: it is done then.
    `back`: what all are sent when one failed, None: nothing can be undone."""

    begun: Phase
    forward: type[Ending] | None
    back: type[Ending] | None


COURSES: Final[dict[type[Opening], Course]] = {
    Acquire: Course(Phase.DONE, None, Revert),
    MapNow: Course(Phase.DONE, None, Revert),
    Release: Course(Phase.DONE, None, None),
    Prepare: Course(Phase.PREPARED, Commit, Abort),
}
_ENDS_IN: Final[dict[type[Ending], Phase]] = {Commit: Phase.COMMITTED, Abort: Phase.ABORTED, Revert: Phase.REVERTED}
OPENING_PHASES: Final = frozenset({Phase.RUNNING, Phase.DONE, Phase.PREPARED})
"""Answers that a rank may have given before it heard of the end."""


@dataclass(slots=True)
class Transaction:
    opening: Opening
    course: Course
    ending: type[Ending] | None = None  # what the ranks have been sent after the opening
    awaited: set[int] = field(default_factory=set)
    failures: dict[int, Outcome] = field(default_factory=dict)  # by rank
    released_bytes: list[int] = field(default_factory=list)
    attempt: int = 0  # of the newest reminder
    pause_s: float = 0.0

    @property
    def expected(self) -> Phase:
        return self.course.begun if self.ending is None else _ENDS_IN[self.ending]

    def message(self, ops: tuple[Op, ...]) -> RankMessage:
        return replace(self.opening, ops=ops) if self.ending is None else self.ending(self.opening.tx, ops)
