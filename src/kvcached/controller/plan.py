# SPDX-License-Identifier: Apache-2.0
"""What each card will hold, before anything is started; and what cannot fit. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.controller.config import Model, ServeConfig


@dataclass(frozen=True, slots=True)
class Row:
    """One model on its card, all replicas together, in bytes. `limit_bytes`: None where the card is the limit."""

    model: str
    weights_bytes: int
    floor_bytes: int
    limit_bytes: int | None
    stays: bool
    """awake for ever once it was asked for: pinned, or unable to sleep"""

    @property
    def least_bytes(self) -> int:
        return self.weights_bytes + self.floor_bytes


@dataclass(frozen=True, slots=True)
class CardPlan:
    """`size_bytes`: 0 where the file does not say it. `awake_bytes`: least that is taken when all are awake that can be together."""

    card: str
    size_bytes: int
    rows: tuple[Row, ...]
    awake_bytes: int

    @property
    def left_bytes(self) -> int:
        """For KV caches beyond the floors, with all awake. Negative: then some have to sleep."""
        return self.size_bytes - self.awake_bytes

    def problems(self) -> list[str]:
        """What can never be: a model that does not fit beside those that stay."""
        if not self.size_bytes:
            return []
        staying = sum(row.least_bytes for row in self.rows if row.stays)
        found = []
        for row in self.rows:
            needed = row.least_bytes + staying - (row.least_bytes if row.stays else 0)
            if needed > self.size_bytes:
                found.append(
                    f"models.{row.model}: with what stays awake it needs {needed} bytes of {self.card}, which has {self.size_bytes}"
                )
            if row.limit_bytes is not None and row.limit_bytes < row.floor_bytes:
                found.append(f"models.{row.model}.limit: {row.limit_bytes} bytes are below its floor, {row.floor_bytes}")
        return found


def plan_of(config: ServeConfig) -> list[CardPlan]:
    """One for each card that is named; models that name none are on `(any)`."""
    cards = {model.card or "(any)" for model in config.models.values() if model.engine != "remote"} | set(config.cards)
    return [_card_plan(card, config) for card in sorted(cards)]


def _card_plan(card: str, config: ServeConfig) -> CardPlan:
    size_bytes = config.cards.get(card, 0)
    local = {name: model for name, model in config.models.items() if model.engine != "remote" and (model.card or "(any)") == card}
    rows = tuple(_row(name, model, size_bytes) for name, model in local.items())
    return CardPlan(card, size_bytes, rows, _most_together(rows, list(local.values())))


def _row(name: str, model: Model, size_bytes: int) -> Row:
    floor_bytes = model.floor.of(size_bytes) * model.replicas if model.floor is not None else 0
    limit_bytes = model.limit.of(size_bytes) * model.replicas if model.limit is not None else None
    return Row(name, model.weights * model.replicas, floor_bytes, limit_bytes, model.pin or model.sleeps == "never")


def _most_together(rows: Sequence[Row], models: Sequence[Model]) -> int:
    """Of a group the largest counts."""
    groups: dict[str, int] = {}
    alone = 0
    for row, model in zip(rows, models, strict=True):
        if model.group is None:
            alone += row.least_bytes
        else:
            groups[model.group] = max(groups.get(model.group, 0), row.least_bytes)
    return alone + sum(groups.values())
