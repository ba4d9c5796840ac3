# SPDX-License-Identifier: Apache-2.0
"""What went through each model in the last minute, five minutes and hour, in memory that has a bound. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SLICE_S: Final = 5.0
WINDOWS_S: Final = (60.0, 300.0, 3600.0)
_SLICES: Final = int(WINDOWS_S[-1] / SLICE_S) + 1
_RATIO: Final = 1.1
_FASTEST_S: Final = 0.0001
_BINS: Final = 200


def bin_of(duration_s: float) -> int:
    """Bins grow by a tenth each, from 0.1 ms to hours, so that a quantile is at most a tenth too large."""
    if duration_s <= _FASTEST_S:
        return 0
    return min(_BINS - 1, math.ceil(math.log(duration_s / _FASTEST_S, _RATIO)))


def at_most(bins: Mapping[int, int], duration_s: float) -> int:
    """How many durations were at most so long; one that is in the same bin counts as such."""
    last = bin_of(duration_s)
    return sum(count for number, count in bins.items() if number <= last)


def quantile_s(bins: Mapping[int, int], share: float) -> float | None:
    """The upper bound of the bin where `share` of the durations is reached; None without any."""
    wanted = share * sum(bins.values())
    seen = 0
    for number in sorted(bins):
        seen += bins[number]
        if seen >= wanted:
            return _FASTEST_S * _RATIO**number
    return None


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended. `ttft_s`: to the first byte of the answer; None: none came."""

    ok: bool
    latency_s: float
    ttft_s: float | None = None
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(slots=True)
class _Slice:
    number: int
    requests: int = 0
    finished: int = 0
    errors: int = 0
    refused: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    most_waiting: int = 0
    latency_sum_s: float = 0.0
    ttft_sum_s: float = 0.0
    latency: Counter[int] = field(default_factory=Counter)
    ttft: Counter[int] = field(default_factory=Counter)

    def add(self, other: _Slice) -> None:
        for name in ("requests", "finished", "errors", "refused", "tokens_in", "tokens_out", "latency_sum_s", "ttft_sum_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_waiting = max(self.most_waiting, other.most_waiting)
        self.latency.update(other.latency)
        self.ttft.update(other.ttft)


class Traffic:
    """Of one model. Times are of one monotonic clock; `born_s`: a model never asked for counts as idle since then."""

    def __init__(self, born_s: float) -> None:
        self._active_s = born_s
        self._open = 0
        self._slices: deque[_Slice] = deque(maxlen=_SLICES)
        self.total = _Slice(0)

    def asked(self, now_s: float, waiting: int = 0) -> None:
        """A request came, and found so many that wait."""
        self._open += 1
        self._active_s = now_s
        for part in (self._now(now_s), self.total):
            part.requests += 1
            part.most_waiting = max(part.most_waiting, waiting)

    def finished(self, request: Finished, now_s: float) -> None:
        """Its last byte was sent, or it failed, or its client went away."""
        self._leave(now_s)
        for part in (self._now(now_s), self.total):
            part.finished += 1
            part.errors += not request.ok
            part.tokens_in += request.tokens_in
            part.tokens_out += request.tokens_out
            part.latency[bin_of(request.latency_s)] += 1
            part.latency_sum_s += request.latency_s
            if request.ttft_s is not None:
                part.ttft_sum_s += request.ttft_s
                part.ttft[bin_of(request.ttft_s)] += 1

    def refused(self, now_s: float) -> None:
        """It was not let in."""
        self._leave(now_s)
        for part in (self._now(now_s), self.total):
            part.refused += 1

    def idle_s(self, now_s: float) -> float:
        """0 while a request is there."""
        return 0.0 if self._open else max(0.0, now_s - self._active_s)

    def _leave(self, now_s: float) -> None:
        self._open -= 1
        self._active_s = now_s

    def _now(self, now_s: float) -> _Slice:
        number = int(now_s // SLICE_S)
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def window(self, length_s: float, now_s: float) -> dict[str, Any]:
        """The last `length_s`, to a slice of 5 seconds: counts, rates per second, and durations in seconds (None without any)."""
        oldest = int((now_s - length_s) // SLICE_S)
        total = _Slice(0)
        for part in self._slices:
            if part.number > oldest:
                total.add(part)
        return _as_json(total, length_s)

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Everything of this model, for `/traffic`."""
        windows = {f"{length_s:.0f}s": self.window(length_s, now_s) for length_s in WINDOWS_S}
        return {"open": self._open, "idle_s": round(self.idle_s(now_s), 3), "total": _counts(self.total), "windows": windows}


def _counts(part: _Slice) -> dict[str, int]:
    names = ("requests", "finished", "errors", "refused", "tokens_in", "tokens_out", "most_waiting")
    return {name: getattr(part, name) for name in names}


def _as_json(part: _Slice, length_s: float) -> dict[str, Any]:
    rates = {f"{name}_per_s": round(getattr(part, name) / length_s, 4) for name in ("requests", "tokens_in", "tokens_out")}
    return {**_counts(part), **rates, "latency_s": _quantiles(part.latency), "ttft_s": _quantiles(part.ttft)}


def _quantiles(bins: Mapping[int, int]) -> dict[str, float | None]:
    found = {f"p{share:.0f}": quantile_s(bins, share / 100) for share in (50.0, 95.0, 99.0)}
    return {name: None if value is None else round(value, 5) for name, value in found.items()}


def idle_models(traffic: Iterable[tuple[str, Traffic]], least_s: float, now_s: float) -> list[tuple[str, float]]:
    """Models that were idle for at least so long, the longest first."""
    idle = [(name, one.idle_s(now_s)) for name, one in traffic]
    return sorted(((name, idle_s) for name, idle_s in idle if idle_s >= least_s and idle_s > 0), key=lambda pair: -pair[1])
