# SPDX-License-Identifier: Apache-2.0
"""What each card holds now, by model: read from the cards' records, without a lock and without asking an engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvcached.cli.top.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from kvcached.cli.top.sampler import CardSample, RankRow


class CardMemory:
    """Keeps the records' files open from one look to the next."""

    def __init__(self) -> None:
        self._samplers: dict[Path, Sampler] = {}

    def look(self, run_dirs: Iterable[Path], leaders: Mapping[int, str]) -> dict[str, Any]:
        """`leaders`: the model of each process that leads a server's session. Pools of nobody of them have no model. `problems`: why
        cards may be missing.
        """
        known = self._samplers
        self._samplers = {path: known.get(path) or Sampler(path) for path in run_dirs}
        samples = [sampler.sample() for sampler in self._samplers.values()]
        cards = [_card(card, leaders) for sample in samples for card in sample.cards]
        return {"cards": cards, "problems": [sample.problem for sample in samples if sample.problem]}


def _card(card: CardSample, leaders: Mapping[int, str]) -> dict[str, Any]:
    return {
        "card": card.name or card.uuid,
        "uuid": card.uuid,
        "budget_bytes": card.budget_bytes,
        "leased_bytes": card.leased_bytes,
        "free_bytes": card.free_bytes,
        "problem": card.problem,
        "pools": list(_pools(card.rows, leaders)),
    }


def _pools(rows: Iterable[RankRow], leaders: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """`leased_bytes` is all that the pool's rank holds; `used`, `cached` and `other` (weights) are parts of it."""
    for row in rows:
        if row.alive:
            record = row.record
            yield {
                "model": leaders.get(_leader_of(record.pid)),
                "pool": row.instance,
                "rank": row.rank,
                "leased_bytes": record.lease_bytes + row.other_bytes,
                "used_bytes": record.owned_bytes,
                "cached_bytes": record.cached_bytes,
                "other_bytes": row.other_bytes if row.has_kv else record.lease_bytes + row.other_bytes,
                "limit_bytes": record.limit_bytes,
            }


def _leader_of(pid: int) -> int:
    """Of its session; 0 where the process has ended just now."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0
