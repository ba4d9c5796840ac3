# SPDX-License-Identifier: Apache-2.0
"""What the owner asks of a model's servers, and the remote ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

import aiohttp

from kvcached.controller.choice import Replica
from kvcached.controller.fleet import FIRST_PAUSE_S, LONGEST_PAUSE_S
from kvcached.errors import KVCachedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvcached.controller.controls import EngineControls
    from kvcached.controller.journal import Journal
    from kvcached.setting_types import Amount

_log = logging.getLogger("kvcached.controller")
PROBE_TIMEOUT_S = 5.0


class BackendFailed(KVCachedError):
    """A server did not do what was asked. `no_memory`: it is as it was before, and may do it later."""

    def __init__(self, reason: str, no_memory: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.no_memory = no_memory


class Backend(Protocol):
    """The servers of one model. Every call has an end, and raises `BackendFailed`; one call at a time, but that `stop` may end a `start`.

    After `start` or `wake` failed (but for `no_memory`) nothing of the servers that it started is left.
    """

    @property
    def replicas(self) -> Sequence[Replica]: ...

    @property
    def journal(self) -> Journal | None:
        """What its servers say; None: that is not heard here."""
        ...

    @property
    def run_dir(self) -> Path | None:
        """Where the cards of its pools are recorded; None: its KV cache is not ours."""
        ...

    async def start(self) -> None: ...

    async def wake(self) -> None: ...

    async def sleep(self) -> None: ...

    async def stop(self) -> None: ...

    def leave(self) -> None:
        """Its servers stay as they are, for the next gateway; this one has none of them any more."""
        ...

    async def limit_kv(self, limit: Amount) -> list[int]:
        """Most KV memory that each server may hold from now on. Returns the bytes in force; the KV cache may not be ours."""
        ...

    async def is_gone(self, replica: Replica) -> bool:
        """After a request failed there: whether the server is no more. False too when it cannot be known."""
        ...


class RemoteBackend:
    """Servers that somebody else runs: they are looked at, and put to sleep if the file says so, but never started or ended."""

    journal = None
    run_dir = None

    def __init__(self, addresses: Sequence[str], session: aiohttp.ClientSession, controls: EngineControls | None, timeout_s: float) -> None:
        self.replicas: list[Replica] = [Replica(address) for address in addresses]
        self._session = session
        self._controls = controls
        self._timeout_s = timeout_s
        self._searches: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """At least one answers."""
        await self.stop()
        for replica, up in zip(self.replicas, await asyncio.gather(*map(self._answers, self.replicas)), strict=True):
            replica.up = up
        if not any(replica.up for replica in self.replicas):
            raise BackendFailed(f"nobody answers at {', '.join(replica.address for replica in self.replicas)}")
        await asyncio.gather(*(self._rouse(replica) for replica in self.replicas if replica.up))
        for replica in self.replicas:
            if not replica.up:
                self._look_for(replica)

    async def wake(self) -> None:
        if self._controls is not None:
            await asyncio.wait_for(self._each(self._controls.wake), self._timeout_s)

    async def sleep(self) -> None:
        if self._controls is not None:
            await asyncio.wait_for(self._each(self._controls.sleep), self._timeout_s)

    async def stop(self) -> None:
        """They are not ours, but nobody looks for them any more."""
        self.leave()
        await asyncio.gather(*self._searches.values(), return_exceptions=True)
        self._searches.clear()

    def leave(self) -> None:
        for task in self._searches.values():
            task.cancel()

    async def limit_kv(self, limit: Amount) -> list[int]:
        raise BackendFailed("its memory is somebody else's")

    async def is_gone(self, replica: Replica) -> bool:
        replica.up = await self._answers(replica)
        if not replica.up:
            self._look_for(replica)
        return not replica.up

    def _look_for(self, replica: Replica) -> None:
        if replica.address not in self._searches or self._searches[replica.address].done():
            self._searches[replica.address] = asyncio.get_running_loop().create_task(self._search(replica))

    async def _search(self, replica: Replica) -> None:
        """Until it answers."""
        pause_s = FIRST_PAUSE_S
        while not replica.up:
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            if await self._answers(replica):
                with contextlib.suppress(BackendFailed):
                    await self._rouse(replica)
                    replica.up = True

    async def _rouse(self, replica: Replica) -> None:
        """It may be asleep since an earlier gateway, which `/health` does not tell. One that cannot be woken was never put to sleep."""
        if self._controls is None:
            return
        try:
            await asyncio.wait_for(self._controls.wake(replica.address), self._timeout_s)
        except asyncio.TimeoutError:
            raise BackendFailed(f"{replica.address} did not wake up in time") from None
        except BackendFailed as error:
            if error.no_memory:
                raise
            _log.warning("%s is taken for awake: %s", replica.address, error)

    async def _each(self, call: object) -> None:
        assert callable(call)
        for replica in self.replicas:
            if replica.up:
                await call(replica.address)

    async def _answers(self, replica: Replica) -> bool:
        return await answers(self._session, replica.address)


async def answers(session: aiohttp.ClientSession, address: str, timeout_s: float = PROBE_TIMEOUT_S, path: str = "/health") -> bool:
    """Whether a server is there that is ready. One without `/health` counts as ready when it says so with any status below 500."""
    try:
        async with session.get(address + path, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False) as response:
            return response.status < 500
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
        return False
