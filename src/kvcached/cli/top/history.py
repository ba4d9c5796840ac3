# SPDX-License-Identifier: Apache-2.0
"""What was seen in the last minute or so, bounded, and how it is drawn. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvcached.cli.top.sampler import CardSample, PoolKey, RankRow, Sample

CardKey = tuple[str]
LIVE_SAMPLES: Final = 600
MOST_SERIES: Final = 512
_BARS: Final = " ▁▂▃▄▅▆▇█"


class Point(NamedTuple):
    mapped_bytes: int
    owned_bytes: int
    cached_bytes: int
    limit_bytes: int


class History:
    """A ring of `samples` points for each pool's rank, keyed by `PoolKey`, and for each card, keyed by `(uuid,)`.

    A series that has not been seen for `samples` samples is dropped, and never more than `most_series` are kept.
    """

    def __init__(self, samples: int = LIVE_SAMPLES, most_series: int = MOST_SERIES) -> None:
        self._samples = samples
        self._most_series = most_series
        self._series: dict[PoolKey | CardKey, deque[Point]] = {}
        self._seen: dict[PoolKey | CardKey, int] = {}
        self.count = 0

    def __len__(self) -> int:
        return len(self._series)

    def add(self, sample: Sample) -> None:
        self.count += 1
        for card in sample.cards:
            self._add((card.uuid,), _card_point(card))
            for row in card.rows:
                self._add(row.key, _row_point(row, card.budget_bytes))
        if self.count % self._samples == 0 or len(self._series) > self._most_series:
            self._prune()

    def points(self, key: PoolKey | CardKey) -> Sequence[Point]:
        """Oldest first; a series that is not known is empty."""
        return self._series.get(key, ())

    def _add(self, key: PoolKey | CardKey, point: Point) -> None:
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = deque(maxlen=self._samples)
        series.append(point)
        self._seen[key] = self.count

    def _prune(self) -> None:
        newest_first = sorted(self._series, key=lambda key: -self._seen[key])
        for place, key in enumerate(newest_first):
            if place >= self._most_series or self.count - self._seen[key] >= self._samples:
                del self._series[key], self._seen[key]


def _card_point(card: CardSample) -> Point:
    return Point(card.mapped_bytes, card.owned_bytes, card.cached_bytes, card.budget_bytes)


def _row_point(row: RankRow, budget_bytes: int) -> Point:
    """A limit above the budget bounds nothing."""
    record = row.record
    if not row.alive:
        return Point(0, 0, 0, min(record.limit_bytes, budget_bytes))
    return Point(record.mapped_bytes, record.owned_bytes, record.cached_bytes, min(record.limit_bytes, budget_bytes))


def columns(values: Sequence[int], count: int, width: int, per_column: int) -> list[int]:
    """The last `width` columns of `per_column` samples each, a column as high as its highest sample, so that no peak is lost.

    `count` is the number of the newest sample: columns begin at its multiples, so a picture moves but never flickers.
    """
    newest = count // per_column
    heights: dict[int, int] = {}
    for back, value in enumerate(reversed(values)):
        column = (count - back) // per_column
        if newest - column >= width:
            break
        heights[column] = max(heights.get(column, 0), value)
    oldest = min(heights, default=newest)
    return [heights.get(column, 0) for column in range(oldest, newest + 1)]


def plot(heights: Iterable[int], top: int, lines: int) -> list[str]:
    """Bars in eighths of a line, `lines` high where a height is `top`; anything above zero shows."""
    eighths = [min(8 * lines, max(1, round(8 * lines * height / top))) if height > 0 and top > 0 else 0 for height in heights]
    return ["".join(_BARS[min(8, max(0, bar - 8 * line))] for bar in eighths) for line in reversed(range(lines))]
