# SPDX-License-Identifier: Apache-2.0
"""What a change came to, in words, as JSON and as an exit code: `holds` is whether what was asked for is so now."""

from __future__ import annotations

from typing import Any

import pytest

from kvcached.cli.answers import FLOOR, LIMIT, change_holds, change_json, change_text, explain_head, explain_json, explain_notes
from kvcached.cli.session import Explained
from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.runtime.control import ChangeAnswer, ExplainRow, Explanation, PoolStatus
from kvcached.units import MIB

CASES = [
    (LIMIT, "applied", 8, 8, 0, True, "chat: limit applied: 8 MiB in force"),
    (LIMIT, "deferred", 8, 8, 3, False, "chat: limit deferred: 8 MiB in force, 3 MiB above it still held"),
    (LIMIT, "clamped", 90, 64, 0, True, "chat: limit clamped: 64 MiB in force, less than the 90 MiB asked"),
    (LIMIT, "clamped", 1, 2, 0, False, "chat: limit clamped: 2 MiB in force, more than the 1 MiB asked"),
    (LIMIT, "stale", 8, 8, 0, False, "chat: limit stale: 8 MiB in force"),
    (FLOOR, "applied", 8, 8, 3, True, "chat: floor applied: 8 MiB in force"),
    (FLOOR, "clamped", 90, 64, 0, False, "chat: floor clamped: 64 MiB in force, less than the 90 MiB asked"),
    (FLOOR, "rejected", 8, 2, 0, False, "chat: floor rejected: 2 MiB in force"),
]


def answer(outcome: Any, asked: int, in_force: int, overage: int = 0, reason: str = "") -> ChangeAnswer:
    return ChangeAnswer(outcome=outcome, asked_bytes=asked, in_force_bytes=in_force, overage_bytes=overage, reason=reason)


@pytest.mark.parametrize(("setting", "outcome", "asked", "in_force", "overage", "holds", "text"), CASES)
def test_a_change(setting: str, outcome: str, asked: int, in_force: int, overage: int, holds: bool, text: str) -> None:
    changed = answer(outcome, asked * MIB, in_force * MIB, overage * MIB)
    assert change_holds(setting, changed) is holds
    assert change_text("chat", setting, changed) == text
    shown = change_json("chat", setting, changed)
    assert (shown["setting"], shown["holds"], shown["asked_bytes"], shown["outcome"]) == (setting, holds, asked * MIB, outcome)


def test_no_limit_is_none_in_words_and_null_in_json() -> None:
    lifted = answer("applied", NO_LIMIT_BYTES, NO_LIMIT_BYTES)
    assert change_text("chat", LIMIT, lifted) == "chat: limit applied: none in force"
    shown = change_json("chat", LIMIT, lifted)
    assert (shown["holds"], shown["asked_bytes"], shown["in_force_bytes"]) == (True, None, None)


def test_a_reason_is_told() -> None:
    assert change_text("chat", FLOOR, answer("rejected", 8, 2, reason="it does not fit")).endswith(" (it does not fit)")


def test_what_is_held_is_told_with_its_pages_and_with_what_is_no_kv_cache() -> None:
    row = ExplainRow(reason="retired: empty, behind work", size_bytes=2 * MIB, freed_by="the step ends", detail="page 5 behind step 3")
    status = PoolStatus(
        instance="chat", name="llama", state="over", reason="", held_bytes=2 * MIB, lease_bytes=4 * MIB, limit_bytes=NO_LIMIT_BYTES
    )
    explained = Explained(status, Explanation(rows=(row,)), 512 * MIB)
    assert explain_head("chat", status) == "chat, model llama: over, 2 MiB held of a lease of 4 MiB"
    assert explain_notes(explained) == [
        "retired: page 5 behind step 3",
        "not KV: 512 MiB of weights, activations and graphs beside it, until the engine",
        "  ends",
    ]
    shown = explain_json(explained)
    assert (shown["other_bytes"], shown["status"]["limit_bytes"], shown["rows"][0]["detail"]) == (512 * MIB, None, "page 5 behind step 3")
    assert explain_notes(Explained(status, Explanation(rows=()), 0)) == []
