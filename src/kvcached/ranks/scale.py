# SPDX-License-Identifier: Apache-2.0
"""Bytes of the owner and bytes of each rank: a page may need other bytes on every rank. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.ranks.api import LimitsRequest, Outcome, Report

if TYPE_CHECKING:
    from collections.abc import Sequence


class Scale:
    """`steps_bytes`: what a page needs on each rank; `unit_bytes`: what the owner reckons with for it."""

    def __init__(self, steps_bytes: Sequence[int], unit_bytes: int) -> None:
        self._steps_bytes = tuple(steps_bytes)
        self.unit_bytes = unit_bytes

    def to_rank(self, rank: int, size_bytes: int) -> int:
        """Rounded up."""
        return -(-size_bytes * self._steps_bytes[rank] // self.unit_bytes)

    def to_owner(self, rank: int, outcome: Outcome) -> Outcome:
        """Rounded down."""
        return replace(outcome, size_bytes=outcome.size_bytes * self.unit_bytes // self._steps_bytes[rank])

    def limits_of(self, rank: int, limits: LimitsRequest) -> LimitsRequest:
        limited = limits.limit_bytes < NO_LIMIT_BYTES
        limit_bytes = self.to_rank(rank, limits.limit_bytes) if limited else NO_LIMIT_BYTES
        return replace(limits, limit_bytes=limit_bytes, floor_bytes=self.to_rank(rank, limits.floor_bytes))

    def report_of(self, rank: int, report: Report) -> Report:
        return Report(*(self.to_rank(rank, getattr(report, name)) for name in Report.__slots__))
