# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvcached.engines.vllm.rests import FIRST_S, LONGEST_S, Rests


def test_rests_grow_to_a_bound_and_begin_anew_after_work():
    rests = Rests()
    assert [rests.next_s(only_waits=True) for _ in range(5)] == pytest.approx([FIRST_S, 2 * FIRST_S, 4 * FIRST_S, LONGEST_S, LONGEST_S])
    assert [rests.next_s(only_waits=only_waits) for only_waits in (False, True)] == [0.0, FIRST_S]
