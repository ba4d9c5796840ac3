# SPDX-License-Identifier: Apache-2.0
"""The arithmetic on which the proof with three engines stands."""

from __future__ import annotations

import pytest
from examples.demo.series import EngineMemory, Sample
from shares import Look, Timeline, Turn

PAGE = 10


def memory(lease: int, owned: int = 0, cached: int = 0, *, parked: int = 0, wanted: int = 0) -> EngineMemory:
    return EngineMemory(lease, owned, cached, parked, floor_bytes=20, wanted_bytes=wanted)


def line(*rows: tuple[float, EngineMemory, EngineMemory]) -> Timeline:
    return Timeline(100, PAGE, [Sample(at_s, {"busy": busy, "idle": idle}) for at_s, busy, idle in rows])


TURN = Turn("busy", 0.0, 9.0)


def test_a_share_is_of_what_the_others_may_not_keep_and_did_not_own_a_second_ago() -> None:
    story = line(
        (0.0, memory(20), memory(80, owned=50)),
        (1.0, memory(40, wanted=10), memory(60, owned=50)),
        (1.5, memory(40, wanted=10), memory(60, owned=5)),
        (2.4, memory(40, wanted=10), memory(60, owned=5)),
        (3.0, memory(76, wanted=10), memory(24, owned=5)),
        (4.0, memory(76), memory(24)),
    )
    late, last = story.shares([TURN])
    assert (late.at_s, late.fraction, late.alone) == (2.4, 40 / 50, False)
    assert (last.at_s, last.fraction, last.alone) == (3.0, 76 / 80, True)
    assert story.takeover_s(TURN) == 2.0
    assert line((0.0, memory(20), memory(80)), (1.0, memory(70), memory(30))).takeover_s(TURN) is None


def test_a_floor_that_is_lent_leaves_no_room() -> None:
    assert line((0.0, memory(60), memory(10))).least_room_bytes() == 20
    assert line((0.0, memory(60), memory(10)), (1.0, memory(90), memory(10))).least_room_bytes() == -10


@pytest.mark.parametrize(("idle", "certain", "possible"), [(60, 40, 40), (20, 0, 40), (29, 0, 40)])
def test_a_preemption_is_held_against_what_others_kept_all_the_time(idle: int, certain: int, possible: int) -> None:
    story = line((0.0, memory(40), memory(60, cached=60)), (0.15, memory(40), memory(idle, cached=idle)), (0.3, memory(40), memory(60)))
    looks = [Look(at_s, at_s + 0.01, "busy", {"preemptions": count}) for at_s, count in ((0.0, 3), (0.2, 5), (0.4, 5))]
    (found,) = story.preemptions(looks)
    assert (found.pool, found.count, found.certain_bytes, found.possible_bytes) == ("busy", 2, certain, possible)


@pytest.mark.parametrize("sign", [(1.2, 5, 10), (1.2, 8, 0)])
def test_a_floor_counts_from_the_first_sign_of_need(sign: tuple[float, int, int]) -> None:
    rows = [(0.0, 5, 0), (1.0, 5, 0), sign, (1.3, 15, 0), (1.6, 20, 0)]
    story = line(*((at_s, memory(lease, wanted=wanted), memory(60)) for at_s, lease, wanted in rows))
    assert story.floor_return_s("busy", 0.5, 5.0) == pytest.approx((0.4, 1.1))
    assert story.floor_return_s("busy", 0.5, 1.4) is None
    assert story.least_kept_bytes("busy", 0.5, 1.1) == 5


def test_one_that_is_emptied_between_two_samples_has_its_need_seen_too() -> None:
    story = line(*((at_s, memory(lease), memory(60)) for at_s, lease in ((0.0, 20), (1.0, 5), (1.2, 20))))
    assert story.floor_return_s("busy", 0.5, 5.0) == pytest.approx((0.0, 0.7))
