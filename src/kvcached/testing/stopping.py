# SPDX-License-Identifier: Apache-2.0
"""A process that stands still, for tests of what others do meanwhile."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

_WAIT_S: Final = 60.0
_AT_REST: Final = frozenset("TtZX")


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until no thread of it runs. The kernel tells one thread, which stops the others when it gets the processor: where
    that takes long they go on meanwhile, and answer. Raises `AssertionError` when it takes a minute.
    """
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + _WAIT_S
    while not all(state in _AT_REST for state in _states(pid)):
        if time.monotonic() > end_s:
            raise AssertionError(f"process {pid} has not stopped within {_WAIT_S:g} s")
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """Of each thread, as `/proc` has them."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.append((thread / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0])
        except OSError:  # it has ended meanwhile
            continue
    return found
