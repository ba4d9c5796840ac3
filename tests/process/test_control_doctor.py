# SPDX-License-Identifier: Apache-2.0
"""The try of a card, with the native library and a real child process."""

from __future__ import annotations

import ctypes

import pytest

from kvcached.cli import probe
from kvcached.cli.try_card import try_card
from kvcached.units import MIB


@pytest.mark.parametrize("granularity_bytes", [64 * 1024, 2 * MIB])
def test_the_host_card_works_on_every_machine(granularity_bytes: int) -> None:
    attempt = try_card("host:0", granularity_bytes, 60)
    assert attempt.ok, attempt.text
    assert attempt.text.endswith("mapped and unmapped")


def test_a_granularity_that_the_card_refuses_is_a_sentence() -> None:
    attempt = try_card("host:0", 3 * MIB, 60)
    assert attempt.ok is False
    assert "Traceback" not in attempt.text
    assert "granularity" in attempt.text


def test_memory_that_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "memmove", lambda place, text, size: None)
    with pytest.raises(RuntimeError, match="does not hold what was written"):
        probe.probe("host:0", 64 * 1024)


def test_memory_that_is_still_held_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcached.vmm.native.NativeArena.unmap", lambda arena, runs, keep=False: None)
    with pytest.raises(RuntimeError, match="still held"):
        probe.probe("host:0", 64 * 1024)
