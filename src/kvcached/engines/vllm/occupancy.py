# SPDX-License-Identifier: Apache-2.0
"""Memory must not go while a step of the engine runs over it, whoever wants it gone."""

from __future__ import annotations

import threading

from kvcached.errors import PeerLost


class Occupancy:
    """`with occupancy:` around every step. After `close` no step begins, and memory may go once it has returned True."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._closed_because = ""

    def __enter__(self) -> None:
        """Raises `PeerLost` with the reason when the memory is to go or has gone."""
        with self._changed:
            if self._closed_because:
                raise PeerLost(self._closed_because)
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def close(self, reason: str, timeout_s: float) -> bool:
        """Let no step begin any more, and wait until none runs. False when one still does after `timeout_s`."""
        with self._changed:
            self._closed_because = reason
            return self._changed.wait_for(lambda: not self._running, timeout_s)
