# SPDX-License-Identifier: Apache-2.0
"""The canary's way to the memory of an engine's worker: torch's own copies on the stream that steps run on, the system's on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcached.runtime.canary import HostBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.core.canary import Bytes


class TorchBytes:
    """`whole`: a tensor of int8 over the arena's range. Copies wait for what is queued on the current stream. Reading what is not mapped is
    a fault of the device, whose address the driver tells."""

    sees_holes = False

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def read(self, offsets: Sequence[int], size_bytes: int) -> list[bytes | None]:
        if not offsets:
            return []
        rows = self._whole[self._places(offsets, size_bytes)].cpu()
        return [row.numpy().tobytes() for row in rows]

    def write(self, offsets: Sequence[int], pieces: Sequence[bytes]) -> list[int]:
        if offsets:
            data = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.int8).view(len(pieces), -1)
            self._whole[self._places(offsets, len(pieces[0]))] = data.to(self._whole.device)
        return []

    def _places(self, offsets: Sequence[int], size_bytes: int) -> torch.Tensor:
        rows = torch.tensor(offsets, dtype=torch.int64).unsqueeze(1) + torch.arange(size_bytes, dtype=torch.int64)
        return rows.to(self._whole.device)


def bytes_of(whole: torch.Tensor) -> Bytes:
    """The memory behind a tensor over an arena's range."""
    return HostBytes(whole.data_ptr()) if whole.device.type == "cpu" else TorchBytes(whole)
