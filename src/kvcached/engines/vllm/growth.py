# SPDX-License-Identifier: Apache-2.0
"""Asking the pool for blocks: not again at once after a refusal, and with patience where a request would be put back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.runtime.pool import Pool

PAUSE_S: Final = 0.02
PATIENCE_S: Final = 0.5
_BETWEEN_S: Final = 0.005


class Growth:
    """A request that waits loses nothing by a refusal. One that runs is put back by vLLM and computed again: for it the pool is asked
    although one that waits was refused just now, and asked again while others hold what they can give but were too slow to.
    """

    def __init__(self, pool: Pool, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._pool = pool
        self._clock = clock
        self._sleep = sleep
        self._refused_until_s = {False: float("-inf"), True: float("-inf")}

    def was_refused(self) -> bool:
        """Whether the pool has just had less than a request needs."""
        return self._clock() < max(self._refused_until_s.values())

    def ask(self, blocks: int, *, runs: bool) -> int:
        """Blocks gained, at most `blocks` or as many as lie on the page of the last."""
        if self._clock() < self._refused_until_s[runs]:
            return 0
        gained = self._pool.grow(blocks)
        if runs and gained < blocks:
            gained += self._insist(blocks - gained)
        if gained < blocks:
            self._refused_until_s[runs] = self._clock() + PAUSE_S
        return gained

    def _insist(self, blocks: int) -> int:
        gained, end_s = 0, self._clock() + PATIENCE_S
        while gained < blocks and self._clock() < end_s and self._others_can_give():
            self._sleep(_BETWEEN_S)
            gained += self._pool.grow(blocks - gained)
        return gained

    def _others_can_give(self) -> bool:
        """As they last told, and to a pool that is within its limit."""
        counts = self._pool.counts()
        return counts.held_pages < counts.limit_pages and self._pool.others_spare_bytes() >= self._pool.geometry.release_step_bytes
