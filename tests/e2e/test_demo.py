# SPDX-License-Identifier: Apache-2.0
"""The demo as a newcomer runs it, with fewer requests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from serving import ROOT, missing

from kvcached.testing.kinds import SGLANG, VLLM

SMALL = ("--rounds", "1", "--requests", "8", "--tokens", "64", "--seconds", "1800", "--no-live")  # however slow the machine
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3_600), pytest.mark.xdist_group("demo")]


def run_demo(output: Path, *options: str) -> str:
    """What it says, as `make demo` runs it."""
    command = [sys.executable, "-m", "examples.demo", *SMALL, *options, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=3_500, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_demo(output: Path, said: str) -> None:
    checks = [line for line in said.splitlines() if line.startswith(("  ok ", "  not seen "))]
    assert len(checks) == 5
    assert [line for line in checks if "not seen" in line and "would not fit" not in line] == []
    assert "FAILED" not in said
    answers = (output / "answers.txt").read_text(encoding="utf-8")
    assert answers.count("[facts]") == answers.count("[stories]") == 8
    assert "Paris" in answers
    assert (output / "memory.png").read_bytes().startswith(b"\x89PNG")
    end = time.monotonic() + 60
    while writers_of(output) and time.monotonic() < end:  # the last helper of an engine ends a moment after it
        time.sleep(0.2)
    assert not writers_of(output), "an engine outlived the demo"


@pytest.mark.skipif(bool(missing(VLLM)), reason=missing(VLLM))
def test_two_engines_answer_on_a_card_that_is_too_small_for_both(tmp_path: Path) -> None:
    check_demo(tmp_path, run_demo(tmp_path))
    svg = (tmp_path / "memory.svg").read_text(encoding="utf-8")
    assert "2 static engines" in svg
    assert "Two vLLM engines" in svg


@pytest.mark.skipif(bool(missing(VLLM, SGLANG)), reason=missing(VLLM, SGLANG))
def test_an_engine_of_each_kind_answers_on_that_card(tmp_path: Path) -> None:
    said = run_demo(tmp_path, "--engine", "both")
    check_demo(tmp_path, said)
    assert "vllm.entrypoints.cli.main serve" in said
    assert "sglang.launch_server" in said
    assert "One vLLM and one SGLang engine" in (tmp_path / "memory.svg").read_text(encoding="utf-8")


def writers_of(folder: Path) -> list[int]:
    """Processes whose standard output goes to a file in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            output = (process / "fd" / "1").readlink()
        except OSError:
            continue
        if output.is_relative_to(folder):
            found.append(int(process.name))
    return found
