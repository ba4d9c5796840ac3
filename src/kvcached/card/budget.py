# SPDX-License-Identifier: Apache-2.0
"""How much may be granted to whom, and why not more. Pure: records in, verdicts out.

Three sums are kept at or below the budget: the leases; what the pools may own or come back to own, max(floor, ownable); and, by
the registry, the floors. The second is what lets a floor be lent for parked and cached pages and still return without taking a
block from anyone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvcached.card.record import Kind, Record
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LAST_TICKET: Final = 1 << 64
FLOOR_CLASS, OWNED_CLASS, SPARE_CLASS = 0, 1, 2  # who goes first among those that wait


class Refusal(Enum):
    """Why a lease was not granted."""

    NONE = "granted"
    BUSY = "the card's lock was not free within the deadline"
    LIMIT = "the pool's own limit"
    NEVER = "more than this pool can ever hold"
    BUDGET = "the card's budget is leased"
    DEVICE = "the device's free memory"
    FLOORS = "the rest is owned by others or kept for their floors"
    TURN = "others wait first"
    SETTLING = "the card's file is new; until live processes have registered again only floors and unused memory are granted"
    UNREADABLE = "a live entry cannot be read just now"
    LOST = "the card's file cannot be reached"


class Ask(NamedTuple):
    """A wish: `delta_bytes` more lease (`lease_delta_bytes` of it new) for the pool in `slot`."""

    slot: int
    lease_delta_bytes: int
    ownable_delta_bytes: int

    @property
    def delta_bytes(self) -> int:
        return max(self.lease_delta_bytes, self.ownable_delta_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """The card at this moment. `free_bytes` is what the device reports, less the margin; `used_bytes` what it reports in use, by anyone;
    both None when nobody measures."""

    budget_bytes: int
    free_bytes: int | None = None
    settling: bool = False
    now_ns: int = 0
    used_bytes: int | None = None


class Verdict(NamedTuple):
    """`grantable_bytes`: the largest ask of this kind that would be granted now; `refusal` says what bounds it."""

    granted: bool
    grantable_bytes: int
    refusal: Refusal
    reason: str


@dataclass(frozen=True, slots=True)
class _Sums:
    leased_bytes: int
    others_committed_bytes: int
    waiting_bytes: int
    unreadable: bool


def judge(records: Sequence[Record], ask: Ask, room: Room) -> Verdict:
    """Whether `ask` can be granted as a whole. `records` are all slots by number, empty ones included."""
    mine = records[ask.slot]
    sums = _sum(records, ask, room.now_ns)
    if sums.unreadable:
        return Verdict(False, 0, Refusal.UNREADABLE, Refusal.UNREADABLE.value)
    bounds = _bounds(mine, ask, room, sums)
    bound_bytes, refusal = min(bounds, key=lambda bound: bound[0])
    grantable_bytes = max(bound_bytes, 0)
    if ask.delta_bytes <= grantable_bytes:
        return Verdict(True, grantable_bytes, Refusal.NONE, "")
    ceiling = ceiling_bytes(records, ask.slot, room.budget_bytes, owned=ask.ownable_delta_bytes > 0)
    if _goal_bytes(mine, ask) > ceiling:
        refusal = Refusal.LIMIT if ceiling == mine.limit_bytes else Refusal.NEVER
    return Verdict(False, grantable_bytes, refusal, _explain(refusal, mine, ask, room, sums, ceiling))


def want_class(mine: Record, ask: Ask) -> int:
    """A pool below its floor goes first, then those that need memory for requests, then reserves."""
    if mine.lease_bytes + ask.lease_delta_bytes <= mine.floor_bytes:
        return FLOOR_CLASS
    return OWNED_CLASS if ask.ownable_delta_bytes else SPARE_CLASS


def next_ticket(records: Iterable[Record], now_ns: int) -> int:
    """A ticket behind all that wait here. The time is in it, so that tickets of several cards compare."""
    return max(now_ns, 1 + max((record.ticket for record in records if record.waits(now_ns)), default=0))


def ceiling_bytes(records: Sequence[Record], slot: int, budget_bytes: int, *, owned: bool) -> int:
    """The most that the pool in `slot` can ever hold while the others stay: its limit, or the budget less what never comes back.

    Weights and activations do not come back; floors do not for owned blocks.
    """
    kept = (record.committed_bytes if record.kind != Kind.KV else record.floor_bytes if owned else 0 for record in _others(records, slot))
    return min(records[slot].limit_bytes, budget_bytes - sum(kept))


def floors_room_bytes(records: Sequence[Record], slot: int | None, budget_bytes: int) -> int:
    """The largest floor that still fits beside the others' floors and the memory that never comes back."""
    kept = (record.floor_bytes if record.kind == Kind.KV else record.committed_bytes for record in _others(records, slot))
    return budget_bytes - sum(kept)


def short_bytes(records: Iterable[Record], budget_bytes: int) -> int:
    """How far floors cannot be covered just now, because blocks owned by others stand on them."""
    return max(0, sum(record.committed_bytes for record in records) - budget_bytes)


def over_bytes(records: Iterable[Record], budget_bytes: int) -> int:
    """How far the leases pass the budget: never by granting, only when live entries came back to a new file."""
    return max(0, sum(record.lease_bytes for record in records) - budget_bytes)


def default_floor_bytes(budget_bytes: int, longest_request_bytes: int) -> int:
    return min(longest_request_bytes, budget_bytes // 16)


def _others(records: Sequence[Record], slot: int | None) -> Iterable[Record]:
    return (record for index, record in enumerate(records) if index != slot)


def _goal_bytes(mine: Record, ask: Ask) -> int:
    return max(mine.lease_bytes + ask.lease_delta_bytes, mine.ownable_bytes + ask.ownable_delta_bytes)


def _sum(records: Sequence[Record], ask: Ask, now_ns: int) -> _Sums:
    mine = records[ask.slot]
    ticket = mine.ticket if mine.waits(now_ns) else _LAST_TICKET
    turn = (want_class(mine, ask), ticket)
    leased = committed = waiting = 0
    unreadable = False
    for slot, record in enumerate(records):
        leased += record.lease_bytes
        if slot == ask.slot:
            continue
        committed += record.committed_bytes
        unreadable = unreadable or record.kind == Kind.UNREADABLE
        if record.ticket and record.waits(now_ns) and (record.want_class, record.ticket) < turn:
            waiting += record.wanted_bytes
    return _Sums(leased, committed, waiting, unreadable)


def _bounds(mine: Record, ask: Ask, room: Room, sums: _Sums) -> list[tuple[int, Refusal]]:
    bounds = []
    if ask.lease_delta_bytes:
        bounds += [(mine.limit_bytes - mine.lease_bytes, Refusal.LIMIT), (room.budget_bytes - sums.leased_bytes, Refusal.BUDGET)]
        if room.free_bytes is not None:
            bounds.append((room.free_bytes, Refusal.DEVICE))
        if room.settling:
            bounds.append((max(mine.floor_bytes - mine.lease_bytes, _settling_bytes(room, sums)), Refusal.SETTLING))
    if ask.ownable_delta_bytes:
        bounds.append((room.budget_bytes - sums.others_committed_bytes - mine.ownable_bytes, Refusal.FLOORS))
    if sums.waiting_bytes:
        shared = [bound for bound, refusal in bounds if refusal in (Refusal.BUDGET, Refusal.DEVICE, Refusal.FLOORS)]
        bounds.append((min(shared) - sums.waiting_bytes, Refusal.TURN))
    return bounds


def _settling_bytes(room: Room, sums: _Sums) -> int:
    """All memory in use may belong to pools that have not registered again, and what is leased here may not be in use yet."""
    return 0 if room.used_bytes is None else room.budget_bytes - room.used_bytes - sums.leased_bytes


def _explain(refusal: Refusal, mine: Record, ask: Ask, room: Room, sums: _Sums, ceiling_bytes: int) -> str:
    size = format_size
    facts = {
        Refusal.LIMIT: f"{size(mine.lease_bytes)} of {size(mine.limit_bytes)} leased",
        Refusal.NEVER: f"{size(_goal_bytes(mine, ask))} against {size(ceiling_bytes)}",
        Refusal.BUDGET: f"{size(sums.leased_bytes)} of {size(room.budget_bytes)} leased",
        Refusal.DEVICE: f"{size(room.free_bytes or 0)} free after the margin",
        Refusal.FLOORS: f"{size(sums.others_committed_bytes)} of {size(room.budget_bytes)}",
        Refusal.TURN: f"they want {size(sums.waiting_bytes)}",
        Refusal.SETTLING: f"floor {size(mine.floor_bytes)}, leased {size(mine.lease_bytes)}",
    }
    return f"{refusal.value} ({facts[refusal]}); {size(ask.delta_bytes)} wanted"


class Claim(NamedTuple):
    floor_bytes: int
    weight: float
    demand_bytes: int


def fair_shares(claims: Sequence[Claim], budget_bytes: int) -> list[int]:
    """Each claim's fair share: its floor or its demand if less, then the rest by weight up to each one's demand.

    The sum never passes the budget. Floors that do not fit together are scaled down.
    """
    shares = _scaled([float(min(claim.floor_bytes, claim.demand_bytes)) for claim in claims], budget_bytes)
    rest = budget_bytes - sum(shares)
    hungry = [index for index, claim in enumerate(claims) if claim.demand_bytes > shares[index]]
    while hungry and rest >= 1:
        step = min(
            rest / sum(claims[index].weight for index in hungry),
            min((claims[index].demand_bytes - shares[index]) / claims[index].weight for index in hungry),
        )
        for index in hungry:
            shares[index] += step * claims[index].weight
        rest = budget_bytes - sum(shares)
        hungry = [index for index in hungry if claims[index].demand_bytes - shares[index] >= 1]
    return [int(share) for share in shares]


def _scaled(floors: list[float], budget_bytes: int) -> list[float]:
    total = sum(floors)
    return floors if total <= budget_bytes else [floor * budget_bytes / total for floor in floors]
