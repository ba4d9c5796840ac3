# SPDX-License-Identifier: Apache-2.0
"""The demo as a newcomer runs it, with fewer requests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engines" / "bin" / "python"  # as `make demo` runs it
SMALL = ("--rounds", "1", "--requests", "8", "--tokens", "64", "--no-live")


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; make engines sets it up")
def test_two_engines_answer_on_a_card_that_is_too_small_for_both(tmp_path: Path) -> None:
    command = [str(PYTHON), "-m", "examples.demo", *SMALL, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=540, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [line for line in done.stdout.splitlines() if line.startswith("  ok ")]
    assert len(checks) == 5
    assert "FAILED" not in done.stdout
    answers = (tmp_path / "answers.txt").read_text(encoding="utf-8")
    assert answers.count("[facts]") == answers.count("[stories]") == 8
    assert "Paris" in answers
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "memory.svg").read_text(encoding="utf-8")
    assert "2 static engines" in svg
    assert not writers_of(tmp_path), "an engine outlived the demo"


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
