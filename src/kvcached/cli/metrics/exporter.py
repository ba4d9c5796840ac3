# SPDX-License-Identifier: Apache-2.0
"""The exporter: at each scrape the records are read, the pools are asked, and the numbers become Prometheus' text."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from kvcached.cli.metrics.catalog import BUILD, SCRAPE, Kind, Metric
from kvcached.cli.metrics.inquiry import Inquiry
from kvcached.cli.metrics.readings import Reading, Readings, endpoints_of, read
from kvcached.cli.serving import endings_blocked, wait_for_the_end
from kvcached.cli.top.sampler import Sampler
from kvcached.config import package_version
from kvcached.core.tally import BOUNDS_S, cumulative

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from prometheus_client import Metric as Family

_BOUNDS: Final = (*map(str, BOUNDS_S), "+Inf")


class Exporter(Collector):
    """All pools whose records are in `run_dir`; a pool has `timeout_s` to answer. Scrapes may overlap. Close it at the end."""

    def __init__(self, run_dir: Path, timeout_s: float) -> None:
        self._sampler = Sampler(run_dir)
        self._sampling = threading.Lock()
        self._inquiry = Inquiry(timeout_s)

    def collect(self) -> Iterable[Family]:
        return families(self._look())

    def describe(self) -> Iterable[Family]:
        """The names alone, so that registering it asks nobody."""
        return families(Readings())

    def text(self) -> str:
        return generate_latest(self.registry()).decode()

    def registry(self) -> CollectorRegistry:
        """One that holds this exporter and nothing else."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def _look(self) -> Readings:
        begun_s = time.monotonic()
        with self._sampling:
            sample = self._sampler.sample()
        readings = read(sample, self._inquiry.ask(endpoints_of(sample)))
        readings.add(BUILD, 1, package_version())
        readings.add(SCRAPE, time.monotonic() - begun_s)
        return readings

    def close(self) -> None:
        self._inquiry.close()


def families(readings: Readings) -> list[Family]:
    """As prometheus-client knows them, in the catalog's order."""
    return [_family(metric, values) for metric, values in readings.by_metric.items()]


def _family(metric: Metric, values: list[Reading]) -> Family:
    if metric.kind is Kind.HISTOGRAM:
        return _histogram(metric, values)
    family = (CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily)(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values:
        assert not isinstance(value, tuple)
        family.add_metric(labels, float(value))
    return family


def _histogram(metric: Metric, values: list[Reading]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values:
        assert isinstance(value, tuple)
        sum_s, totals = cumulative(value)
        family.add_metric(labels, list(zip(_BOUNDS, map(float, totals), strict=True)), sum_s)
    return family


def print_once(run_dir: Path, timeout_s: float) -> None:
    with contextlib.closing(Exporter(run_dir, timeout_s)) as exporter:
        sys.stdout.write(exporter.text())


def serve(run_dir: Path, host: str, port: int, timeout_s: float, started: Callable[[str], None]) -> None:
    """Answer scrapes until SIGINT or SIGTERM. `started` gets the address, which port 0 leaves to the system. Raises `OSError`."""
    with endings_blocked(), contextlib.closing(Exporter(run_dir, timeout_s)) as exporter:
        server, thread = start_http_server(port, host, exporter.registry())
        try:
            at = f"[{host}]" if ":" in host else host
            started(f"http://{at}:{server.server_port}/metrics")
            wait_for_the_end()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
