# SPDX-License-Identifier: Apache-2.0
"""Limits, reserve and retirement queue: policy as numbers."""

from __future__ import annotations

import pytest

from kvcached.core import retirement
from kvcached.core.limits import Limits
from kvcached.core.reserve import ReserveTarget
from kvcached.core.retirement import RetirementQueue
from kvcached.errors import Misuse


def test_limits_are_clamped_to_what_a_pool_can_obey() -> None:
    limits = Limits(limit_bytes=90, floor_bytes=70, weight=2, revision=3)
    assert limits.clamped(60) == Limits(60, 60, 2, 3)
    assert limits.clamped(100) == limits
    assert Limits(5, 5).clamped(100, least_bytes=16) == Limits(16, 5)
    assert limits.pages(16) == 5


def test_the_floor_in_force_is_never_above_the_limit() -> None:
    assert [Limits(limit, 70).claimed_bytes for limit in (60, 70, 80)] == [60, 70, 70]


@pytest.mark.parametrize("wrong", [{"limit_bytes": -1}, {"limit_bytes": 1, "floor_bytes": -1}, {"limit_bytes": 1, "weight": 0}])
def test_limits_that_mean_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Misuse):
        Limits(**wrong)


def test_an_unused_reserve_stays_at_its_low_mark() -> None:
    reserve = ReserveTarget(2, 16)
    assert reserve.marks() == (2, 2)
    assert reserve.surplus_pages(3) == 1


def test_the_reserve_follows_the_rate_of_use_within_its_bounds() -> None:
    reserve = ReserveTarget(1, 16, horizon_s=0.2)
    for _ in range(100):
        reserve.observe(1, 0.05)
    assert reserve.pages_per_s == pytest.approx(20)
    assert reserve.marks() == (4, 8)
    assert reserve.surplus_pages(8) == 0
    for _ in range(100):
        reserve.observe(50, 0.05)
    assert reserve.marks() == (16, 16)


def test_the_rate_rises_faster_than_it_falls() -> None:
    reserve = ReserveTarget(0, 1000)
    reserve.observe(100, 0.1)
    risen = reserve.pages_per_s
    assert risen == pytest.approx(500)
    reserve.observe(0, 0.1)
    assert risen > reserve.pages_per_s > 0.95 * risen
    reserve.observe(0, 5.0)
    assert reserve.pages_per_s < 0.51 * risen


def test_after_an_idle_time_all_is_surplus() -> None:
    reserve = ReserveTarget(2, 8, idle_after_s=1.0)
    reserve.observe(1, 0.5)
    reserve.observe(0, 0.6)
    assert not reserve.idle
    assert reserve.surplus_pages(2) == 0
    reserve.observe(0, 0.6)
    assert reserve.idle
    assert reserve.surplus_pages(2) == 2
    reserve.observe(1, 0.6)
    assert not reserve.idle


@pytest.mark.parametrize("bounds", [(-1, 4), (5, 4)])
def test_a_reserve_with_impossible_bounds_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(Misuse):
        ReserveTarget(*bounds)


def test_entries_come_out_by_marker() -> None:
    queue = RetirementQueue()
    for marker, first in ((3, 30), (1, 10), (2, 20), (1, 11)):
        queue.push(marker, first, 1)
    assert queue.pop_through(0) == []
    assert queue.pop_through(2) == [(10, 1), (11, 1), (20, 1)]
    assert len(queue) == 1
    assert list(queue) == [(3, 30, 1)]


def test_repeated_entries_do_not_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retirement, "COMPACT_AT_LEAST", 8)
    queue = RetirementQueue()
    queue._compact_at = 8
    for turn in range(100):
        queue.push(turn % 3, 7, 1)
    assert len(queue) <= 9
    assert sorted(set(queue.pop_through(2))) == [(7, 1)]
