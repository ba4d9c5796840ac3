# SPDX-License-Identifier: Apache-2.0
"""One thread that waits for sockets and deadlines on behalf of a group of ranks."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.ranks.link import Link


class Loop:
    """Calls `on_ready(link)` when a link can be read, or written if that was asked for; and what `after` was given, when it is due.

    All calls are made by the one thread that `start` starts. Every method is safe to use from any thread.
    """

    def __init__(self, on_ready: Callable[[Link], None]) -> None:
        self._on_ready = on_ready
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asleep_until = -math.inf
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvcached-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, link: Link) -> None:
        self._selector.register(link, selectors.EVENT_READ, link)

    def watch_writing(self, link: Link, wanted: bool) -> None:
        """Takes effect at once, also while the thread waits."""
        self._selector.modify(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0), link)

    def forget(self, link: Link) -> None:
        self._selector.unregister(link)

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it then. The thread is woken only when nothing else would wake it in time."""
        when = time.monotonic() + delay_s
        with self._lock:
            heapq.heappush(self._timers, (when, next(self._order), call))
            must_wake = when < self._asleep_until
        if must_wake and not self._stopping:
            self._wake()

    def stop(self, timeout_s: float) -> None:
        """From any thread, also from a call that the loop makes."""
        self._stopping = True
        self._wake()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._close()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # many wake-ups wait already
            self._wake_write.send(b"x")

    def _close(self) -> None:
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(self._pause_s()):
                if key.data is None:
                    self._wake_read.recv(4096)
                elif not self._stopping:
                    self._on_ready(key.data)
            for call in self._due():
                call()

    def _pause_s(self) -> float | None:
        with self._lock:
            self._asleep_until = self._timers[0][0] if self._timers else math.inf
        return None if self._asleep_until == math.inf else max(0.0, self._asleep_until - time.monotonic())

    def _due(self) -> list[Callable[[], None]]:
        due = []
        with self._lock:
            self._asleep_until = -math.inf
            while self._timers and self._timers[0][0] <= time.monotonic():
                due.append(heapq.heappop(self._timers)[2])
        return due
