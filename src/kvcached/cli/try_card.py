# SPDX-License-Identifier: Apache-2.0
"""Try a card in a child process with a deadline: a driver that hangs or crashes takes the child with it, not the caller."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

_PROBE: Final = "kvcached.cli.probe"
_REAP_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Attempt:
    ok: bool
    text: str
    timed_out: bool = False


def try_card(card: str, host_granularity_bytes: int, deadline_s: float, probe: str = _PROBE) -> Attempt:
    """Reserve, map, and unmap a small arena on `card`, by running the module `probe`."""
    command = [sys.executable, "-m", probe, card, str(host_granularity_bytes)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return Attempt(ok=False, text=f"no answer within {deadline_s:g} s", timed_out=True)
    if child.returncode < 0:
        return Attempt(ok=False, text=f"the try ended by signal {-child.returncode}")
    return _read(output, errors)


def _read(output: str, errors: str) -> Attempt:
    try:
        answer = json.loads(output)
        return Attempt(ok=bool(answer["ok"]), text=str(answer["text"]))
    except (ValueError, KeyError, TypeError):
        last = (errors.strip() or output.strip() or "no output").splitlines()[-1]
        return Attempt(ok=False, text=f"the try failed: {last}")


def _abandon(child: subprocess.Popen[str]) -> None:
    """Kill it, but do not wait for a process that the kernel cannot end while its driver call hangs."""
    child.kill()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    try:
        child.wait(_REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.returncode = -9  # not ours to wait for any more: init reaps it
