# SPDX-License-Identifier: Apache-2.0
"""Further processes that carry event streams, for a gateway that has more of them than one core can: see `forwarder`.

This process answers, admits and measures every request. Only connections of a stream that has begun are lent to another process, until the
stream has ended there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import sys
from typing import TYPE_CHECKING, Any, Final

from kvcached.controller.forwarder import MESSAGE_BYTES, Ended, Line

if TYPE_CHECKING:
    from kvcached.controller.tap import Passage

_log = logging.getLogger("kvcached.controller")
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_HEALTHY_S: Final = 30.0
_LEAVE_S: Final = 5.0
_END_S: Final = 5.0


class Forwarder:
    """One process, started again whenever it ends. `open`: the streams that it has. `pid`: None until it can have some."""

    def __init__(self) -> None:
        self.open: dict[int, asyncio.Future[Ended]] = {}
        self.pid: int | None = None
        self._line: Line | None = None
        self._tickets = itertools.count(1)

    async def run(self) -> None:
        """Until cancelled."""
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            begun_s, what = loop.time(), "ended"
            try:
                await self._run_once()
            except (OSError, RuntimeError) as error:  # for instance: too many files, processes, or threads
                what = f"cannot be started ({error})"
            if loop.time() - begun_s >= _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            _log.warning("a process that forwards streams %s, and is started again in %g s", what, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                command = (sys.executable, "-m", "kvcached.controller.forwarder", str(theirs.fileno()))
                process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
            self._line = Line(ours)
            asyncio.get_running_loop().add_reader(ours, self._read)
            try:
                await process.wait()
            finally:
                self._line.close()
                self._line = self.pid = None
                self._lose_all()
                await _end(process)

    def _lose_all(self) -> None:
        while self.open:
            ticket, ended = self.open.popitem()
            if not ended.done():
                ended.set_result(Ended(ticket, "gone", False, 0, None, None))

    def _read(self) -> None:
        assert self._line is not None
        with contextlib.suppress(OSError):  # there is no more now
            while data := self._line.socket.recv(MESSAGE_BYTES):
                self._hear(json.loads(data))
            asyncio.get_running_loop().remove_reader(self._line.socket)  # its end is heard of soon, and this would be called until then

    def _hear(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            self.pid = message["pid"]
            return
        ended = Ended(**message)
        future = self.open.pop(ended.ticket, None)
        if future is not None and not future.done():
            future.set_result(ended)

    def lend(self, server: int, client: int) -> tuple[int, asyncio.Future[Ended]] | None:
        """Two descriptors. None: it has no time for them."""
        ticket = next(self._tickets)
        if self._line is None or self.pid is None:
            return None
        try:
            socket.send_fds(self._line.socket, [json.dumps({"take": ticket}).encode()], [server, client])
        except OSError:
            return None
        ended = self.open[ticket] = asyncio.get_running_loop().create_future()
        return ticket, ended

    def ask_back(self, ticket: int) -> None:
        if self._line is not None:
            self._line.say({"leave": ticket})


class Forwarders:
    """Use it as an asynchronous context manager. `count`: of processes; 0: every stream stays here."""

    def __init__(self, count: int) -> None:
        self.processes = [Forwarder() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Forwarders:
        self._tasks = [asyncio.get_running_loop().create_task(process.run()) for process in self.processes]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def carry(self, passage: Passage) -> None:
        """As `Passage.carry`, in the process that has the fewest streams. Raises `ConnectionError` when the client is gone."""
        forwarder = min((process for process in self.processes if process.pid), key=lambda process: len(process.open), default=None)
        descriptors = passage.descriptors()
        if forwarder is None or descriptors is None:
            return await passage.carry()
        passage.tap.transport.pause_reading()
        lent = forwarder.lend(*descriptors)
        if lent is None:
            passage.tap.transport.resume_reading()
            return await passage.carry()
        ticket, ended = lent
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            forwarder.ask_back(ticket)
            await asyncio.wait([ended], timeout=_LEAVE_S)
            raise
        finally:
            _take_back(passage, ended)
        if ended.result().how == "gone":
            raise ConnectionResetError("the client's connection is lost")


def _take_back(passage: Passage, future: asyncio.Future[Ended]) -> None:
    ended = future.result() if future.done() else None
    if ended is None or not ended.is_clean:
        with contextlib.suppress(OSError):  # closed as it is already
            passage.client.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # for whoever else has it, too
        passage.client.abort()
    if ended is not None:
        if ended.mishap:
            _log.error("a stream was given up, since its process could not carry it: %s", ended.mishap)
        passage.meter.add(ended.events, ended.tokens_in, ended.tokens_out)
    passage.tap.restore(whole=ended is not None and ended.how == "whole")


async def _end(process: asyncio.subprocess.Process) -> None:
    """It ends when its line is closed."""
    if process.returncode is not None:  # `wait_for` what is there already can lose that its caller is cancelled
        return
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
