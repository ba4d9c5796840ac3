# SPDX-License-Identifier: Apache-2.0
"""The last lines that a model's servers said, for who looks from afar; the whole is in the log. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final

MOST_LINES: Final = 1000
_LONGEST: Final = 2000
"""Characters of a line that are kept."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """`lines` are those before number `next`. `missed`: how many between them and what was asked for are no more."""

    lines: tuple[str, ...]
    next: int
    missed: int = 0


class Journal:
    """Lines are numbered from 0 on; so many of the last are kept."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MOST_LINES)
        self._next = 0

    def add(self, line: str) -> None:
        self._lines.append(line[:_LONGEST])
        self._next += 1

    def after(self, number: int, most: int) -> Excerpt:
        """Lines from `number` on, the last `most` of them. A number that was not given yet is of an earlier journal: all is new then."""
        wanted = self._next - number if number <= self._next else self._next
        count = min(wanted, most, len(self._lines))
        lines = tuple(islice(self._lines, len(self._lines) - count, None))
        return Excerpt(lines, self._next, wanted - count)
