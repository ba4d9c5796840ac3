# SPDX-License-Identifier: Apache-2.0
"""A stream whose work runs late, for tests on host memory.

A GPU runs a kernel after the scheduler has moved on; an engine on the CPU does not, so a page unmapped under work in flight would
go unnoticed there. Here reads are queued and done when the test says so. A read of a page that was unmapped in between raises
`ReadAfterUnmap` instead of ending the process.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from dataclasses import dataclass
from typing import Final

_CHUNK_BYTES: Final = 4096
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_libc.write.restype = ctypes.c_ssize_t


class ReadAfterUnmap(AssertionError):
    """Work in flight read memory that is not mapped any more. On a GPU this ends the engine's context."""

    def __init__(self, address: int, marker: int) -> None:
        super().__init__(f"work of marker {marker} read {address:#x}, which is not mapped")
        self.address = address
        self.marker = marker


@dataclass(frozen=True, slots=True)
class _Read:
    marker: int
    address: int
    size_bytes: int
    expected: bytes | None


class LateReads:
    """Reads of host memory, queued with the marker of their step and run in order, later."""

    def __init__(self) -> None:
        self._queue: deque[_Read] = deque()
        self._submitted_marker = 0
        self._completed_marker = 0

    @property
    def completed_marker(self) -> int:
        """All work of this marker and of earlier ones has finished: what a fence waits for."""
        return self._completed_marker

    @property
    def pending(self) -> int:
        return len(self._queue)

    def submit(self, marker: int, address: int, size_bytes: int, expected: bytes | None = None) -> None:
        """Queue a read of `size_bytes` bytes. Markers never fall. With `expected`, other bytes are an `AssertionError`."""
        if marker < self._submitted_marker:
            raise ValueError(f"marker {marker} after {self._submitted_marker}")
        self._submitted_marker = marker
        self._queue.append(_Read(marker, address, size_bytes, expected))

    def run(self, through_marker: int | None = None) -> None:
        """Do the queued reads of markers up to `through_marker` (all, when None), oldest first."""
        while self._queue and (through_marker is None or self._queue[0].marker <= through_marker):
            read = self._queue.popleft()
            found = read_memory(read.address, read.size_bytes)
            if found is None:
                raise ReadAfterUnmap(read.address, read.marker)
            if read.expected is not None and found != read.expected:
                raise AssertionError(f"work of marker {read.marker} read other bytes than expected at {read.address:#x}")
        last = self._submitted_marker if through_marker is None else through_marker
        self._completed_marker = max(self._completed_marker, last)


def read_memory(address: int, size_bytes: int) -> bytes | None:
    """The bytes at `address`, or None where reading them would fault: the kernel reads them for us and says so."""
    source, sink = os.pipe()
    try:
        parts = []
        for offset in range(0, size_bytes, _CHUNK_BYTES):
            step = min(_CHUNK_BYTES, size_bytes - offset)
            if _libc.write(sink, address + offset, step) != step:
                return None
            parts.append(os.read(source, step))
        return b"".join(parts)
    finally:
        os.close(source)
        os.close(sink)
