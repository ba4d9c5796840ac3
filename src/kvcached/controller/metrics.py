# SPDX-License-Identifier: Apache-2.0
"""What Prometheus reads: counts since the gateway started, and how things are now. Nothing is kept for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvcached.controller.states import State
from kvcached.controller.traffic import at_most

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator

    from kvcached.controller.owner import Owner

_PREFIX: Final = "kvcached_gateway_"
_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def exposition(owner: Owner) -> tuple[bytes, str]:
    """The text, and its content type."""
    registry = CollectorRegistry()
    registry.register(_Look(owner))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Look(Collector):
    """One look at everything."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def collect(self) -> Iterable[Metric]:
        yield from self._states()
        yield from self._requests()
        yield from self._durations()
        yield from self._servers()

    def _states(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(_PREFIX + "model_state", "1 for the state that the model is in", labels=("model", "state"))
        open_now = GaugeMetricFamily(_PREFIX + "open_requests", "Requests that are let in and have not ended", labels=("model",))
        waiting = GaugeMetricFamily(_PREFIX + "waiting_requests", "Requests that wait for the model", labels=("model",))
        idle = GaugeMetricFamily(_PREFIX + "idle_seconds", "Since the last request ended", labels=("model",))
        for name, model in self._owner.fleet.models.items():
            for state in State:
                states.add_metric((name, state.value), float(model.state is state))
            open_now.add_metric((name,), len(model.open))
            waiting.add_metric((name,), len(model.waiting))
            idle.add_metric((name,), self._owner.traffic[name].idle_s(self._owner.now_s))
        yield from (states, open_now, waiting, idle)

    def _requests(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(_PREFIX + "requests", "Requests that have ended", labels=("model", "outcome"))
        tokens = CounterMetricFamily(_PREFIX + "tokens", "Tokens of answers, as the servers count them", labels=("model", "direction"))
        operations = CounterMetricFamily(_PREFIX + "operations", "Starts, wake-ups, sleeps and ends", labels=("model", "what", "outcome"))
        for name, traffic in self._owner.traffic.items():
            total = traffic.total
            for outcome, count in (("ok", total.finished - total.errors), ("error", total.errors), ("refused", total.refused)):
                requests.add_metric((name, outcome), count)
            for direction, count in (("in", total.tokens_in), ("out", total.tokens_out)):
                tokens.add_metric((name, direction), count)
        for (name, what, ok), count in self._owner.operations.items():
            operations.add_metric((name, what, "ok" if ok else "failed"), count)
        yield from (requests, tokens, operations)

    def _durations(self) -> Iterator[Metric]:
        latency = HistogramMetricFamily(_PREFIX + "latency_seconds", "From the request to the last byte", labels=("model",))
        ttft = HistogramMetricFamily(_PREFIX + "ttft_seconds", "From the request to the first byte", labels=("model",))
        for name, traffic in self._owner.traffic.items():
            latency.add_metric((name,), _buckets(traffic.total.latency), traffic.total.latency_sum_s)
            ttft.add_metric((name,), _buckets(traffic.total.ttft), traffic.total.ttft_sum_s)
        yield from (latency, ttft)

    def _servers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(_PREFIX + "server_up", "1 for a server that gets requests", labels=("model", "server"))
        work = GaugeMetricFamily(_PREFIX + "server_open_requests", "Requests that the server works on", labels=("model", "server"))
        for name, backend in self._owner.backends.items():
            for number, replica in enumerate(backend.replicas):
                up.add_metric((name, str(number)), float(replica.up))
                work.add_metric((name, str(number)), len(replica.open))
        yield from (up, work)


def _buckets(bins: Counter[int]) -> list[tuple[str, float]]:
    """Upper bounds and how many durations are below each; a duration near a bound may be counted a tenth too early."""
    return [*((str(bound), float(at_most(bins, bound))) for bound in _BOUNDS_S), ("+Inf", float(sum(bins.values())))]
