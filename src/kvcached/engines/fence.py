# SPDX-License-Identifier: Apache-2.0
"""Fences on streams of torch: an unmap waits for what was queued before it, without a device synchronise."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from kvcached.runtime.fence import NothingInFlight

if TYPE_CHECKING:
    from kvcached.runtime.fence import FenceFactory

_POLL_S: Final = 0.0005


class StreamFence:
    """Passed when all that was queued on `streams` at its making has finished."""

    def __init__(self, device: torch.device, streams: tuple[torch.cuda.Stream, ...]) -> None:
        self._events = []
        with torch.cuda.device(device):
            for stream in streams:
                event = torch.cuda.Event()
                event.record(stream)
                self._events.append(event)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not all(event.query() for event in self._events):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True


def fences_of(device: torch.device) -> FenceFactory:
    """Call it on the worker's own thread: its current stream is the one that steps run on. A CPU worker runs steps synchronously."""
    if device.type != "cuda":
        return NothingInFlight
    streams = {torch.cuda.default_stream(device), torch.cuda.current_stream(device)}
    return lambda: StreamFence(device, tuple(streams))
