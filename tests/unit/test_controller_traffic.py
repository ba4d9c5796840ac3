# SPDX-License-Identifier: Apache-2.0
"""Windows of traffic: what they count, what they forget, and that they do not grow."""

from __future__ import annotations

import random

import pytest

from kvcached.controller.traffic import _SLICES, Finished, Traffic, bin_of, idle_models, quantile_s


def one(traffic: Traffic, now_s: float, **facts: float) -> None:
    traffic.asked(now_s)
    given = {"ok": True, "latency_s": 1.0, **facts}
    traffic.finished(Finished(**given), now_s)  # type: ignore[arg-type]


def test_a_window_counts_what_lies_in_it() -> None:
    traffic = Traffic(0.0)
    for now_s in (10.0, 100.0, 130.0, 150.0):
        one(traffic, now_s, tokens_in=3, tokens_out=6)
    minute, hour = traffic.window(60.0, 155.0), traffic.window(3600.0, 155.0)
    assert (minute["requests"], minute["tokens_in"], minute["tokens_out_per_s"]) == (3, 9, 0.3)
    assert (hour["requests"], hour["finished"]) == (4, 4)
    assert traffic.window(60.0, 1000.0)["requests"] == 0
    assert traffic.total.requests == 4


def test_errors_and_refusals_are_counted_apart() -> None:
    traffic = Traffic(0.0)
    one(traffic, 1.0, ok=False)
    traffic.asked(1.0, waiting=7)
    traffic.refused(1.0)
    window = traffic.window(60.0, 2.0)
    assert (window["requests"], window["finished"], window["errors"], window["refused"], window["most_waiting"]) == (2, 1, 1, 1, 7)


def test_quantiles_are_right_to_a_tenth() -> None:
    traffic = Traffic(0.0)
    durations = [random.Random(1).expovariate(1.0) + 0.001 for _ in range(2000)]
    for duration_s in durations:
        one(traffic, 1.0, latency_s=duration_s, ttft_s=duration_s / 2)
    exact = sorted(durations)
    window = traffic.window(60.0, 1.0)
    for share in (50, 95, 99):
        assert window["latency_s"][f"p{share}"] == pytest.approx(exact[int(share * 20) - 1], rel=0.12)
        assert window["ttft_s"][f"p{share}"] == pytest.approx(exact[int(share * 20) - 1] / 2, rel=0.12)
    assert Traffic(0.0).window(60.0, 1.0)["latency_s"] == {"p50": None, "p95": None, "p99": None}


@pytest.mark.parametrize("duration_s", [0.0, 1e-9, 0.0001, 0.02, 1.0, 3600.0])
def test_a_bin_holds_its_duration(duration_s: float) -> None:
    found = quantile_s({bin_of(duration_s): 1}, 0.5)
    assert found is not None
    assert duration_s <= found * 1.0000001
    assert found <= max(0.0001, duration_s * 1.11)


def test_a_model_never_asked_for_is_idle_since_its_start() -> None:
    never, once, busy = Traffic(100.0), Traffic(0.0), Traffic(0.0)
    one(once, 150.0)
    busy.asked(150.0)
    models = {"never": never, "once": once, "busy": busy}.items()
    assert idle_models(models, 0.0, 200.0) == [("never", 100.0), ("once", 50.0)]
    assert idle_models(models, 60.0, 200.0) == [("never", 100.0)]


def test_a_stream_is_activity_until_its_last_byte() -> None:
    traffic = Traffic(0.0)
    traffic.asked(10.0)
    assert traffic.idle_s(1000.0) == 0.0
    traffic.finished(Finished(True, 990.0), 1000.0)
    assert traffic.idle_s(1001.0) == 1.0


def test_its_memory_has_a_bound() -> None:
    traffic = Traffic(0.0)
    chance = random.Random(2)
    for step in range(20_000):
        one(traffic, step * 3.0, latency_s=chance.expovariate(0.1))
    assert len(traffic._slices) == _SLICES
    assert traffic.window(3600.0, 60_000.0)["requests"] == pytest.approx(1200, abs=3)
    assert len(traffic.total.latency) <= 200
