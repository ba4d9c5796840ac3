# SPDX-License-Identifier: Apache-2.0
"""Asking all pools side by side for what they have counted. Who is silent costs the others nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

from kvcached.errors import KVCachedError
from kvcached.runtime.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvcached.runtime.control import PoolMetrics

_AT_ONCE: Final = 256


class Inquiry:
    """`timeout_s` bounds the whole of `ask`. A thread is made only when all there are wait for a pool. Close it at the end."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kvcached-metrics")

    def ask(self, endpoints: Mapping[str, Path]) -> dict[str, PoolMetrics]:
        """The answers that came in time, by the name of the pool."""
        asked = {self._threads.submit(_answer, endpoint, self._timeout_s): pool for pool, endpoint in endpoints.items()}
        done, late = wait(asked, self._timeout_s)
        for future in late:
            future.cancel()
        return {asked[future]: answer for future in done if (answer := future.result()) is not None}

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _answer(endpoint: Path, timeout_s: float) -> PoolMetrics | None:
    """None: gone, stopped, too busy, of another user or another version."""
    try:
        return ControlClient(endpoint, timeout_s).metrics()
    except (KVCachedError, OSError):
        return None
