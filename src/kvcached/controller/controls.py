# SPDX-License-Identifier: Apache-2.0
"""How each engine is put to sleep and woken over HTTP, and how its KV memory is taken through our own control."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

import aiohttp

from kvcached.controller.backends import BackendFailed
from kvcached.errors import PeerError, PeerLost
from kvcached.runtime.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvcached.setting_types import Amount

_NO_MEMORY: Final = ("out of memory", "outofmemory", "no available memory", "not enough memory")


class EngineControls(Protocol):
    """Each call raises `BackendFailed`."""

    async def sleep(self, address: str) -> None: ...

    async def wake(self, address: str) -> None: ...


class Door:
    """How a server's owner speaks to it. `credentials`: headers that it wants from whoever asks, such as a key."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Mapping[str, str]) -> None:
        self._session = session
        self._credentials = dict(credentials)

    async def post(self, url: str, params: Mapping[str, str] | None = None, body: Any = None) -> None:
        """Raises `BackendFailed` with what the server said, unless it said 2xx."""
        try:
            async with self._session.post(url, params=params, json=body, headers=self._credentials) as response:
                text = (await response.text(errors="replace"))[:500]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise BackendFailed(f"{url}: {error or type(error).__name__}") from error
        if response.status >= 300:
            raise BackendFailed(f"{url} said {response.status}: {text}", any(words in text.lower() for words in _NO_MEMORY))


class VllmControls:
    """`discard`: level 2, the weights are read again on wake-up; else level 1, they are kept in host memory."""

    def __init__(self, door: Door, discard: bool, mode: str = "wait") -> None:
        self._door = door
        self._discard = discard
        self._mode = mode

    async def sleep(self, address: str) -> None:
        await self._door.post(f"{address}/sleep", {"level": "2" if self._discard else "1", "mode": self._mode})

    async def wake(self, address: str) -> None:
        if not self._discard:
            await self._door.post(f"{address}/wake_up")
            return
        await self._door.post(f"{address}/wake_up", {"tags": "weights"})
        await self._door.post(f"{address}/collective_rpc", body={"method": "reload_weights"})
        await self._door.post(f"{address}/wake_up", {"tags": "kv_cache"})


class SglangControls:
    """`discard`: the weights are read again from `model` on wake-up; else the server keeps a copy in host memory."""

    def __init__(self, door: Door, discard: bool, model: str) -> None:
        self._door = door
        self._discard = discard
        self._model = model

    async def sleep(self, address: str) -> None:
        await self._door.post(f"{address}/release_memory_occupation", body={})

    async def wake(self, address: str) -> None:
        await self._door.post(f"{address}/resume_memory_occupation", body={})
        if self._discard:
            await self._door.post(f"{address}/update_weights_from_disk", body={"model_path": self._model})


class KvMemory:
    """The KV cache of one elastic server, through its pools' endpoints. Each call raises `BackendFailed`.

    `path`: where the server's pool listens. An engine with several pools puts a word behind that name (`NAME-dp1`, `NAME-window`), and
    so do other servers of ours: `leader`, the process that leads the server's session, says which are meant; None: the one at `path`.
    """

    def __init__(self, path: Path, timeout_s: float = 10.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    @property
    def run_dir(self) -> Path:
        return self._path.parent.parent

    async def give_back(self, leader: int | None = None) -> int:
        """Cached blocks and parked pages go. Returns the bytes that the pools still hold."""
        return await asyncio.to_thread(self._each, leader, _give_back)

    async def limit(self, limit: Amount, leader: int | None = None) -> int:
        """Of each pool; a share is of the card's budget. Returns the bytes that are in force; what is above goes as it falls free."""
        return await asyncio.to_thread(self._each, leader, lambda client: _limit(client, limit))

    def _each(self, leader: int | None, call: Callable[[ControlClient], int]) -> int:
        try:
            return sum(call(client) for client in self._clients(leader))
        except PeerError as error:
            raise BackendFailed(str(error)) from error

    def _clients(self, leader: int | None) -> list[ControlClient]:
        if leader is None:
            return [ControlClient(self._path, self._timeout_s)]
        paths = [self._path, *sorted(self._path.parent.glob(f"{self._path.stem}-*{self._path.suffix}"))]
        found = [client for path in paths if (client := self._client_of(path, leader)) is not None]
        if not found:
            raise BackendFailed(f"nobody of process {leader} answers at {self._path} or beside it")
        return found

    def _client_of(self, path: Path, leader: int) -> ControlClient | None:
        client = ControlClient(path, self._timeout_s)
        try:
            return client if os.getsid(client.status().pid) == leader else None
        except (PeerLost, ProcessLookupError):  # a file that a dead process left
            return None


def _give_back(client: ControlClient) -> int:
    client.evict(client.status().held_bytes)  # not `cached_bytes`: SGLang's tree counts what it caches as owned
    client.trim()
    return client.status().held_bytes


def _limit(client: ControlClient, limit: Amount) -> int:
    answer = client.limit(limit.of(client.status().budget_bytes))
    if answer.outcome == "rejected":
        raise BackendFailed(answer.reason)
    return answer.in_force_bytes
