# SPDX-License-Identifier: Apache-2.0
"""The lease of an engine's memory that is not KV (weights, activations, graphs), taken before they are loaded.

How much is given by a setting, or known from this model's last start, or at least the size of its weight files. When the engine is up,
the lease becomes what the process itself has reserved; what anyone else does on the device does not enter into it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from kvcached.card.entry import Entry
    from kvcached.engines.vllm.identity import Identity
    from kvcached.runtime.cards import OpenCard

_WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class WeightsLease:
    """One entry of kind OTHER. On a host card weights lie elsewhere in memory, so there it exists only when a size is set."""

    def __init__(self, card: OpenCard, identity: Identity, model: str, device: torch.device) -> None:
        self._card = card
        self._identity = identity
        self._model = Path(model)
        self._device = device
        self._entry: Entry | None = None

    def take(self) -> None:
        """Lease before anything is loaded. Raises `PoolExhausted` with both numbers when the card has no room within the deadline."""
        size_bytes = self._expected_bytes()
        if size_bytes > 0:
            settings = self._card.settings
            self._entry = self._card.lease_other(self._identity.instance, self._identity.name, size_bytes, settings.ipc_timeout_s)

    def settle(self) -> None:
        """The engine is up: lease what it has, and remember that for its next start."""
        if self._device.type != "cuda":
            return
        size_bytes = torch.cuda.max_memory_reserved(self._device)
        if self._entry is None:
            self._entry = self._card.adopt_other(self._identity.instance, self._identity.name, size_bytes)
        else:
            self._resize(self._entry, size_bytes)
        self._memory_file().write_text(json.dumps({"model": str(self._model), "bytes": size_bytes}))

    def _resize(self, entry: Entry, size_bytes: int) -> None:
        """What is there is there: a lease that is refused now is covered by the measured free memory, which bounds every later grant."""
        missing_bytes = size_bytes - entry.lease_bytes
        if missing_bytes > 0:
            entry.lease(missing_bytes, owned=True)
        elif missing_bytes < 0:
            entry.unlease(-missing_bytes)

    def close(self) -> None:
        if self._entry is not None:
            self._entry.close()
            self._entry = None

    def _expected_bytes(self) -> int:
        settings = self._card.settings
        if settings.other is not None:
            return settings.other.of(self._card.budget_bytes)
        if self._device.type != "cuda":
            return 0
        files = sum(path.stat().st_size for pattern in _WEIGHT_FILES for path in self._model.glob(pattern)) if self._model.is_dir() else 0
        return max(files, self._last_bytes())

    def _last_bytes(self) -> int:
        try:
            return int(json.loads(self._memory_file().read_text())["bytes"])
        except (OSError, ValueError, KeyError):  # no earlier start, or a file that was cut short
            return 0

    def _memory_file(self) -> Path:
        digest = hashlib.sha256(f"{self._model} {self._card.device.info.uuid}".encode()).hexdigest()[:16]
        return self._card.settings.run_dir / f"weights-{digest}.json"
