# SPDX-License-Identifier: Apache-2.0
"""One engine's server as a process that can outlive us: its log, its record, its end, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvcached import processes
from kvcached.controller import leftovers
from kvcached.controller.adoption import Record
from kvcached.controller.last_words import cause_of
from kvcached.controller.leader import Leader
from kvcached.controller.server_log import ServerLog, open_to_append
from kvcached.controller.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvcached.controller.adoption import Purpose

_log = logging.getLogger("kvcached.engine")
TERM_GRACE_S: Final = 20.0
KILL_GRACE_S: Final = 10.0
_POLL_S: Final = 0.05
_TAIL_LINES: Final = 400
"""vLLM says dozens after the one with the cause."""
_BACK_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Job:
    """A server that is to be started. `command` and `environment` as they are, not as the record has them."""

    title: str
    log: Path
    command: Sequence[str]
    environment: Mapping[str, str]
    purpose: Purpose
    port: int
    sleep: str


@dataclass(frozen=True, slots=True)
class Listener:
    """`on_end`: told once, when it ends without `stop`, how it did so. `on_line`: told each line that it says."""

    on_end: Callable[[str], None]
    on_line: Callable[[str], None]


class EngineProcess:
    """Leads a process group of its own, so that all it starts ends with it. It writes its log itself; its record is beside that."""

    def __init__(self, title: str, log: Path, written: ServerLog, record: Record, leader: Leader, listener: Listener) -> None:
        self.title = title
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._path = log
        self._log = written
        self._record = record
        self._leader = leader
        self._listener = listener
        self._stopping = False
        self._killed = False
        self._watch = asyncio.get_running_loop().create_task(self._follow())

    @classmethod
    def launch(cls, job: Job, listener: Listener) -> EngineProcess:
        """Raises `OSError` when the command cannot be run, or its log or its record not be written."""
        output = open_to_append(job.log)
        try:
            written = ServerLog(job.log)
            try:
                return cls(job.title, job.log, written, *_start(job, output), listener)
            except OSError:
                written.close()
                raise
        finally:
            os.close(output)

    @classmethod
    def adopt(cls, title: str, log: Path, record: Record, listener: Listener) -> EngineProcess:
        """One that an earlier gateway started. What its log has last is remembered. Raises `OSError` when that cannot be opened."""
        os.close(open_to_append(log))
        it = cls(title, log, ServerLog(log, _BACK_BYTES), record, Leader(record.pid, record.start), listener)
        it._hear(it._remember)
        return it

    @property
    def pid(self) -> int:
        return self._leader.pid

    @property
    def running(self) -> bool:
        return self._leader.running

    def mark(self, state: State) -> None:
        """What the next gateway would find. Raises `OSError`."""
        self._record = replace(self._record, state=state)
        leftovers.note(self._path, self._record)

    async def last_words(self) -> str:
        """Of a process that has ended: why, and where all that it said is."""
        await self._until_followed()
        return f"{cause_of(self.tail)} (its log: {self._path})"

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group. Nothing of it is left after it, or its record stays."""
        self._stopping = True
        if self.running:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._leader.ended(), TERM_GRACE_S)
        if not self._killed:  # else that was done when it ended
            self._signal(signal.SIGKILL)
        is_gone = await self._until_all_are_gone()
        await self._until_followed()
        self._watch.cancel()
        if is_gone:
            leftovers.forget(self._path)

    def kill(self) -> None:
        """At once, and its end is not told; `stop` waits for it."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    def leave(self) -> None:
        """It goes on without us, and its record says how it was."""
        self._stopping = True
        self._watch.cancel()

    async def _until_all_are_gone(self) -> bool:
        """What was killed has its memory until it has ended, and that can take a while. Whether it has."""
        end_s = time.monotonic() + KILL_GRACE_S
        while await asyncio.to_thread(self._is_there):
            if time.monotonic() > end_s:
                _log.error("%s: killed, and still there: process group %d", self.title, self.pid)
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _until_followed(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watch), KILL_GRACE_S)

    def _is_there(self) -> bool:
        return self._is_ours and bool(processes.of_group(self.pid))

    @property
    def _is_ours(self) -> bool:
        """Whether the number is not another group's by now: it is not given away while anything of this one is there."""
        return processes.start_of(self.pid) in (self._record.start, None)

    def _signal(self, number: signal.Signals) -> None:
        self._killed = self._killed or number is signal.SIGKILL
        if self._is_ours:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _follow(self) -> None:
        """Say what the log gets, and tell the end of the first process, with which the others of its group end."""
        copying = asyncio.get_running_loop().create_task(self._copy())
        try:
            await self._leader.ended()
            if not self._stopping:
                self._signal(signal.SIGKILL)  # what it started would keep memory that nobody counts
            await _cancelled(copying)
            self._hear(self._say)
            self._say(self._log.last())
        finally:
            await _cancelled(copying)
            self._log.close()
        if not self._stopping:
            self._listener.on_end(self._leader.end)

    async def _copy(self) -> None:
        while True:
            while (lines := self._lines()) is not None:
                for line in lines:
                    self._say(line)
                await asyncio.sleep(0)  # others have a turn, however fast it writes
            await self._log.grown()

    def _hear(self, tell: Callable[[str], None]) -> None:
        """All that is there now."""
        while (lines := self._lines()) is not None:
            for line in lines:
                tell(line)

    def _lines(self) -> list[str] | None:
        try:
            return self._log.lines()
        except OSError as error:
            _log.error("%s: its log cannot be followed: %s", self.title, error)
            return None

    def _say(self, line: str) -> None:
        self._remember(line)
        if line:
            _log.info("%s | %s", self.title, line)

    def _remember(self, line: str) -> None:
        if line:
            self.tail.append(line)
            self._listener.on_line(line)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _start(job: Job, output: int) -> tuple[Record, Leader]:
    child = subprocess.Popen(
        job.command, env=job.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    start = processes.start_of(child.pid)
    record = Record(child.pid, start, leftovers.boot(), job.port, job.sleep, State.STARTING, job.purpose)
    try:
        leftovers.note(job.log, record)
    except OSError:  # without a record nobody would ever end it
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return record, Leader(child.pid, start, child)
