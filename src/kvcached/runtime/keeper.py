# SPDX-License-Identifier: Apache-2.0
"""The keeper: the thread that keeps a reserve of mapped pages, gives surplus back and brings a pool below a lower limit.

It acts between the engine's scheduler entry points, and on an idle engine, which takes no step, it acts alone.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcached.core.reserve import ReserveTarget
from kvcached.core.tally import Eviction
from kvcached.errors import Misuse, PeerError, StateUnknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.core.report import PoolCounts
    from kvcached.runtime.pool import Pool

_log = logging.getLogger("kvcached.keeper")
_REPORT_INTERVAL_S: Final = 0.2
_ENFORCE_TIMEOUT_S: Final = 1.0
_REST_TIMEOUT_S: Final = 0.25  # whoever waits may hold the pool's lock


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """Pages to keep parked at least and at most while the engine works; none after `idle_trim_s` without a take.

    `surplus_s`: what is beyond that goes when nobody has needed it for so long. Requests come and go in waves, and unmapping what the
    next wave maps again costs both a wait; others on the card who need it do not wait for this, they ask.

    `wish_s`: who asked others for memory so short a time ago waits for more, and what has come is no surplus until it is enough.
    """

    min_reserved_pages: int = 1
    max_reserved_pages: int = 16
    idle_trim_s: float = 2.0
    surplus_s: float = 0.25
    wish_s: float = 1.0
    tick_s: float = 0.05
    idle_tick_s: float = 0.25


class Keeper:
    """Runs `tick` in a thread. `tick` may also be called by hand with a clock of one's own. `watch` is called every report."""

    def __init__(
        self,
        pool: Pool,
        options: KeeperOptions,
        *,
        watch: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._options = options
        self._clock = clock
        self._watch = watch
        self._reserve = ReserveTarget(options.min_reserved_pages, options.max_reserved_pages)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._enforcing = threading.Lock()
        self._last_used_pages = 0
        self._last_tick_s = self._last_busy_s = clock()
        self._last_presses, self._last_wish_s = pool.tally.presses, float("-inf")
        self._last_report_s = 0.0
        self._grow_backoff_until_s = 0.0
        self._least_surplus_pages: int | None = None  # since `_surplus_since_s`
        self._surplus_since_s = 0.0
        self._handles_trimmed = False
        self._last_trouble = ""
        self._thread: threading.Thread | None = None
        pool.on_low = self.wake

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvcached-keeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at once. Cheap enough for the warm path."""
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            idle = self._is_idle(self._clock())
            self._wake.wait(self._options.idle_tick_s if idle else self._options.tick_s)
            self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                self.tick()
            except StateUnknown as error:
                known = self._pool.failed is not None  # then whoever failed the pool has told the reason as an error
                _log.log(logging.INFO if known else logging.ERROR, "the keeper stops: %s", error)
                self._pool.fail(str(error))
                return
            except BaseException as error:  # raised again: a pool whose keeper died must not look healthy
                self._pool.fail(f"the keeper met {type(error).__name__}: {error}")
                raise

    def tick(self) -> None:
        """One look: limit first, then reserve or surplus, then the report."""
        now = self._clock()
        with self._pool.lock:  # what is counted is of one moment: before a wish to rest, or after it
            self._observe(now, self._pool.counts())
        self.enforce_limit()
        self._keep_reserve(now)
        if now - self._last_report_s >= _REPORT_INTERVAL_S:
            self._last_report_s = now
            self._show()

    def _show(self) -> None:
        """Be seen and be reachable. What goes wrong here says nothing about the memory, so it is tried again and told once."""
        try:
            self._pool.report()
            if self._watch is not None:
                self._watch()
        except (PeerError, Misuse, OSError) as error:
            if str(error) != self._last_trouble:
                _log.warning("this pool cannot be seen or reached by others just now: %s", error)
            self._last_trouble = str(error)
        else:
            self._last_trouble = ""

    def _observe(self, now: float, counts: PoolCounts) -> None:
        consumed = counts.used_pages - self._last_used_pages
        if consumed > 0 or self._pool.working_blocks(counts) > 0:
            self._last_busy_s = now
        self._reserve.observe(max(0, consumed), max(1e-6, now - self._last_tick_s))
        self._last_used_pages, self._last_tick_s = counts.used_pages, now
        if self._pool.tally.presses != self._last_presses:
            self._last_presses, self._last_wish_s = self._pool.tally.presses, now

    def rest(self) -> None:
        """Keep no reserve until blocks are taken again. A look that is under way maps nothing more, and what it is mapping is there when
        this returns, for whoever gives it back."""
        with self._pool.lock:
            self._last_used_pages = self._pool.counts().used_pages
            self._last_busy_s = float("-inf")
            self._pool.await_maps(time.monotonic() + _REST_TIMEOUT_S)

    def enforce_limit(self) -> None:
        """Give back what is beyond the limit: parked pages first, then cached blocks; owned blocks stay until the engine gives them.

        One at a time: pages that one caller is unmapping still count as held, and a second one would evict cached blocks for them.
        Whoever cannot have its turn within a second leaves it to the next tick: a caller may hold the pool's lock, which the other needs.
        """
        if not self._enforcing.acquire(timeout=_ENFORCE_TIMEOUT_S):
            return
        try:
            self._enforce_limit()
        finally:
            self._enforcing.release()

    def _enforce_limit(self) -> None:
        over = self._pool.overage_pages()
        if over <= 0:
            return
        self._pool.shrink(over)
        over = self._pool.overage_pages()
        if over > 0:
            self._pool.unmap(self._pool.plan_shrink(over, evict=Eviction.LIMIT))
        self._pool.trim_handles()

    def _keep_reserve(self, now: float) -> None:
        idle = self._is_idle(now)
        low, high = (0, 0) if idle else self._reserve.marks()
        parked = self._pool.counts().parked_pages
        waits = now - self._last_wish_s <= self._options.wish_s
        surplus = self._lasting_surplus(now, 0 if waits else parked - high, 0.0 if idle else self._options.surplus_s)
        if parked < low and now >= self._grow_backoff_until_s:
            if not self._pool.grow_reserve(high - parked, is_wanted=lambda: not self._is_idle(now)):
                self._grow_backoff_until_s = now + self._options.idle_tick_s
        elif surplus > 0:
            self._pool.shrink(surplus, keep_parked=high)
            self._handles_trimmed = False  # what has just been unmapped left handles behind
        # Takes below the mark wake this thread, which takes time from theirs: not while there is nothing to be had.
        self._pool.low_mark_pages = low if now >= self._grow_backoff_until_s else 0
        if idle and not self._handles_trimmed:
            self._pool.trim_handles()
        self._handles_trimmed = idle

    def _is_idle(self, now: float) -> bool:
        return now - self._last_busy_s > self._options.idle_trim_s

    def _lasting_surplus(self, now: float, pages: int, window_s: float) -> int:
        """The least surplus of a window that ends now, 0 while none does."""
        least = self._least_surplus_pages
        if pages <= 0 or window_s <= 0:
            self._least_surplus_pages = None
            return max(0, pages)
        if least is None:
            self._surplus_since_s, least = now, pages
        least = min(least, pages)
        lasted = now - self._surplus_since_s >= window_s
        self._least_surplus_pages = None if lasted else least
        return least if lasted else 0
