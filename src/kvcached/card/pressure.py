# SPDX-License-Identifier: Apache-2.0
"""Who should give back how much, cheapest first. Pure: the pools do the giving.

Parked pages cost nothing to give, retired ones a wait, cached blocks a prefix that has to be computed again; so cached blocks go
last, and only as far as their pool's lease lies above its floor.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvcached.card.budget import Claim, fair_shares
from kvcached.card.record import Kind, Record

if TYPE_CHECKING:
    from collections.abc import Sequence


class Source(Enum):
    PARKED = 0  # handles kept for reuse are among them
    RETIRED = 1
    CACHED = 2


class Demand(NamedTuple):
    """The pool in `slot` should give back `bytes` from `source`."""

    slot: int
    source: Source
    bytes: int


def demands(records: Sequence[Record], asker_slot: int, wanted_bytes: int, budget_bytes: int, now_ns: int) -> list[Demand]:
    """The demands that together give `wanted_bytes`, or as much as there is. `records` by slot; dead ones must be left empty.

    Within one source those go first that are furthest above their fair share.
    """
    excess = _excess_bytes(records, asker_slot, wanted_bytes, budget_bytes, now_ns)
    givers = sorted(excess, key=lambda slot: (-excess[slot], slot))
    plan: list[Demand] = []
    missing_bytes = wanted_bytes
    for source in Source:
        for slot in givers:
            give_bytes = min(missing_bytes, giveable_bytes(records[slot], source))
            if give_bytes > 0:
                plan.append(Demand(slot, source, give_bytes))
                missing_bytes -= give_bytes
    return plan


def giveable_bytes(record: Record, source: Source) -> int:
    """What a pool can give from one source after having given all from the cheaper ones."""
    parked = record.parked_bytes + record.handles_bytes
    if source is Source.PARKED:
        return parked
    if source is Source.RETIRED:
        return record.retired_bytes
    above_floor_bytes = record.lease_bytes - parked - record.retired_bytes - record.floor_bytes
    return max(0, min(record.cached_bytes, above_floor_bytes))


def _excess_bytes(records: Sequence[Record], asker_slot: int, wanted_bytes: int, budget_bytes: int, now_ns: int) -> dict[int, int]:
    pools = [slot for slot, record in enumerate(records) if record.kind == Kind.KV]
    claims = [_claim(records[slot], wanted_bytes if slot == asker_slot else 0, now_ns) for slot in pools]
    shares = fair_shares(claims, budget_bytes)
    return {slot: records[slot].lease_bytes - share for slot, share in zip(pools, shares, strict=True) if slot != asker_slot}


def _claim(record: Record, wanted_bytes: int, now_ns: int) -> Claim:
    return Claim(record.floor_bytes, record.weight, record.lease_bytes + max(wanted_bytes, record.waiting_bytes(now_ns)))
