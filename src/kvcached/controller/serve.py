# SPDX-License-Identifier: Apache-2.0
"""From the file to a running gateway."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import web

from kvcached.controller.access import Access
from kvcached.controller.build import build_backends, card_bytes, listen_for_ends, specs_of
from kvcached.controller.gateway import Gateway
from kvcached.controller.owner import Owner
from kvcached.controller.reload import Reload
from kvcached.controller.traces import traces_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcached.controller.config import ServeConfig


_log = logging.getLogger("kvcached.controller")
_CONNECT_TIMEOUT_S: Final = 10.0


async def serve(
    config: ServeConfig, environ: Mapping[str, str], on_ready: Callable[[str], None], read_again: Callable[[], ServeConfig]
) -> None:
    """Until SIGTERM or SIGINT; SIGHUP takes the file as `read_again` finds it. `on_ready` gets the address.

    Raises `SettingError`, and `OSError` when the address is taken.
    """
    told_to_end = _told_to_end()
    access = Access(config, environ)
    traces = traces_to(config.traces)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        backends = build_backends(config, environ, session)
        async with Owner(specs_of(config), backends, card_bytes(config)) as owner:
            listen_for_ends(owner, backends)
            gateway = Gateway(config, access, owner, session, traces)
            reload = Reload(config, environ, owner, gateway, session)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload.take, read_again)
            await _listen(config, gateway, owner, on_ready, told_to_end)
    await asyncio.to_thread(traces.close)


async def _listen(config: ServeConfig, gateway: Gateway, owner: Owner, on_ready: Callable[[str], None], told_to_end: asyncio.Event) -> None:
    """Streams that are open end before the listener does."""
    runner = gateway.runner()
    await runner.setup()
    try:
        host, port = config.host_and_port
        await web.TCPSite(runner, host, port).start()
        on_ready(f"http://{host}:{runner.addresses[0][1]}")
        await told_to_end.wait()
        await owner.close()
    finally:
        await runner.cleanup()


def _told_to_end() -> asyncio.Event:
    """Listens from the first moment on: a signal that comes early must not leave engines behind."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    return told
