# SPDX-License-Identifier: Apache-2.0
"""One look, as text for logs and pipes or as JSON. Nothing here needs textual."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvcached.cli.live import none_text
from kvcached.cli.top.rows import COLUMNS, build, chosen, state_of
from kvcached.core.limits import NO_LIMIT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.cli.top.rows import Line, State, View
    from kvcached.cli.top.sampler import CardSample, RankRow, Sample

_CARD_FIELDS = (
    "uuid",
    "name",
    "total_bytes",
    "budget_bytes",
    "leased_bytes",
    "free_bytes",
    "other_bytes",
    "over_bytes",
    "short_bytes",
    "problem",
)


def text_lines(sample: Sample, view: View, run_dir: Path, width: int) -> list[str]:
    """The table and, below it, why a row is not `ok`. ASCII apart from names."""
    if not sample.cards:
        return [none_text(run_dir)]
    table: list[Line] = build(sample, view, width)
    reasons = [
        f"{row.instance} rank {row.rank} on {card.uuid}: {state.word}: {state.why}"
        for card in sample.cards
        for row, state in chosen(card, view, sample.now_ns)
        if state.why
    ]
    return [line.text.rstrip() for line in table] + ([""] if reasons else []) + reasons


def to_json(sample: Sample, view: View, run_dir: Path) -> dict[str, Any]:
    return {"time_s": time.time(), "run_dir": str(run_dir), "cards": [_card_json(card, view, sample.now_ns) for card in sample.cards]}


def _card_json(card: CardSample, view: View, now_ns: int) -> dict[str, Any]:
    values = {name: getattr(card, name) for name in _CARD_FIELDS}
    return {**values, "pools": [_row_json(row, state_of(row, card, now_ns, {}), now_ns) for row, _ in chosen(card, view, now_ns)]}


def _row_json(row: RankRow, state: State, now_ns: int) -> dict[str, Any]:
    sizes = {f"{column.name}_bytes": column.value(row, now_ns) for column in COLUMNS}
    limit_bytes = None if row.record.limit_bytes >= NO_LIMIT_BYTES else row.record.limit_bytes
    return {
        "instance": row.instance,
        "name": row.name,
        "rank": row.rank,
        "pid": row.record.pid,
        "state": state.word,
        "why": state.why,
        "lease_bytes": row.record.lease_bytes,
        "other_bytes": row.other_bytes,
        "weight": row.record.weight,
        **sizes,
        "limit_bytes": limit_bytes,
    }
