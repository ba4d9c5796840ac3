# SPDX-License-Identifier: Apache-2.0
"""What the cards' records and the pools' answers say, as values of the catalog's metrics. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcached.card.record import Kind
from kvcached.cli.metrics.catalog import (
    ANSWERS,
    CARD_GAUGES,
    CARD_INFO,
    CARD_READABLE,
    EVICTED,
    LIMIT,
    METRICS,
    OTHER,
    POOL_INFO,
    POOL_KNOWN,
    POOL_UP,
    RECORD_GAUGES,
    RUN_DIR_READABLE,
    TIMES,
    TOLD,
    WAITS,
    WANTED,
    Metric,
)
from kvcached.core.limits import NO_LIMIT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvcached.cli.top.sampler import CardSample, RankRow, Sample
    from kvcached.core.tally import Numbers
    from kvcached.runtime.control import PoolMetrics

Reading = tuple[tuple[str, ...], "float | Numbers"]
"""Values of the labels, and the number, or a histogram's numbers."""


class Readings:
    """Each metric of the catalog with its values."""

    def __init__(self) -> None:
        self.by_metric: dict[Metric, list[Reading]] = {metric: [] for metric in METRICS}

    def add(self, metric: Metric, value: float | Numbers, *labels: str) -> None:
        self.by_metric[metric].append((labels, value))


def endpoints_of(sample: Sample) -> dict[str, Path]:
    """Where the living pools listen, by name. One owner answers for all its ranks."""
    rows = [row for card in sample.cards for row in card.rows if row.alive]
    return {row.instance: row.endpoint for row in rows if row.endpoint is not None}


def read(sample: Sample, answers: Mapping[str, PoolMetrics]) -> Readings:
    """`answers` by the pool's name. What a pool has not told has no value, so that nobody takes it for 0."""
    readings = Readings()
    readings.add(RUN_DIR_READABLE, not sample.problem)
    for card in sample.cards:
        _read_card(readings, card)
        for row in card.rows:
            _read_row(readings, row, sample.now_ns)
    for pool in sorted({row.instance for card in sample.cards for row in card.rows if row.endpoint is not None}):
        readings.add(ANSWERS, pool in answers, pool)
        if pool in answers:
            _read_answer(readings, pool, answers[pool])
    return readings


def _read_card(readings: Readings, card: CardSample) -> None:
    readings.add(CARD_READABLE, not card.problem, card.uuid)
    if not card.problem:
        readings.add(CARD_INFO, 1, card.uuid, card.name)
        for field, metric in CARD_GAUGES.items():
            readings.add(metric, getattr(card, field), card.uuid)


def _read_row(readings: Readings, row: RankRow, now_ns: int) -> None:
    """Of the dead only that they are: what their entries still say is free already."""
    labels = (row.key[0], row.instance, str(row.rank))
    record = row.record
    readings.add(POOL_UP, row.alive, *labels)
    readings.add(POOL_KNOWN, row.known_version and record.kind != Kind.UNREADABLE, *labels)
    readings.add(POOL_INFO, 1, *labels, row.name, str(record.pid))
    if not row.alive:
        return
    readings.add(OTHER, row.other_bytes + (0 if row.has_kv else record.lease_bytes), *labels)
    if row.has_kv:
        for field, metric in RECORD_GAUGES.items():
            readings.add(metric, getattr(record, field), *labels)
        readings.add(LIMIT, math.inf if record.limit_bytes >= NO_LIMIT_BYTES else record.limit_bytes, *labels)
        readings.add(WANTED, record.waiting_bytes(now_ns), *labels)


def _read_answer(readings: Readings, pool: str, answer: PoolMetrics) -> None:
    for field, metric in TOLD.items():
        readings.add(metric, getattr(answer, field), pool)
    for reason, blocks in answer.evicted_blocks.items():
        readings.add(EVICTED, blocks, pool, reason)
    readings.add(WAITS, answer.waits, pool)
    for rank, times in enumerate(answer.ranks):
        for field, metric in TIMES.items():
            readings.add(metric, getattr(times, field), pool, str(rank))
