# SPDX-License-Identifier: Apache-2.0
"""A reason for every byte that a pool holds, and what would free it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.runtime.control import ExplainRow, Explanation

if TYPE_CHECKING:
    from kvcached.ranks.api import MapperStatus
    from kvcached.runtime.pool import Pool


def explain_pool(pool: Pool, mapper: MapperStatus) -> Explanation:
    """Rows whose sizes add up to what the mapper holds. Call with the pool's lock held."""
    counts, step = pool.counts(), pool.geometry.release_step_bytes
    block_bytes = pool.geometry.planes * pool.geometry.block_stride_bytes
    owned_bytes, cached_bytes = counts.owned_blocks * block_bytes, counts.cached_blocks * block_bytes
    used_bytes = counts.used_pages * step
    rows = [
        ("owned by running requests", owned_bytes, "the requests end, or the engine preempts them"),
        ("cached prefixes", cached_bytes, "kvctl evict, a lower limit, or KVCACHED_MAX_CACHED_TOKENS"),
        (
            "free blocks beside owned or cached ones on the same page",
            used_bytes - owned_bytes - cached_bytes,
            "the neighbours' end or eviction",
        ),
        ("parked: mapped and empty, kept ready", counts.parked_pages * step, "kvctl trim; by itself when the engine idles"),
        ("retired: empty, behind work in flight", counts.retired_pages * step, "the step that may still read it ends"),
        ("being mapped or unmapped now", (counts.mapping_pages + counts.unmapping_pages) * step, "the mapper answers"),
        ("quarantined: the driver left its state unknown", mapper.quarantined_bytes, "restart the engine"),
        ("handles kept for the next map", mapper.cached_handle_bytes, "kvctl trim"),
    ]
    rows.append(("zero page and rounding", mapper.held_bytes - sum(size for _, size, _ in rows), "KVCACHED_ZERO_BACKING=never"))
    return Explanation(rows=tuple(ExplainRow(reason=reason, size_bytes=size, freed_by=how) for reason, size, how in rows if size > 0))
