# SPDX-License-Identifier: Apache-2.0
"""The pool: a ledger and a mapper under one lock. Plan in the ledger, perform outside it, settle in the ledger.

    take / give                       warm: the ledger alone; no driver, no file, no log
    take (cold) -> grow -> settle     plan: pages become MAPPING; perform: lease and map; settle: PARKED, or UNMAPPED again
    shrink -> settle                  plan: pages become UNMAPPING; perform: fence, unmap, release; settle likewise

Performing never needs the lock, so a caller that holds it (an engine's scheduler does) waits only for its own deadline; what comes
back later is settled by whoever takes the lock next.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Final

from kvcached.core.ledger import Ledger
from kvcached.core.pages import NO_MARKER
from kvcached.core.tally import Eviction, Tally
from kvcached.errors import Misuse, PeerRefused, PeerTimeout, PoolExhausted, StateUnknown
from kvcached.ranks.api import LimitsRequest, MapperPort, MapperStatus, MapperTally, Outcome, Report, Verdict
from kvcached.runtime.forking import OrphanedLock, in_forked_child
from kvcached.runtime.pagework import PageWork, Unmapping
from kvcached.runtime.pool_options import PoolOptions
from kvcached.units import ceil_div, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from kvcached.core.geometry import BlockGeometry
    from kvcached.core.limits import Limits
    from kvcached.core.report import PoolCounts

Ranges = list[tuple[int, int]]
Sets = list[tuple[int, int]]  # (page, set of its blocks: bit i is the page's i-th)
NOTHING_IN_FLIGHT: Final = NO_MARKER
"""The marker of a give behind which no work was queued."""


class Pool:
    """Blocks of one id space, handed out only while their pages are mapped. Safe to use from any thread.

    `lock` is re-entrant: an engine's adapter holds it through each scheduler entry point, so that the keeper and the control
    endpoint act between two of them. `on_evict` is called with the lock held, with ids of cached blocks that the pool has chosen to
    drop; the engine must forget their contents. `ceiling_bytes` is the most that the card can ever grant, as last seen. `press` asks
    other pools of the card to give memory back (bytes wanted, deadline) and returns the bytes given.
    """

    def __init__(
        self,
        geometry: BlockGeometry,
        port: MapperPort,
        limits: Limits,
        options: PoolOptions | None = None,
        *,
        adopted_pages: int = 0,
        press: Callable[[int, float], int] | None = None,
    ) -> None:
        self.lock: threading.RLock | OrphanedLock = threading.RLock()
        self.geometry = geometry
        self.limits = limits
        self.options = options or PoolOptions()
        self.on_evict: Callable[[Sequence[int]], None] | None = None
        self.on_low: Callable[[], None] | None = None
        self.low_mark_pages = 0
        self.ceiling_bytes = geometry.range_bytes
        self.others_spare_bytes: Callable[[], int] = int
        self.tally = Tally()
        self.standing_blocks = 0
        self._port = port
        self._press = press
        self._step_bytes = geometry.release_step_bytes
        self._is_capped = self.options.max_cached_blocks >= 0
        self._ledger = Ledger(geometry, limit_pages=limits.limit_bytes // self._step_bytes, capped=self._is_capped)
        self.available, self.missing, self.reachable = self._ledger.available, self._ledger.missing, self._ledger.reachable
        self._work = PageWork(
            self._ledger, port, self.lock, large_run_pages=self.options.large_run_pages, stranded_fraction=self.options.stranded_fraction
        )
        self.await_maps = self._work.await_maps
        self._late_limits: list[tuple[Limits, Future[Outcome]]] = []
        self._last_refusal = ""
        self._refused_until_s = 0.0
        self._adopt(adopted_pages)
        in_forked_child(self, Pool._orphan)

    def _orphan(self) -> None:
        self.lock = OrphanedLock()

    def _adopt(self, pages: int) -> None:
        """Pages 0 .. pages-1 were mapped one by one by the mapper before there was an owner."""
        if pages:
            plan = self._ledger.plan_grow(pages)
            if [tuple(run) for run in plan.runs] != [(page, 1) for page in range(pages)]:
                raise Misuse(f"the limit of {self.limits.limit_bytes} bytes is below the {pages} pages that are mapped already")
            self._ledger.settle_grow(plan, mapped=True)

    # ------------------------------------------------------------------ blocks

    def obtainable(self) -> int:
        """Blocks that a take could get at best: free, cached, and on pages that the limit still allows. Pages on their way in or out are
        among these: a take waits for them."""
        with self.lock:
            counts = self._ledger.counts()
            settled_pages = counts.held_pages - counts.mapping_pages - counts.unmapping_pages
            growable = min(counts.limit_pages, self.geometry.pages) - settled_pages
            return max(0, counts.free_blocks + counts.cached_blocks + growable * self.geometry.max_blocks_per_page)

    def max_blocks(self) -> int:
        """Blocks that the pool can ever hold at the same time: by its limit, its range, and what others on the card never give up."""
        pages = min(self.geometry.pages, min(self.limits.limit_bytes, self.ceiling_bytes) // self._step_bytes)
        return min(self.geometry.usable_blocks, pages * self.geometry.max_blocks_per_page)

    def take(self, blocks: int) -> Ranges:
        """Ids of `blocks` blocks as (first, count), all on mapped pages. Raises `PoolExhausted`; then nothing was taken."""
        with self.lock:
            ranges = self._ledger.take(blocks)
            if ranges is None or self._work.refusing:
                return self._take_cold(blocks, ranges)
            if self._ledger.parked_pages < self.low_mark_pages and self.on_low is not None:
                self.on_low()
            return ranges

    def take_sets(self, blocks: int) -> tuple[Ranges, Sets]:
        """As `take`, in ranges and in sets of blocks on a page."""
        with self.lock:
            taken = None if self._work.refusing else self._ledger.take_sets(blocks)
            if taken is None:
                return self._take_cold(blocks, None), []
            if self._ledger.parked_pages < self.low_mark_pages and self.on_low is not None:
                self.on_low()
            return taken

    def _take_cold(self, blocks: int, ranges: Ranges | None) -> Ranges:
        """Grow, then evict what is cached here; others are pressed only when that would not be enough. For what the limit forbids
        nothing is mapped or evicted."""
        if ranges is not None:
            self._ledger.give(ranges, NOTHING_IN_FLIGHT)
        self._work.refuse()
        self._work.settle()
        if self.obtainable() >= blocks:
            self._make_available(blocks)
        ranges = self._ledger.take(blocks)
        if ranges is None:
            self.tally.misses += 1
            raise PoolExhausted(blocks, self._ledger.available(), "blocks", self._why_exhausted(blocks))
        return ranges

    def _make_available(self, blocks: int) -> None:
        can_evict = self._ledger.reachable() >= blocks
        if not can_evict or time.monotonic() >= self._refused_until_s:
            self.grow(self._ledger.missing(blocks), urgent=not can_evict)
        self._evict(self._ledger.victims_for_blocks(self._ledger.missing(blocks)), Eviction.NEED)

    def take_ids(self, ids: Sequence[int]) -> None:
        """Take exactly these free ids, all or none. Raises `PoolExhausted` when one is not free on a mapped page."""
        with self.lock:
            self._work.refuse()
            if not self._ledger.take_ids(ids):
                raise PoolExhausted(len(ids), self._ledger.available(), "blocks", "not every id asked for is free on a mapped page")

    def pin_page_of(self, block: int) -> None:
        """Keep the page of `block` mapped whatever happens to its blocks. Owning this one block is no sign of work."""
        with self.lock:
            self.standing_blocks += 1
            self._ledger.pin(self.geometry.page_of(block))

    def working_blocks(self, counts: PoolCounts) -> int:
        """Owned blocks that are a sign of work."""
        return counts.owned_blocks - self.standing_blocks

    def give(self, ranges: Iterable[tuple[int, int]], marker: int = NOTHING_IN_FLIGHT) -> None:
        """Owned blocks become free. `marker`: the engine's last scheduled step, which may still read them."""
        with self.lock:
            self._ledger.give(ranges, marker)

    def give_sets(self, pieces: Sets, marker: int = NOTHING_IN_FLIGHT) -> None:
        """As `give`, of each page the set of its blocks."""
        with self.lock:
            self._ledger.give_sets(pieces, marker)

    def give_cached(self, ids: Sequence[int], marker: int, last_use: int, cost: float = 1) -> None:
        """Owned blocks become cached: their contents stay until they are evicted. `cost`: what the loss of one of them costs."""
        with self.lock:
            self._ledger.give_cached(ids, marker, last_use, cost)
            overflow = self._ledger.cached_overflow(self.options.max_cached_blocks) if self._is_capped else ()
            if overflow:
                self._evict(overflow, Eviction.CAP)

    def touch(self, ids: Sequence[int]) -> None:
        """Cached blocks become owned again."""
        with self.lock:
            self._ledger.touch(ids)

    def evict(self, ids: Sequence[int]) -> None:
        """The engine has dropped the contents of these cached blocks: they become free."""
        with self.lock:
            self._ledger.evict(ids)
            self.tally.evicted_blocks[Eviction.ENGINE] += len(ids)

    def advance(self, completed_marker: int) -> None:
        """All work up to this step has finished."""
        with self.lock:
            self._ledger.advance(completed_marker)

    def note_preemptions(self, requests: int) -> None:
        """The engine has put so many requests back for lack of blocks."""
        self.tally.note_preemptions(requests, avoidable=requests > 0 and self.others_spare_bytes() >= self._step_bytes)

    def _evict(self, ids: Sequence[int], why: Eviction) -> None:
        if ids:
            if self.on_evict is not None:
                self.on_evict(ids)
            self._ledger.evict(ids)
            self.tally.evicted_blocks[why] += len(ids)

    # ------------------------------------------------------------------ pages

    def grow(self, blocks: int, deadline_s: float | None = None, *, urgent: bool = True) -> int:
        """Map pages for `blocks` more blocks, as many as limit, card and deadline allow. Returns the blocks gained.

        `urgent`: requests wait for the blocks, so other pools are asked to give memory back.
        """
        with self.lock:
            begun_ns = time.monotonic_ns()
            self._work.settle()
            before = self._ledger.available()
            deadline = time.monotonic() + (self.options.grow_deadline_s if deadline_s is None else deadline_s)
            target = before + blocks
            if urgent:
                self._work.await_maps(deadline)
            refused = self._grow_once(target, deadline, urgent)
            if refused and self._work.await_unmaps(deadline):
                refused = self._grow_once(target, deadline, urgent)
            if refused and urgent and self._press_for(target, deadline):
                self._grow_once(target, deadline, urgent)
            self.tally.waits.observe(time.monotonic_ns() - begun_ns)
            return self._ledger.available() - before

    def _grow_once(self, target_blocks: int, deadline: float, urgent: bool) -> bool:
        """Map what `target_blocks` available blocks lack, else what the card grants. Whether it refused, so that room would help."""
        pages = self._pages_for(target_blocks - self._ledger.available())
        outcome = self._work.map(pages, urgent=urgent, deadline=deadline) if pages > 0 else None
        if outcome is None or outcome.verdict is Verdict.DONE:
            return False
        self.tally.refusals += 1
        self._last_refusal = outcome.reason
        self._refused_until_s = time.monotonic() + self.options.refusal_pause_s
        grantable = min(pages - 1, outcome.size_bytes // self._step_bytes)
        if grantable > 0:
            self._work.map(grantable, urgent=urgent, deadline=deadline)
        return outcome.verdict is Verdict.EXHAUSTED

    def _press_for(self, target_blocks: int, deadline: float) -> bool:
        """Ask other pools for what is still missing. Whether they gave something."""
        wanted_bytes = self._pages_for(target_blocks - self._ledger.available()) * self._step_bytes
        if self._press is None:
            return False
        given_bytes = self._press(wanted_bytes, max(0.0, deadline - time.monotonic()))
        self.tally.presses += 1
        self.tally.taken_bytes += given_bytes
        return given_bytes > 0

    def grow_reserve(self, pages: int, deadline_s: float = 1.0, *, is_wanted: Callable[[], bool] | None = None) -> bool:
        """Map up to `pages` pages ahead of need, if they are wanted still. Whether some were mapped within the deadline."""
        outcome = self._work.map(pages, urgent=False, deadline=time.monotonic() + deadline_s, is_wanted=is_wanted)
        return outcome is not None and outcome.verdict is Verdict.DONE

    def pages_over(self, size_bytes: int) -> int:
        """The least number of pages that together hold `size_bytes`."""
        return ceil_div(size_bytes, self._step_bytes)

    def _pages_for(self, blocks: int) -> int:
        return ceil_div(blocks, self.geometry.max_blocks_per_page)

    def plan_shrink(self, pages: int, *, keep_parked: int = 0, evict: Eviction | None = None) -> Unmapping:
        """Set up to `pages` parked pages, in whole runs, aside for `unmap`, leaving `keep_parked`; with a reason to `evict`, after
        `free_pages`, so that nobody else can take first what that empties."""
        with self.lock:
            if evict is not None:
                self.free_pages(pages, evict)
            return self._work.plan_unmap(pages, keep_parked)

    def unmap(self, planned: Unmapping, deadline_s: float = 1.0) -> int:
        """Unmap what was set aside. Returns the bytes given back within the deadline."""
        outcome = self._work.unmap(planned, time.monotonic() + deadline_s)
        return outcome.size_bytes if outcome is not None and outcome.verdict is Verdict.DONE else 0

    def shrink(self, pages: int, *, keep_parked: int = 0, deadline_s: float = 1.0) -> int:
        """Unmap up to `pages` parked pages in whole runs, leaving `keep_parked`. Returns the bytes given back within the deadline."""
        return self.unmap(self.plan_shrink(pages, keep_parked=keep_parked), deadline_s)

    def free_pages(self, pages: int, why: Eviction = Eviction.ASKED) -> None:
        """Evict cached blocks so that about `pages` whole pages become empty, at the least cost."""
        with self.lock:
            self._evict(self._ledger.victims_for_pages(pages), why)

    def trim_handles(self, deadline_s: float = 1.0) -> int:
        """Release handles that the mapper keeps for reuse. Returns bytes."""
        future = self._port.trim()
        wait_for([future], deadline_s)
        return future.result().size_bytes if future.done() and future.exception() is None else 0

    def fail(self, reason: str) -> None:
        """From here on every call is refused: it is not known what is mapped."""
        self._work.fail(reason)

    @property
    def failed(self) -> StateUnknown | Misuse | None:
        return self._work.failed

    # ------------------------------------------------------------------ limits and sight

    def set_limits(self, limits: Limits, deadline_s: float = 1.0) -> None:
        """Replace limit, floor and weight, in the card's record and here. Nothing owned is taken; the keeper brings the pool below a
        lower limit. Raises `PeerRefused` when the card does not allow them: nothing has changed; `PeerTimeout`: they may still come
        into force, in the record and here alike.
        """
        self._work.refuse()
        floor_bytes = min(limits.floor_bytes, limits.limit_bytes)  # a pool cannot claim what it may not hold
        future = self._port.set_limits(LimitsRequest(limits.limit_bytes, floor_bytes, limits.weight, limits.revision))
        wait_for([future], deadline_s)
        if not future.done():
            with self.lock:
                self._late_limits.append((limits, future))
            raise PeerTimeout(f"the mapper has not entered the limits within {deadline_s:g} s; they count from when it does")
        outcome = future.result()
        if outcome.verdict is Verdict.BUSY:
            raise PeerTimeout(outcome.reason)
        if outcome.verdict is not Verdict.DONE:
            raise PeerRefused(outcome.reason)
        with self.lock:
            self._settle_late_limits()
            self._adopt_limits(limits)

    def _adopt_limits(self, limits: Limits) -> None:
        self._ledger.set_limit(limits.limit_bytes // self._step_bytes, limits.revision)
        self.limits = limits

    def _settle_late_limits(self) -> None:
        """Of changes that were given up waiting for, those that the mapper has entered since."""
        late, self._late_limits = self._late_limits, []
        for limits, future in late:
            if not future.done():
                self._late_limits.append((limits, future))
            elif future.exception() is None and future.result().verdict is Verdict.DONE:
                self._adopt_limits(limits)

    def _settle(self) -> None:
        self._work.settle()
        self._settle_late_limits()

    def overage_pages(self) -> int:
        with self.lock:
            self._settle()
            return self._ledger.overage_pages()

    def counts(self) -> PoolCounts:
        with self.lock:
            self._settle()
            return self._ledger.counts()

    def port_status(self, timeout_s: float) -> MapperStatus:
        """What the mapper holds. Raises `PeerTimeout`, `PeerLost`."""
        return self._port.status(timeout_s)

    def port_tally(self, timeout_s: float) -> Sequence[MapperTally]:
        """How long each rank's work took. Raises `PeerTimeout`, `PeerLost`."""
        return self._port.tally(timeout_s)

    @property
    def ledger(self) -> Ledger:
        """For sight (explain, invariants): read it with the lock held, change it only through this pool."""
        return self._ledger

    def report(self) -> None:
        """Publish in the card's record, through the mapper, where the bytes are."""
        counts, step = self.counts(), self._step_bytes
        block_bytes = self.geometry.planes * self.geometry.block_stride_bytes
        self._port.report(
            Report(
                parked_bytes=counts.parked_pages * step,
                retired_bytes=counts.retired_pages * step,
                cached_bytes=counts.cached_blocks * block_bytes,
                owned_bytes=counts.owned_blocks * block_bytes,
            )
        )

    def _why_exhausted(self, blocks: int) -> str:
        counts = self._ledger.counts()
        if counts.held_pages >= counts.limit_pages or self.obtainable() < blocks:
            return f"the pool is at its limit of {format_size(min(self.limits.limit_bytes, self.geometry.range_bytes))}"
        return f"the card grants no more memory just now: {self._last_refusal or 'the mapper has not answered in time'}"

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        if self._work.close():
            self._port.close()
