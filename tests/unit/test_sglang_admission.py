# SPDX-License-Identifier: Apache-2.0
"""What a prefill has to leave for requests that decode in the same batch, and for those that come after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcached.engines.sglang.admission import _reserved, admit_chunk
from kvcached.engines.sglang.gate import Gates


def gates_of(page_slots: int, *, mixes: bool) -> Gates:
    gates = Gates(cast("Any", SimpleNamespace(bank=SimpleNamespace(page_slots=page_slots))))
    gates.mixes_decode = mixes
    return gates


@pytest.mark.parametrize(("page_slots", "mixes", "reserved"), [(16, True, 10 + 3 * 15), (1, True, 10), (16, False, 10)])
def test_each_that_decodes_may_take_a_page(page_slots: int, mixes: bool, reserved: int) -> None:
    adder = SimpleNamespace(cur_rem_token_offset=10, running_batch=SimpleNamespace(reqs=[1, 2, 3]))
    assert _reserved(adder, gates_of(page_slots, mixes=mixes)) == reserved


def test_a_budget_of_ours_has_counted_them() -> None:
    adder = SimpleNamespace(memory_budget=SimpleNamespace(current_offset=48), running_batch=SimpleNamespace(reqs=[1, 2, 3]))
    assert _reserved(adder, gates_of(16, mixes=True)) == 48


@pytest.mark.parametrize(("ready", "left"), [(55, 128), (200, 128), (32, 32)])
def test_a_chunk_that_has_its_memory_leaves_the_rest_of_the_batch_to_others(ready: int, left: int) -> None:
    seen: list[int] = []
    gates = SimpleNamespace(secure_chunk=lambda slots, reserved: min(slots, ready), page_slots=16, mixes_decode=False)
    adder = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(kvcached_gates=gates), rem_chunk_tokens=128, cur_rem_token_offset=0, running_batch=None
    )
    admit_chunk(lambda adder, req: seen.append(adder.rem_chunk_tokens), adder, SimpleNamespace(extend_input_len=55))
    assert seen == [left]
