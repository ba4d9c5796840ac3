# SPDX-License-Identifier: Apache-2.0
"""The examples, run as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHED_")}
    program = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return [line.strip() for line in done.stdout.splitlines()]


def test_engine_free_holds_memory_only_while_blocks_are_taken() -> None:
    held = [line for line in run("engine_free.py") if line.startswith("owned")]
    assert held[0].startswith("owned 0 B, held 0 B")
    assert held[1].startswith("owned 62.5 MiB, held 64 MiB")
    assert held[2] == held[1], "the take that failed changed nothing"
    assert held[3].endswith("held 64 MiB, limit 32 MiB"), "owned blocks stay under a lower limit"
    assert held[4] == "owned 0 B, held 0 B, limit 32 MiB"


def test_of_two_pools_the_second_waits_and_gets_what_the_first_gives_back() -> None:
    lines = run("two_pools.py")
    assert [line.split(",")[0] for line in lines[:4]] == [
        "first : took 48 blocks of 1 MiB; the card has 64MiB",
        "second: exhausted",
        "first : gave 48 blocks back",
        "second: took 40 blocks",
    ]
    together_mib = int(lines[-1].rsplit(" ", 2)[1])
    assert 40 <= together_mib <= 64
