# SPDX-License-Identifier: Apache-2.0
"""How much to have ahead of need: parked pages by a rate of use learned from what was consumed, and more than is wanted when others are
asked again and again."""

from __future__ import annotations

from math import ceil
from typing import Final

from kvcached.errors import Misuse

HORIZON_S: Final = 0.2
RISE_HALF_LIFE_S: Final = 0.1
FALL_HALF_LIFE_S: Final = 5.0
IDLE_AFTER_S: Final = 2.0
STREAK_S: Final = 1.0


class ReserveTarget:
    """Keeps enough for the next `horizon_s`, at least `low_pages`, at most `high_pages`; nothing after `idle_after_s` without use.

    The rate is an exponential mean over time that rises faster than it falls: a reserve that is too small costs a step its time, one
    that is too large for some seconds costs nothing, since it is given back under pressure. Time comes in with each observation.
    """

    __slots__ = ("_high_pages", "_horizon_s", "_idle_after_s", "_idle_s", "_low_pages", "_rate")

    def __init__(self, low_pages: int, high_pages: int, *, horizon_s: float = HORIZON_S, idle_after_s: float = IDLE_AFTER_S) -> None:
        if not 0 <= low_pages <= high_pages:
            raise Misuse(f"a reserve of at least {low_pages} and at most {high_pages} pages cannot be kept; 0 <= least <= most is needed")
        self._low_pages = low_pages
        self._high_pages = high_pages
        self._horizon_s = horizon_s
        self._idle_after_s = idle_after_s
        self._rate = 0.0
        self._idle_s = 0.0

    @property
    def pages_per_s(self) -> float:
        """The rate of use as learned so far."""
        return self._rate

    @property
    def idle(self) -> bool:
        """No page was consumed for `idle_after_s`."""
        return self._idle_s >= self._idle_after_s

    def observe(self, consumed_pages: int, interval_s: float) -> None:
        """`consumed_pages` parked pages came into use during the last `interval_s` seconds (more than 0)."""
        rate = max(0, consumed_pages) / interval_s
        half_life_s = RISE_HALF_LIFE_S if rate > self._rate else FALL_HALF_LIFE_S
        self._rate += (rate - self._rate) * (1.0 - 0.5 ** (interval_s / half_life_s))
        self._idle_s = 0.0 if consumed_pages > 0 else self._idle_s + interval_s

    def marks(self) -> tuple[int, int]:
        """(low, high): below `low` parked pages fill up to `high`; what is above `high` may go."""
        expected = ceil(self._rate * self._horizon_s)
        low = min(max(self._low_pages, expected), self._high_pages)
        return low, min(max(low, 2 * expected), self._high_pages)

    def surplus_pages(self, parked_pages: int) -> int:
        """How many of the parked pages to give back now: those above the high mark, and all once the pool is idle."""
        return max(0, parked_pages - (0 if self.idle else self.marks()[1]))


class AskingAhead:
    """How much more to ask others for than is wanted just now.

    A growing prompt wants page after page, and each ask is a wait. So asks that follow each other within a second double: each asks for as
    much again as was given to those before it, at most `most_bytes`. Others give no more in vain than they have given in need.
    """

    __slots__ = ("_given_bytes", "_last_s", "_most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._given_bytes = 0
        self._last_s = float("-inf")

    def more_bytes(self, now_s: float) -> int:
        """What an ask at this time adds."""
        return min(self._most_bytes, self._given_bytes) if now_s - self._last_s <= STREAK_S else 0

    def given(self, size_bytes: int, now_s: float) -> None:
        """So much came of an ask that was made at this time."""
        self._given_bytes = size_bytes + (self._given_bytes if now_s - self._last_s <= STREAK_S else 0)
        self._last_s = now_s
