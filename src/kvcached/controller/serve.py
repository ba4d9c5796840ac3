# SPDX-License-Identifier: Apache-2.0
"""From the file to a running gateway."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from typing import TYPE_CHECKING, Final

import aiohttp

from kvcached.controller.access import Access
from kvcached.controller.build import build_backends, card_bytes, listen_for_ends, log_dir_of, specs_of
from kvcached.controller.forwarding import Forwarders
from kvcached.controller.gateway import Gateway
from kvcached.controller.handover import Door, take_over
from kvcached.controller.owner import Owner
from kvcached.controller.reload import Reload
from kvcached.controller.tap import TappedConnector
from kvcached.controller.traces import traces_to

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from kvcached.controller.config import ServeConfig


_CONNECT_TIMEOUT_S: Final = 10.0
_LAST_ANSWERS_S: Final = 10.0
"""For what was answered last to reach its client."""


async def serve(
    config: ServeConfig, environ: Mapping[str, str], on_ready: Callable[[str], None], read_again: Callable[[], ServeConfig]
) -> None:
    """Until SIGTERM or SIGINT, which end all servers, or SIGUSR1, which leaves them to the next gateway of this folder.

    SIGHUP takes the file as `read_again` finds it. `on_ready` gets the address. Raises `SettingError`, and `OSError` when the address is
    taken.
    """
    orders = _Orders()
    access = Access(config, environ)
    traces = traces_to(config.traces)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    host, port = config.host_and_port
    with contextlib.closing(await Door.at(host, port)) as door:
        async with aiohttp.ClientSession(
            connector=TappedConnector(limit=0), timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            backends = build_backends(config, environ, session)
            specs, room = specs_of(config), card_bytes(config)
            found = await take_over(log_dir_of(config), backends)
            async with Forwarders(config.processes - 1) as forwarders, Owner(specs, backends, room, found=found) as owner:
                listen_for_ends(owner, backends)  # before anything is awaited: one that was found may have ended
                gateway = Gateway(config, access, owner, session, traces, forwarders)
                reload = Reload(config, environ, owner, gateway, session)
                orders.on_change(functools.partial(reload.take, read_again))
                await _listen(door, gateway, owner, lambda: on_ready(f"http://{host}:{door.port}"), orders)
    await asyncio.to_thread(traces.close)


async def _listen(door: Door, gateway: Gateway, owner: Owner, on_ready: Callable[[], None], orders: _Orders) -> None:
    """Streams that are open end before the listener does."""
    runner = gateway.runner()
    try:
        await door.open(runner, gateway.intake)
        on_ready()
        await _first_of(orders.end.wait(), orders.hand_over.wait())
        if not orders.end.is_set():
            emptying = await door.shut()
            await _first_of(orders.end.wait(), owner.hand_over(emptying.done))
        await owner.close()
        await asyncio.wait({await door.shut()}, timeout=_LAST_ANSWERS_S)
    finally:
        door.close()
        await runner.cleanup()


class _Orders:
    """What signals have asked for. Listens from the first moment on: one that comes early must not leave engines behind."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.end = asyncio.Event()
        self.hand_over = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end.set)
        loop.add_signal_handler(signal.SIGUSR1, self.hand_over.set)
        self._take: Callable[[], object] | None = None
        self._has_changed = False
        loop.add_signal_handler(signal.SIGHUP, self._changed)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGUSR1})  # which the command has held back since it began

    def on_change(self, take: Callable[[], object]) -> None:
        """`take` is called for each SIGHUP, and at once if one has come already."""
        self._take = take
        if self._has_changed:
            take()

    def _changed(self) -> None:
        if self._take is None:
            self._has_changed = True
        else:
            self._take()


async def _first_of(*works: Coroutine[object, object, object]) -> None:
    """Until one of them is done; the others are not done then."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
