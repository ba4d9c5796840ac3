# SPDX-License-Identifier: Apache-2.0
"""One engine's server as a child process: its log, its end, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Final

from kvcached import processes
from kvcached.controller import leftovers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_log = logging.getLogger("kvcached.engine")
TERM_GRACE_S: Final = 20.0
KILL_GRACE_S: Final = 10.0
_POLL_S: Final = 0.05
_LOG_BYTES: Final = 16 * 1024 * 1024
_TAIL_LINES: Final = 20
_LONGEST_LINE_BYTES: Final = 16_384


class EngineProcess:
    """Leads a process group of its own, so that all it starts ends with it.

    `on_end`: told once, when it ends without `stop`. `on_line`: told each line that it says.
    """

    def __init__(
        self,
        title: str,
        log: Path,
        process: asyncio.subprocess.Process,
        output: IO[bytes],
        on_end: Callable[[int], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.title = title
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._path = log
        self._process = process
        self._output = output
        self._on_end = on_end
        self._on_line = on_line
        self._stopping = False
        self._log_failed = False
        leftovers.note(log, process.pid)
        self._watch = asyncio.get_running_loop().create_task(self._follow())

    @classmethod
    async def launch(
        cls,
        title: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        on_end: Callable[[int], None],
        on_line: Callable[[str], None],
    ) -> EngineProcess:
        """Raises `OSError` when the command cannot be run, or no record of it be written beside the log."""
        log.parent.mkdir(parents=True, exist_ok=True)
        # A pipe of our own: asyncio's would have wait() wait until the last child of the process has closed its end, too.
        reading, writing = os.pipe()
        output = open(reading, "rb", buffering=0)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError:
            output.close()
            raise
        finally:
            os.close(writing)
        try:
            return cls(title, log, process, output, on_end, on_line)
        except OSError:  # without a record nobody would ever end it
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            output.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def last_words(self) -> str:
        """Of a process that has ended."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watch), KILL_GRACE_S)
        return " / ".join(list(self.tail)[-3:])

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group. Nothing of it is left after it."""
        self._stopping = True
        if self.running:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), TERM_GRACE_S)
        if not self._watch.done():  # else its group was killed when it ended, and the number may be another's by now
            self._signal(signal.SIGKILL)
            await self._process.wait()
            await self._until_all_are_gone()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watch), KILL_GRACE_S)
        self._watch.cancel()
        leftovers.forget(self._path)

    def kill(self) -> None:
        """At once, and its end is not told; `stop` waits for it."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    async def _until_all_are_gone(self) -> None:
        """What was killed has its memory until it has ended, and that can take a while."""
        end_s = time.monotonic() + KILL_GRACE_S
        while await asyncio.to_thread(processes.of_group, self.pid):
            if time.monotonic() > end_s:
                _log.error("%s: killed, and still there: process group %d", self.title, self.pid)
                return
            await asyncio.sleep(_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def _follow(self) -> None:
        """Keep the log, and tell the end of the first process, with which the others of its group end."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._output)
        copying = loop.create_task(self._copy(reader))
        try:
            code = await self._process.wait()
            if not self._stopping:
                self._signal(signal.SIGKILL)  # what it started would keep memory that nobody counts
                self._on_end(code)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(copying, KILL_GRACE_S)
        finally:
            transport.close()

    async def _copy(self, output: asyncio.StreamReader) -> None:
        """Whatever becomes of the log: an engine whose output nobody reads would stop at its next line."""
        rest = b""
        while chunk := await output.read(65_536):
            self._keep(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._say(line)
            rest = rest[-_LONGEST_LINE_BYTES:]
        if rest:
            self._say(rest)

    def _keep(self, chunk: bytes) -> None:
        """In the log, of which one that is full is kept beside it."""
        try:
            if self._path.exists() and self._path.stat().st_size > _LOG_BYTES:
                self._path.replace(self._path.with_suffix(".log.1"))
            with self._path.open("ab", buffering=0) as log:
                log.write(chunk)
        except OSError as error:
            if not self._log_failed:
                _log.error("%s: its log cannot be written: %s", self.title, error)
            self._log_failed = True
        else:
            self._log_failed = False

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.tail.append(text)
            self._on_line(text)
            _log.info("%s | %s", self.title, text)
