# SPDX-License-Identifier: Apache-2.0
"""A real engine's server as a child process: started, watched, and ended for certain."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from typing import IO, TYPE_CHECKING

from examples.demo.ask import healthy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from examples.demo.ask import Server

_NOISE = re.compile(r"^(\(\w+( pid=\d+)?\)\s*)*(INFO|WARNING|ERROR|DEBUG)?\s*[\d:., -]*(\[[^\]]+\])?\s*")
_CAUSE = re.compile(
    r"[A-Za-z_][\w.]*(Error|Exception|Exhausted|Supported|Unavailable|Refused|Mismatch|Unknown|Broken|Misuse|Lost|Timeout): ."
)


class EngineFailed(Exception):
    """An engine ended or was not ready in time. The message ends with what it last said."""


class Engine:
    """One server. It leads a process group of its own, so that all it starts ends with it."""

    def __init__(self, server: Server, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.server = server
        self.command = list(command)
        self.log = log
        with log.open("wb") as out:
            self._process = _spawn(self.command, environment, out)

    @property
    def pid(self) -> int:
        return self._process.pid

    def running(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> bool:
        """Whether it answers. Raises `EngineFailed` when it has ended."""
        if not self.running():
            raise EngineFailed(f"{self.server.name} ended with code {self._process.returncode} before it was ready.\n{self.obituary()}")
        return healthy(self.server)

    def last_line(self) -> str:
        lines = tail(self.log, 1)
        return _NOISE.sub("", lines[0]) if lines else "starting Python"

    def obituary(self, lines: int = 12) -> str:
        """The error that came first, the last log lines, and what to do with them."""
        cause = first_error(self.log)
        return (
            (f"The first error in its log:\n  | {cause}\n" if cause else "")
            + f"The last lines of its log ({self.log}):\n"
            + "\n".join(f"  | {line}" for line in tail(self.log, lines))
            + "\ndocs/troubleshooting.md says what to do about the usual errors."
        )

    def signal(self, number: int) -> None:
        """To every process of the engine. Nothing happens when all are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def gone(self) -> bool:
        """Whether every process of the engine has ended."""
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False


def _spawn(command: Sequence[str], environment: Mapping[str, str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    )


def wait_ready(engines: Sequence[Engine], timeout_s: float, progress: Callable[[float], None]) -> float:
    """Wait until all answer, and return the seconds. `progress` is called twice a second with the time so far. Raises `EngineFailed`."""
    start_s = time.monotonic()
    waiting = list(engines)
    while waiting:
        passed_s = time.monotonic() - start_s
        waiting = [engine for engine in waiting if not engine.ready()]
        progress(passed_s)
        if waiting and passed_s > timeout_s:
            raise EngineFailed(f"{waiting[0].server.name} was not ready within {timeout_s:.0f} s.\n{waiting[0].obituary()}")
        time.sleep(0.5 if waiting else 0.0)
    return time.monotonic() - start_s


def stop_all(engines: Iterable[Engine], grace_s: float = 10.0) -> list[str]:
    """Ask all to end, and end for certain those that have not within `grace_s`. Returns one line each about those.

    An engine may wait for ever for its open connections, so the second step is no luxury.
    """
    alive = [engine for engine in engines if not engine.gone()]
    for engine in alive:
        engine.signal(signal.SIGTERM)
    stubborn = _wait_gone(alive, grace_s)
    for engine in stubborn:
        engine.signal(signal.SIGKILL)
    left = _wait_gone(stubborn, 5.0)
    killed = [f"{engine.server.name} did not end within {grace_s:.0f} s and was killed" for engine in stubborn if engine not in left]
    return killed + [f"{engine.server.name} is still there: process group {engine.pid}" for engine in left]


def _wait_gone(engines: Sequence[Engine], timeout_s: float) -> list[Engine]:
    end_s = time.monotonic() + timeout_s
    left = [engine for engine in engines if not engine.gone()]
    while left and time.monotonic() < end_s:
        time.sleep(0.1)
        left = [engine for engine in left if not engine.gone()]
    return left


def tail(path: Path, lines: int) -> list[str]:
    """The last lines that are not blank; none when there is no file yet."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def first_error(path: Path) -> str:
    """The first line that names an exception and says something; others are usually its consequences. Empty when there is none."""
    text = path.read_text(encoding="utf-8", errors="replace")
    said = (_NOISE.sub("", line).strip() for line in text.splitlines())
    return next((line for line in said if _CAUSE.match(line)), "")
