# SPDX-License-Identifier: Apache-2.0
"""How long leases and calls of the device take, in the process of a mapper."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from kvcached.core.tally import Histogram
from kvcached.ranks.api import MapperTally

if TYPE_CHECKING:
    from collections.abc import Iterator


class DeviceTimes:
    """Safe to use from any thread: the engine's and the reading thread may map at the same time."""

    def __init__(self) -> None:
        self.lease = Histogram()
        self.map = Histogram()
        self.unmap = Histogram()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def measured(self, histogram: Histogram) -> Iterator[None]:
        """Count what is done within, also where it fails."""
        begun_ns = time.monotonic_ns()
        try:
            yield
        finally:
            spent_ns = time.monotonic_ns() - begun_ns
            with self._lock:
                histogram.observe(spent_ns)

    def tally(self) -> MapperTally:
        return MapperTally(lease=self.lease.numbers(), map=self.map.numbers(), unmap=self.unmap.numbers())
