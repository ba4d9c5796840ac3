# SPDX-License-Identifier: Apache-2.0
"""What `list` and `watch` show."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvcached.card.segment import card_paths
from kvcached.cli.machine import CardRow, PoolRow, read_cards
from kvcached.cli.output import say, say_json, short_size, table
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_COLUMNS = ("POOL", "LEASE", "OWNED", "CACHED", "PARKED", "RETIRED", "OTHER", "LIMIT", "FLOOR")


def cards_json(run_dir: Path, cards: Sequence[CardRow]) -> dict[str, Any]:
    return {"run_dir": str(run_dir), "cards": [card.to_json() for card in cards]}


def look_json(run_dir: Path) -> dict[str, Any]:
    """One look of `watch`. `time_s`: seconds since 1970."""
    return {"time_s": time.time(), **cards_json(run_dir, read_cards(run_dir))}


def cards_view(run_dir: Path, cards: Sequence[CardRow]) -> RenderableType:
    if not any(card.pools or card.problem for card in cards):
        return none_text(run_dir)
    parts: list[RenderableType] = []
    for card in cards:
        parts += [*([Text()] if parts else []), *_card_parts(card)]
    return Group(*parts)


def none_text(run_dir: Path) -> str:
    """There is nothing to show: where it was looked for, and where else it may be (another user's engines, for instance)."""
    others = [other for other in sorted(run_dir.parent.glob("kvcached-*")) if other != run_dir and any(card_paths(other))]
    hint = "".join(f"; there are cards in {other}: kvctl --run-dir {other} list" for other in others)
    return f"no pools on this machine; run directory {run_dir}{hint}"


def _card_parts(card: CardRow) -> list[RenderableType]:
    if card.problem:
        return [Text(f"card {card.uuid}: cannot be read: {card.problem}")]
    trouble = f", over by {format_size(card.over_bytes)}" if card.over_bytes else ""
    trouble += f", floors short by {format_size(card.short_bytes)}" if card.short_bytes else ""
    sizes = (
        f"budget {format_size(card.budget_bytes)}, leased {format_size(card.leased_bytes)}, free {format_size(card.free_bytes)}{trouble}"
    )
    return [Text(f"card {card.uuid} {card.name}"), Text(sizes), table(_COLUMNS, [_cells(pool) for pool in card.pools])]


def _cells(pool: PoolRow) -> tuple[str, ...]:
    label = pool.instance if pool.state == "live" else f"{pool.instance} ({pool.state})"
    sizes = (
        pool.lease_bytes,
        pool.owned_bytes,
        pool.cached_bytes,
        pool.parked_bytes,
        pool.retired_bytes,
        pool.other_bytes,
        pool.limit_bytes,
        pool.floor_bytes,
    )
    return (label, *(short_size(size) for size in sizes))


def watch(run_dir: Path, *, interval_s: float, count: int, as_json: bool) -> None:
    """Look every `interval_s`, `count` times (0: until interrupted)."""
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            _repeat(lambda: say_json(look_json(run_dir)), interval_s, count)
        elif Console().is_terminal:
            with Live(auto_refresh=False) as screen:
                _repeat(lambda: screen.update(cards_view(run_dir, read_cards(run_dir)), refresh=True), interval_s, count)
        else:
            _repeat(lambda: _say_lines(run_dir), interval_s, count)


def _repeat(look: Callable[[], object], interval_s: float, count: int) -> None:
    done = 0
    while True:
        look()
        done += 1
        if done == count:
            return
        time.sleep(interval_s)


def _say_lines(run_dir: Path) -> None:
    now = time.strftime("%H:%M:%S")
    pools = [pool for card in read_cards(run_dir) for pool in card.pools]
    for pool in pools:
        label, *sizes = _cells(pool)
        say(f"{now} {label} " + " ".join(f"{column.lower()}={size}" for column, size in zip(_COLUMNS[1:], sizes, strict=True)))
    if not pools:
        say(f"{now} {none_text(run_dir)}")
