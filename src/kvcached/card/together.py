# SPDX-License-Identifier: Apache-2.0
"""A lease over several entries, of one card or of many: all or none, nothing held while waiting."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcached.card.budget import Refusal
from kvcached.card.entry import LEASE_DEADLINE_S, Entry, LeaseResult
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Sequence


def lease_together(
    wishes: Sequence[tuple[Entry, int]], *, owned: bool, deadline_s: float = LEASE_DEADLINE_S, want: bool = False
) -> LeaseResult:
    """Raise each entry's lease by its bytes. Entries of this process only.

    Asked in the order of cards and ranks, the same for everybody. With `want`, a refusal leaves one and the same ticket on every
    card: two that wait for the same cards never each hold the other's place. The result is the first refusal, or the tightest
    grant. Raises `Misuse` for no wishes and for a delta that is not positive.
    """
    ordered = sorted(wishes, key=lambda wish: (wish[0].path.name, wish[0].rank))
    if not ordered or any(delta_bytes <= 0 for _, delta_bytes in ordered):
        raise Misuse("a lease over several entries needs at least one, and a positive number of bytes for each")
    end_s = time.monotonic() + deadline_s
    granted: list[tuple[Entry, int]] = []
    results: list[LeaseResult] = []
    for entry, delta_bytes in ordered:
        result = entry.lease(delta_bytes, owned=owned, deadline_s=end_s - time.monotonic(), want=want, keep_ticket=True)
        results.append(result)
        if not result.granted:
            break
        granted.append((entry, delta_bytes))
    if len(granted) == len(ordered):
        for entry, _ in ordered:
            entry.unwant()
        return min(results, key=lambda result: result.grantable_bytes)
    for entry, delta_bytes in reversed(granted):
        entry.unlease(delta_bytes)
    if want and results[-1].refusal not in (Refusal.LIMIT, Refusal.NEVER):
        _wait_everywhere(ordered, owned, end_s)
    return results[-1]


def _wait_everywhere(ordered: Sequence[tuple[Entry, int]], owned: bool, end_s: float) -> None:
    ticket = min((entry.record.ticket for entry, _ in ordered if entry.record.ticket), default=0)
    for entry, delta_bytes in ordered:
        ticket = entry.want(delta_bytes, owned=owned, ticket=ticket, deadline_s=end_s - time.monotonic()) or ticket
