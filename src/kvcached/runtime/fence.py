# SPDX-License-Identifier: Apache-2.0
"""Fences: what a mapper waits for before it unmaps, so that no work in flight reads a page that is gone."""

from __future__ import annotations

from typing import Protocol


class Fence(Protocol):
    """Everything that was queued on the engine's streams when the fence was made."""

    def wait(self, timeout_s: float) -> bool:
        """Wait without a device synchronise; False when the work has not finished within `timeout_s`."""


class FenceFactory(Protocol):
    """Makes a fence now. The engine's adapter names every stream that may read KV memory."""

    def __call__(self) -> Fence: ...


class NothingInFlight:
    """The fence of an engine that runs its steps synchronously, as on a CPU: it has always been passed."""

    def wait(self, timeout_s: float) -> bool:
        return True
