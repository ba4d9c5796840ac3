# SPDX-License-Identifier: Apache-2.0
"""How each engine is put to sleep and woken over HTTP, and how its KV memory is taken through our own control."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

import aiohttp

from kvcached.controller.backends import BackendFailed
from kvcached.errors import PeerError
from kvcached.runtime.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvcached.setting_types import Amount

_NO_MEMORY: Final = ("out of memory", "outofmemory", "no available memory", "not enough memory")


class EngineControls(Protocol):
    """Each call raises `BackendFailed`."""

    async def sleep(self, address: str) -> None: ...

    async def wake(self, address: str) -> None: ...


async def post(session: aiohttp.ClientSession, url: str, params: Mapping[str, str] | None = None, body: Any = None) -> None:
    """Raises `BackendFailed` with what the server said, unless it said 2xx."""
    try:
        async with session.post(url, params=params, json=body) as response:
            text = (await response.text(errors="replace"))[:500]
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise BackendFailed(f"{url}: {error or type(error).__name__}") from error
    if response.status >= 300:
        raise BackendFailed(f"{url} said {response.status}: {text}", any(words in text.lower() for words in _NO_MEMORY))


class VllmControls:
    """`discard`: level 2, the weights are read again on wake-up; else level 1, they are kept in host memory."""

    def __init__(self, session: aiohttp.ClientSession, discard: bool, mode: str = "wait") -> None:
        self._session = session
        self._discard = discard
        self._mode = mode

    async def sleep(self, address: str) -> None:
        await post(self._session, f"{address}/sleep", {"level": "2" if self._discard else "1", "mode": self._mode})

    async def wake(self, address: str) -> None:
        if not self._discard:
            await post(self._session, f"{address}/wake_up")
            return
        await post(self._session, f"{address}/wake_up", {"tags": "weights"})
        await post(self._session, f"{address}/collective_rpc", body={"method": "reload_weights"})
        await post(self._session, f"{address}/wake_up", {"tags": "kv_cache"})


class SglangControls:
    """`discard`: the weights are read again from `model` on wake-up; else the server keeps a copy in host memory."""

    def __init__(self, session: aiohttp.ClientSession, discard: bool, model: str) -> None:
        self._session = session
        self._discard = discard
        self._model = model

    async def sleep(self, address: str) -> None:
        await post(self._session, f"{address}/release_memory_occupation", body={})

    async def wake(self, address: str) -> None:
        await post(self._session, f"{address}/resume_memory_occupation", body={})
        if self._discard:
            await post(self._session, f"{address}/update_weights_from_disk", body={"model_path": self._model})


class KvMemory:
    """The KV cache of one elastic server, through its pool's endpoint. Raises `BackendFailed`."""

    def __init__(self, path: Path, timeout_s: float = 10.0) -> None:
        self._client = ControlClient(path, timeout_s)

    async def give_back(self) -> int:
        """Cached blocks and parked pages go. Returns the bytes that the pool still holds."""
        return await asyncio.to_thread(self._give_back)

    async def limit(self, limit: Amount) -> int:
        """A share is of the card's budget. Returns the bytes that are in force; what is above them goes as it falls free."""
        return await asyncio.to_thread(self._limit, limit)

    def _give_back(self) -> int:
        try:
            self._client.evict(self._client.status().held_bytes)  # not `cached_bytes`: SGLang's tree counts what it caches as owned
            self._client.trim()
            return self._client.status().held_bytes
        except PeerError as error:
            raise BackendFailed(str(error)) from error

    def _limit(self, limit: Amount) -> int:
        try:
            answer = self._client.limit(limit.of(self._client.status().budget_bytes))
        except PeerError as error:
            raise BackendFailed(str(error)) from error
        if answer.outcome == "rejected":
            raise BackendFailed(answer.reason)
        return answer.in_force_bytes
