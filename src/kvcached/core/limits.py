# SPDX-License-Identifier: Apache-2.0
"""How much a pool may hold: the operator's wish, its revision, and what becomes of a change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from kvcached.errors import Misuse

DEFAULT_WEIGHT: Final = 1.0
NO_LIMIT_BYTES: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """`limit_bytes` is the most a pool may hold, `floor_bytes` what others may not take from it, `weight` its share above the floors.

    Of two settings the one with the higher `revision` counts. Raises `Misuse` for a negative size or a weight that is not positive.
    """

    limit_bytes: int
    floor_bytes: int = 0
    weight: float = DEFAULT_WEIGHT
    revision: int = 0

    def __post_init__(self) -> None:
        if self.limit_bytes < 0 or self.floor_bytes < 0:
            raise Misuse(f"limit ({self.limit_bytes}) and floor ({self.floor_bytes}) are sizes in bytes and cannot be negative")
        if not self.weight > 0:
            raise Misuse(f"the weight is {self.weight}; it must be above 0")

    @property
    def claimed_bytes(self) -> int:
        """The floor that is in force: a pool cannot claim what it may not hold."""
        return min(self.floor_bytes, self.limit_bytes)

    def clamped(self, range_bytes: int, least_bytes: int = 0) -> Limits:
        """The nearest limits that a pool with this range can obey: least <= limit <= range, floor <= limit."""
        limit_bytes = max(least_bytes, min(self.limit_bytes, range_bytes))
        return replace(self, limit_bytes=limit_bytes, floor_bytes=min(self.floor_bytes, limit_bytes))

    def pages(self, page_bytes: int) -> int:
        """Whole pages of `page_bytes` (all planes) that the limit allows."""
        return self.limit_bytes // page_bytes


class LimitOutcome(Enum):
    """What became of a new limit."""

    APPLIED = "applied"
    CLAMPED = "clamped"  # in force at the nearest value that the range allows
    DEFERRED = "deferred"  # in force for growth; what is held beyond it goes as it becomes free
    STALE = "stale"  # a later revision is in force; nothing changed


@dataclass(frozen=True, slots=True)
class LimitChange:
    """`limit_pages` is the limit in force now; `overage_pages` are held beyond it, whatever the outcome."""

    outcome: LimitOutcome
    limit_pages: int
    overage_pages: int
