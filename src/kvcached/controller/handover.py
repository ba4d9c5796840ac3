# SPDX-License-Identifier: Apache-2.0
"""From one gateway to the next of the same folder: servers that run go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING, Final

from kvcached.controller import leftovers
from kvcached.controller.intake import Connection
from kvcached.controller.launcher import EngineBackend
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from aiohttp import web

    from kvcached.controller.adoption import Record
    from kvcached.controller.backends import Backend
    from kvcached.controller.intake import Intake
    from kvcached.controller.leftovers import Group
    from kvcached.controller.states import State

_log = logging.getLogger("kvcached.controller")
_BACKLOG: Final = 128
_TURNS: Final = 3
_LOOK_S: Final = 0.2
"""So long without a request, and a connection is closed: what a client has sent by then has been read."""


class Door:
    """The gateway's address, which is taken from the first moment on, so that a failure touches no server; clients come in by `open`."""

    def __init__(self) -> None:
        self._listener: asyncio.Server
        self._runner: web.AppRunner
        self._intake: Intake
        self._emptying: asyncio.Task[None] | None = None

    @classmethod
    async def at(cls, host: str, port: int) -> Door:
        """Raises `SettingError` when the address is taken, or is none."""
        door = cls()
        loop = asyncio.get_running_loop()
        with _telling_what_to_do():
            door._listener = await loop.create_server(door._protocol, host, port, backlog=_BACKLOG, start_serving=False)
            try:
                door._listen()
            except OSError:
                door._listener.close()
                raise
        return door

    def _listen(self) -> None:
        """Now, since two may be bound to an address of which none listens. Who comes early waits in the kernel."""
        for one in self._listener.sockets:
            with socket.socket(fileno=os.dup(one.fileno())) as listening:
                listening.listen(_BACKLOG)

    @property
    def port(self) -> int:
        return int(self._listener.sockets[0].getsockname()[1])

    async def open(self, runner: web.AppRunner, intake: Intake) -> None:
        """Clients are let in, those too that have waited since `at`."""
        self._runner, self._intake = runner, intake
        runner.app.on_response_prepare.append(self._say_the_last)
        await runner.setup()
        await self._listener.start_serving()

    async def shut(self) -> asyncio.Task[None]:
        """No connection from here on. Those without a request are closed, the others after the answer to theirs; then the task is done."""
        if self._emptying is None:
            for late in await self._stop_listening():
                with contextlib.suppress(OSError):  # it has left again
                    await asyncio.get_running_loop().connect_accepted_socket(self._protocol, late)
            self._intake.hurry()
            self._emptying = asyncio.get_running_loop().create_task(self._empty())
        return self._emptying

    def close(self) -> None:
        """Whatever is still there is broken off."""
        self._listener.close()
        if self._emptying is not None:
            self._emptying.cancel()
            for connection in self._connections:
                connection.force_close()

    async def _stop_listening(self) -> list[socket.socket]:
        """What the kernel has accepted by now is a client, and has perhaps sent its request."""
        listening = list(self._listener.sockets)
        for one in listening:
            asyncio.get_running_loop().remove_reader(one.fileno())
        for _ in range(_TURNS):  # asyncio breaks off what it is about to accept when its listener is closed
            await asyncio.sleep(0)
        late = [connection for one in listening for connection in _accept_all(one.fileno())]
        self._listener.close()
        return late

    async def _empty(self) -> None:
        """Not by `Server.shutdown`, nor `pre_shutdown`: both make connections deaf, to requests that were sent and the rest of bodies."""
        idle: set[Connection] = set()
        while self._connections:
            before, idle = idle, {connection for connection in self._connections if connection.is_idle or connection.is_lingering}
            for connection in before & idle:
                connection.force_close()
            await asyncio.sleep(_LOOK_S)

    @property
    def _connections(self) -> list[Connection]:
        found = [] if self._runner.server is None else self._runner.server.connections
        return [connection for connection in found if isinstance(connection, Connection)]

    def _protocol(self) -> Connection:
        assert self._runner.server is not None
        return Connection(self._runner.server, self._intake)

    async def _say_the_last(self, _: web.Request, response: web.StreamResponse) -> None:
        if self._emptying is not None:
            response.force_close()
            response.headers["Connection"] = "close"


async def take_over(folder: Path, backends: Mapping[str, Backend]) -> dict[str, State]:
    """What earlier gateways left in `folder` is these models' from here on, or has ended. Returns the state of each that was taken.

    Raises `SettingError` when something does not end, and `OSError` when a log cannot be opened.
    """
    groups = await asyncio.to_thread(leftovers.groups_in, folder)
    records = {name: _records_of(name, groups) for name in backends}
    fit = {name: backend for name, backend in backends.items() if isinstance(backend, EngineBackend) and records[name]}
    reasons = dict(zip(fit, await asyncio.gather(*(backend.why_not_adopt(records[name]) for name, backend in fit.items())), strict=True))
    unfit = [group for group in groups if _why_unfit(group, reasons)]
    for group in unfit:
        _log.warning("%s: process %d of an earlier gateway is ended: %s", group.file.stem, group.pid, _why_unfit(group, reasons))
    await asyncio.to_thread(leftovers.end_all, unfit)
    return {name: backend.adopt(records[name]) for name, backend in fit.items() if not reasons[name]}


@contextlib.contextmanager
def _telling_what_to_do() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingError(f"listen: {error.strerror}; end what listens there, or name another address") from error


def _accept_all(descriptor: int) -> list[socket.socket]:
    accepted = []
    with socket.socket(fileno=os.dup(descriptor)) as listening:
        listening.setblocking(False)
        with contextlib.suppress(OSError):  # no more
            while True:
                accepted.append(listening.accept()[0])
    return accepted


def _records_of(name: str, groups: Sequence[Group]) -> list[Record]:
    """By replica."""
    found = [group.record for group in groups if group.record is not None and group.record.purpose.model == name]
    return sorted(found, key=lambda record: record.purpose.replica)


def _why_unfit(group: Group, reasons: Mapping[str, str]) -> str:
    if group.record is None:
        return "it has lost its first process, or its record is of another version"
    return reasons.get(group.record.purpose.model, "no model of that name is started here")
