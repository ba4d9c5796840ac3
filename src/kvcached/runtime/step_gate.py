# SPDX-License-Identifier: Apache-2.0
"""The gate before an unmap on a rank: opens when the rank's own streams have passed a step."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from kvcached.runtime.fence import NothingInFlight

if TYPE_CHECKING:
    from kvcached.runtime.fence import FenceFactory


class StepGate:
    """`submitted` by the engine's worker, `wait` by whoever unmaps. Safe to use from any thread.

    A fence is made only when somebody waits: it may cover steps beyond the one that is waited for, never fewer, and a step costs
    nothing when nobody does.
    """

    def __init__(self, fence: FenceFactory = NothingInFlight) -> None:
        self._fence = fence
        self._newest = 0
        self._passed = -1
        self._closed = False
        self._changed = threading.Condition()

    def submitted(self, step: int) -> None:
        """All work of this step is queued on the streams that the fence covers. Steps come in order."""
        with self._changed:
            self._newest = max(self._newest, step)
            self._changed.notify_all()

    def wait(self, step: int, timeout_s: float) -> bool:
        """Whether the streams have passed `step` within the timeout; False at once after `close` when it was not submitted."""
        if step <= self._passed:
            return True
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= step or self._closed, timeout_s)
            newest = self._newest
        if newest < step or not self._fence().wait(max(0.0, deadline - time.monotonic())):
            return False
        with self._changed:
            self._passed = max(self._passed, newest)
        return True

    def drain(self, timeout_s: float) -> bool:
        """Whether everything that was submitted has finished within the timeout."""
        return self._fence().wait(timeout_s)

    def close(self) -> None:
        """No more steps will be submitted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
