# SPDX-License-Identifier: Apache-2.0
"""The lower part of the screen: the chosen row in words, and its last minute as bars. Pure."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from kvcached.cli.output import short_size
from kvcached.cli.top.history import Point, columns, plot
from kvcached.cli.top.rows import Line, Span, fit, state_of
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcached.cli.top.rows import State
    from kvcached.cli.top.sampler import CardSample, RankRow, Sample

_LABEL_CELLS = 14
_COLORS = ("blue", "good", "cyan", "warn")


def describe(sample: Sample, card: CardSample | None, row: RankRow | None, verdicts: Mapping[str, State], width: int) -> list[Line]:
    """Who the chosen card or rank is, in one line, and how it is, in at most two."""
    if card is None:
        return []
    if row is None:
        sizes = f"{format_size(card.leased_bytes)} of {format_size(card.budget_bytes)} leased, {format_size(card.other_bytes)} of it not KV"
        return [_line(f"card {card.uuid} {card.name}", width, "bold"), *_folded(card.problem or f"{sizes}; {len(card.rows)} rows", width)]
    state = state_of(row, card, sample.now_ns, verdicts)
    model = f", model {row.name}" if row.name else ""
    why = state.why or f"lease {format_size(row.record.lease_bytes)}, not KV {format_size(row.other_bytes)}, weight {row.record.weight:g}"
    return [
        _line(f"{row.instance} rank {row.rank}{model}, pid {row.record.pid} on {card.uuid}", width, "bold"),
        *_folded(f"{state.word}: {why}", width, state.style if state.why else ""),
    ]


def graph(points: Sequence[Point], count: int, width: int, per_column: int, lines: int, of_card: bool) -> list[Line]:
    """`lines` lines for each of mapped, used, cached and limit, all on one scale: the highest value that is in sight."""
    room = max(1, width - _LABEL_CELLS)
    heights = {name: columns([point[at] for point in points], count, room, per_column) for at, name in enumerate(Point._fields)}
    top = max((max(values, default=0) for values in heights.values()), default=0)
    names = ("mapped", "used", "cached", "budget" if of_card else "limit")
    drawn: list[Line] = []
    for at, (name, values) in enumerate(zip(names, heights.values(), strict=True)):
        now = short_size(points[-1][at]) if points else "-"
        bars = plot(values, top, lines)
        labels: list[Span] = [(" " * _LABEL_CELLS, "")] * (lines - 1) + [(f"{name:<7}{now:>6} ", "")]
        drawn += [Line((label, (f"{bar:>{room}}", _COLORS[at]))) for label, bar in zip(labels, bars, strict=True)]
    return drawn


def _folded(text: str, width: int, style: str = "") -> list[Line]:
    return [_line(part, width, style) for part in textwrap.wrap(text, width, max_lines=2, placeholder=" ...")]


def _line(text: str, width: int, style: str = "") -> Line:
    return Line(((fit(text, width).rstrip(), style),))
