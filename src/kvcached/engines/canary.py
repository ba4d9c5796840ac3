# SPDX-License-Identifier: Apache-2.0
"""The canary's way to the memory of an engine's worker: torch's own copies on the stream that steps run on, the system's on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcached.runtime.canary import HostBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.core.canary import Bytes

_AT_ONCE = 4096  # the places are numbers of 8 bytes for each byte, in memory that nobody has leased


class TorchBytes:
    """`whole`: a tensor of int8 over the arena's range. Copies wait for what is queued on the current stream. Reading what is not mapped is
    a fault of the device, whose address the driver tells."""

    sees_holes = False

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def read(self, offsets: Sequence[int], size_bytes: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        for first in range(0, len(offsets), _AT_ONCE):
            rows = self._whole[self._places(offsets[first : first + _AT_ONCE], size_bytes)].cpu()
            found += [row.numpy().tobytes() for row in rows]
        return found

    def write(self, offsets: Sequence[int], pieces: Sequence[bytes]) -> list[int]:
        for first in range(0, len(offsets), _AT_ONCE):
            some = pieces[first : first + _AT_ONCE]
            data = torch.frombuffer(bytearray(b"".join(some)), dtype=torch.int8).view(len(some), -1)
            self._whole[self._places(offsets[first : first + _AT_ONCE], len(some[0]))] = data.to(self._whole.device)
        return []

    def _places(self, offsets: Sequence[int], size_bytes: int) -> torch.Tensor:
        rows = torch.tensor(offsets, dtype=torch.int64).unsqueeze(1) + torch.arange(size_bytes, dtype=torch.int64)
        return rows.to(self._whole.device)


def bytes_of(whole: torch.Tensor) -> Bytes:
    """The memory behind a tensor over an arena's range."""
    return HostBytes(whole.data_ptr()) if whole.device.type == "cpu" else TorchBytes(whole)
