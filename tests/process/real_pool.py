# SPDX-License-Identifier: Apache-2.0
"""A real pool in a process of its own, on a host card of the test's own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

CHILD = Path(__file__).with_name("pool_child.py")
DEADLINE_S = 60.0


class PoolProcess:
    """One real pool of blocks of 1 MiB on pages of 2 MiB, on the host card of the machine."""

    def __init__(self, run_dir: Path, instance: str, **settings: object) -> None:
        card = {
            "run_dir": str(run_dir),
            "host_dir": str(run_dir.with_name("host")),
            "host_capacity_bytes": 128 * MIB,
            "host_granularity_bytes": 65536,
            "budget": "64MiB",
            "floor": "4MiB",
            "instance_name": instance,
            "idle_trim_s": 600.0,
            "prealloc_enabled": False,
            "handle_cache_mb": 0,
            "large_run_mb": 0,
            **settings,
        }
        options = json.dumps({"card": card, "name": f"model-of-{instance}", "blocks": 128})
        self._process = subprocess.Popen([sys.executable, str(CHILD), options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first = self._answer()
        self.pid, self.instance = first["pid"], first["instance"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the pool's process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, name: str, *arguments: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def take(self, blocks: int) -> None:
        """A miss is an engine's cue to ask again: a card that is new grants less for a while."""
        eventually(lambda: "error" not in self.ask("take", blocks))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Clears up after itself, as an engine does that is asked to end."""
        self.ask("close")
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
