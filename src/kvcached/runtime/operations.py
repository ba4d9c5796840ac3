# SPDX-License-Identifier: Apache-2.0
"""What a pool offers to the outside: the control endpoint's operations, acting on an idle engine too.

Every operation that needs the pool's lock waits for it with a bound: an engine holds it only inside its scheduler's entry points.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.core.pages import NO_MARKER
from kvcached.core.tally import Eviction
from kvcached.errors import Misuse, PeerError, PeerRefused, PeerTimeout
from kvcached.ranks.api import MapperStatus
from kvcached.runtime.control import BytesAnswer, ChangeAnswer, Explanation, PoolMetrics, PoolStatus, WeightAnswer
from kvcached.runtime.control_messages import RankMetrics
from kvcached.runtime.explain import explain
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcached.core.limits import Limits
    from kvcached.ranks.facts import MapperFacts
    from kvcached.runtime.keeper import Keeper
    from kvcached.runtime.pagework import Unmapping
    from kvcached.runtime.pool import Pool

_LOCK_TIMEOUT_S: Final = 1.0
_PRESSURE_LOCK_TIMEOUT_S: Final = 0.05  # an engine that is busy for longer is growing itself, perhaps by pressing the asker
_STEP_WAIT_S: Final = 0.05  # a step of the giver's costs the asker less than computing a request again would
_STEP_POLL_S: Final = 0.002
_NO_WAIT_S: Final = 1.0
_STATUS_TIMEOUT_S: Final = 1.0
_TALLY_TIMEOUT_S: Final = 0.2  # the pool's own numbers do not wait longer for those of its ranks


class PoolOperations:
    """Implements `kvcached.runtime.control.PoolControl` on a pool and its keeper."""

    def __init__(
        self, pool: Pool, keeper: Keeper, facts: MapperFacts, *, instance: str, name: str, port_status_timeout_s: float = _STATUS_TIMEOUT_S
    ) -> None:
        self._pool = pool
        self._keeper = keeper
        self._facts = facts
        self._instance = instance
        self._name = name
        self._status_timeout_s = port_status_timeout_s
        self._counting = threading.Lock()  # several pools may press at a time
        self._evicted = _Evicted()
        self._waits_again_s = float("-inf")
        self.longest_request_tokens: Callable[[], int] = int  # an engine's adapter knows

    @contextlib.contextmanager
    def _locked(self, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[Pool]:
        if not self._pool.lock.acquire(timeout=timeout_s):
            raise PeerTimeout(f"the engine of {self._instance} has been inside one scheduling step for over {timeout_s:g} s; try again")
        try:
            yield self._pool
        finally:
            self._pool.lock.release()

    def status(self) -> PoolStatus:
        with self._locked() as pool:
            counts, limits, failed = pool.counts(), pool.limits, pool.failed
            overage_pages = pool.overage_pages()
            longest_tokens = self.longest_request_tokens()
        mapper = self._mapper_status()
        geometry, step = pool.geometry, pool.geometry.release_step_bytes
        block_bytes = geometry.planes * geometry.block_stride_bytes
        return PoolStatus(
            instance=self._instance,
            name=self._name,
            pid=os.getpid(),
            card=self._facts.card_uuid,
            state="refusing" if failed else "over" if overage_pages else "ok",
            reason=str(failed or ""),
            budget_bytes=self._facts.budget_bytes,
            capacity_bytes=geometry.range_bytes,
            page_bytes=step,
            block_bytes=block_bytes,
            lease_bytes=mapper.lease_bytes,
            held_bytes=mapper.held_bytes,
            limit_bytes=limits.limit_bytes,
            limit_revision=limits.revision,
            floor_bytes=limits.claimed_bytes,
            weight=limits.weight,
            owned_bytes=counts.owned_blocks * block_bytes,
            cached_bytes=counts.cached_blocks * block_bytes,
            parked_bytes=counts.parked_pages * step,
            retired_bytes=counts.retired_pages * step,
            mapped_bytes=mapper.mapped_bytes,
            longest_request_tokens=longest_tokens,
        )

    def _mapper_status(self) -> MapperStatus:
        """What limits speak of, where there are several ranks: one of them, the one that needs most for a page."""
        total = self._pool.port_status(self._status_timeout_s)
        page_bytes, all_bytes = self._facts.geometry.release_step_bytes, sum(self._facts.page_bytes_by_card.values())
        return MapperStatus(*(getattr(total, name) * page_bytes // all_bytes for name in MapperStatus.__slots__))

    def metrics(self) -> PoolMetrics:
        """Takes no lock of the pool's."""
        pool, tally, geometry = self._pool, self._pool.tally, self._pool.geometry
        try:
            by_rank = pool.port_tally(_TALLY_TIMEOUT_S)
        except PeerError:  # one that is stopped, or gone: what the pool itself has counted is known all the same
            by_rank = ()
        return PoolMetrics(
            refusing=pool.failed is not None,
            page_bytes=geometry.release_step_bytes,
            block_bytes=geometry.planes * geometry.block_stride_bytes,
            misses=tally.misses,
            preemptions=tally.preemptions,
            avoidable_preemptions=tally.avoidable_preemptions,
            refusals=tally.refusals,
            presses=tally.presses,
            taken_bytes=tally.taken_bytes,
            given_bytes=tally.given_bytes,
            evicted_blocks={why.value: blocks for why, blocks in tally.evicted_blocks.items()},
            waits=tally.waits.numbers(),
            ranks=tuple(RankMetrics(lease=rank.lease, map=rank.map, unmap=rank.unmap, step=rank.step) for rank in by_rank),
        )

    def limit(self, limit_bytes: int, revision: int | None = None) -> ChangeAnswer:
        """`NO_LIMIT_BYTES` lifts the limit."""
        most_bytes = NO_LIMIT_BYTES if limit_bytes >= NO_LIMIT_BYTES else self._most_bytes()
        return self._change("limit_bytes", limit_bytes, revision, lambda _: (self._least_bytes(), most_bytes))

    def floor(self, floor_bytes: int) -> ChangeAnswer:
        return self._change("floor_bytes", floor_bytes, None, lambda limits: (0, min(limits.limit_bytes, self._most_bytes())))

    def _least_bytes(self) -> int:
        """The pages that are pinned stay mapped whatever the limit."""
        return self._pool.counts().pinned_pages * self._pool.geometry.release_step_bytes

    def _most_bytes(self) -> int:
        return min(self._pool.geometry.range_bytes, self._facts.budget_bytes)

    def _change(self, field: str, asked_bytes: int, revision: int | None, bounds: Callable[[Limits], tuple[int, int]]) -> ChangeAnswer:
        """`bounds`: the least and the most that is possible."""
        with self._locked() as pool:
            limits = pool.limits
            former_bytes = limits.limit_bytes if field == "limit_bytes" else limits.claimed_bytes
            if revision is not None and revision <= limits.revision:
                return self._answer("stale", asked_bytes, former_bytes, f"revision {limits.revision} is in force")
            least_bytes, most_bytes = bounds(limits)
            in_force_bytes = max(least_bytes, min(asked_bytes, most_bytes))
            edge = "" if in_force_bytes == asked_bytes else self._edge(asked_bytes, in_force_bytes)
            changed = {field: in_force_bytes, "revision": limits.revision + 1 if revision is None else revision}
            try:
                pool.set_limits(replace(limits, **changed))
            except PeerRefused as error:
                cut = f"{format_size(asked_bytes)} asked, and {edge}: " if edge else ""
                return self._answer("rejected", asked_bytes, former_bytes, f"{cut}{error}")
        self._keeper.enforce_limit()
        self._pool.report()
        if edge:
            return self._answer("clamped", asked_bytes, in_force_bytes, edge)
        over = self._pool.overage_pages()
        return self._answer(
            "deferred" if over else "applied", asked_bytes, in_force_bytes, "running requests hold the rest" if over else ""
        )

    def _edge(self, asked_bytes: int, bound_bytes: int) -> str:
        """What made `bound_bytes` of what was asked."""
        if bound_bytes > asked_bytes:
            return "the pages that always stay mapped set the bound"
        which = "the card's budget or the address range sets" if bound_bytes == self._most_bytes() else "the pool's own limit sets"
        return f"{which} the bound"

    def _answer(self, outcome: str, asked_bytes: int, in_force_bytes: int, reason: str) -> ChangeAnswer:
        return ChangeAnswer(
            outcome=outcome,  # type: ignore[arg-type]  # the callers above name only outcomes that the model knows
            asked_bytes=asked_bytes,
            in_force_bytes=in_force_bytes,
            overage_bytes=self._pool.overage_pages() * self._pool.geometry.release_step_bytes,
            revision=self._pool.limits.revision,
            reason=reason,
        )

    def weight(self, weight: float) -> WeightAnswer:
        with self._locked() as pool:
            pool.set_limits(replace(pool.limits, weight=weight, revision=pool.limits.revision + 1))
        self._pool.report()
        return WeightAnswer(weight=weight)

    def trim(self, size_bytes: int | None = None) -> BytesAnswer:
        with self._locked() as pool:
            self._keeper.rest()  # or it would fill the reserve again at once
            leaving = pool.plan_shrink(pool.geometry.pages if size_bytes is None else pool.pages_over(size_bytes))
        return self._answer_with(leaving)

    def evict(self, size_bytes: int) -> BytesAnswer:
        with self._locked() as pool:
            leaving = pool.plan_shrink(pool.pages_over(size_bytes), evict=Eviction.ASKED)
        return self._answer_with(leaving)

    def _answer_with(self, leaving: Unmapping) -> BytesAnswer:
        given_bytes = self._give_back(leaving)
        self._pool.report()
        return BytesAnswer(given_bytes=given_bytes)

    def _give_back(self, leaving: Unmapping) -> int:
        """The bytes that the card has again: handles that are kept for reuse are still leased, so nobody else can have them."""
        return self._pool.unmap(leaving) + self._pool.trim_handles()

    def explain(self) -> Explanation:
        mapper = self._mapper_status()
        with self._locked() as pool:  # only to copy: there may be tens of thousands of pages
            counts, pages = pool.counts(), pool.ledger.copy_pages()
        return explain(pool.geometry, counts, list(pages.reports()), mapper)

    def pressure(self, wanted_bytes: int) -> BytesAnswer:
        """Parked pages at once, then cached blocks as far as the pool stays at or above its floor; if all of that is nothing, what the step
        that runs leaves. What has been given is told, though the engine has become too busy for the rest."""
        with self._locked(_PRESSURE_LOCK_TIMEOUT_S) as pool:
            leaving = pool.plan_shrink(pool.pages_over(wanted_bytes))
        given_bytes = self._give_back(leaving)
        with contextlib.suppress(PeerTimeout, Misuse):
            if given_bytes < wanted_bytes:
                given_bytes += self._give_cached(wanted_bytes - given_bytes)
            if not given_bytes and time.monotonic() >= self._waits_again_s:
                given_bytes = self._give_retired(wanted_bytes)
        self._pool.report()
        with self._counting:
            self._pool.tally.given_bytes += given_bytes
        return BytesAnswer(given_bytes=given_bytes)

    def _give_cached(self, wanted_bytes: int) -> int:
        """What is on its way out already was given to whoever asked before, and is asked for again where that took long."""
        with self._locked(_PRESSURE_LOCK_TIMEOUT_S) as pool:
            before = pool.counts()
            going_pages = before.unmapping_pages + before.retired_pages + before.quarantined_pages
            spare_bytes = (before.held_pages - going_pages) * pool.geometry.release_step_bytes - pool.limits.claimed_bytes
            missing_pages = pool.pages_over(wanted_bytes) - before.unmapping_pages - self._evicted.pages(pool.ledger.completed_marker)
            pages = min(missing_pages, pool.pages_over(max(0, spare_bytes)))
            if pages <= 0:
                return 0
            leaving = pool.plan_shrink(pages, evict=Eviction.PRESSURE)
            self._evicted.add(pool.counts().retired_pages - before.retired_pages, pool.ledger.newest_marker)
        return self._give_back(leaving)

    def _give_retired(self, wanted_bytes: int) -> int:
        """What the steps under way leave, waited for a moment; and not again soon where nothing comes of it."""
        end_s = time.monotonic() + _STEP_WAIT_S
        newest_marker = self._pool.ledger.newest_marker
        while True:
            with self._locked(_PRESSURE_LOCK_TIMEOUT_S) as pool:
                counts, is_due = pool.counts(), pool.ledger.completed_marker >= newest_marker
                leaving = pool.plan_shrink(max(0, pool.pages_over(wanted_bytes) - counts.unmapping_pages))
            if leaving.plan.runs:
                return self._give_back(leaving)
            if is_due or not counts.retired_pages:
                return 0
            if time.monotonic() >= end_s:
                self._waits_again_s = end_s + _NO_WAIT_S
                return 0
            time.sleep(_STEP_POLL_S)


class _Evicted:
    """Pages that pressure has emptied, and that a step still reads: they are as good as given to who asks again."""

    def __init__(self) -> None:
        self._pages = 0
        self._marker = NO_MARKER

    def add(self, pages: int, marker: int) -> None:
        self._pages += max(0, pages)
        self._marker = marker

    def pages(self, completed_marker: int) -> int:
        if completed_marker >= self._marker:
            self._pages = 0
        return self._pages
