# SPDX-License-Identifier: Apache-2.0
"""Asking the pool for blocks: not again at once after a refusal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.runtime.pool import Pool

PAUSE_S: Final = 0.02


class Growth:
    """A request that waits asks again and again; one that runs is put back by vLLM and computed again when it is refused. So what the
    one was refused says nothing about what the other would get, which asks for less.
    """

    def __init__(self, pool: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._refused_until_s = {False: float("-inf"), True: float("-inf")}

    def was_refused(self) -> bool:
        """Whether the pool has just had less than a request needs."""
        return self._clock() < max(self._refused_until_s.values())

    def ask(self, blocks: int, *, runs: bool) -> int:
        """Blocks gained, at most `blocks` or as many as lie on the page of the last."""
        if self._clock() < self._refused_until_s[runs]:
            return 0
        gained = self._pool.grow(blocks)
        if gained < blocks:
            self._refused_until_s[runs] = self._clock() + PAUSE_S
        return gained
