# SPDX-License-Identifier: Apache-2.0
"""Weights and activations of a worker on the card's record, so that pools of other engines leave room for them.

What the last start of the same model needed is leased before loading; after profiling, the lease is what was measured.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcached.units import MIB, format_size

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.card.entry import Entry
    from kvcached.config import Settings
    from kvcached.engines.vllm.identity import Identity
    from kvcached.runtime.cards import OpenCard

_log = logging.getLogger("kvcached.vllm")
_CONTEXT_BYTES: Final = 512 * MIB  # the driver's context, libraries and graphs: not in torch's own count


class OtherMemory:
    """Made before the weights are loaded. Raises `PoolExhausted` when the card has no room for them, with both numbers."""

    def __init__(self, settings: Settings, card: OpenCard, identity: Identity, vllm_config: Any, device: torch.device, rank: int) -> None:
        self._card = card
        self._identity = identity
        self._device = device
        self._rank = rank
        self._memo = settings.run_dir / "other" / _fingerprint(vllm_config, rank)
        given = None if settings.other is None else settings.other.of(card.budget_bytes)
        expected_bytes = _remembered(self._memo) if given is None else given
        self._entry: Entry | None = None
        self._bytes = expected_bytes
        if expected_bytes:
            self._entry = card.lease_other(identity.instance, identity.name, expected_bytes, settings.ipc_timeout_s, rank)

    def settle(self) -> None:
        """Everything but KV memory has been allocated at its peak: count that, and remember it for the next start."""
        measured_bytes = torch.cuda.max_memory_reserved(self._device) + _CONTEXT_BYTES
        if self._entry is None:
            self._entry = self._card.adopt_other(self._identity.instance, self._identity.name, measured_bytes, self._rank)
        else:
            self._resize(self._entry, measured_bytes - self._entry.lease_bytes)
        _log.info("weights and activations: %s (expected %s)", format_size(measured_bytes), format_size(self._bytes))
        self._bytes = measured_bytes
        try:
            self._memo.write_text(str(measured_bytes))
        except OSError as error:
            _log.warning("%s could not be written, so the next start of this model leases late: %s", self._memo, error)

    def _resize(self, entry: Entry, missing_bytes: int) -> None:
        """A refusal changes nothing that counts: the memory is there, so the device's free memory bounds every later grant."""
        if missing_bytes > 0:
            entry.lease(missing_bytes, owned=True)
        elif missing_bytes < 0:
            entry.unlease(-missing_bytes)

    def close(self) -> None:
        if self._entry is not None:
            self._entry.close()
            self._entry = None


def _fingerprint(vllm_config: Any, rank: int) -> str:
    model, scheduler, parallel = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.parallel_config
    text = f"{model.model} {model.dtype} {model.quantization} {scheduler.max_num_batched_tokens} {scheduler.max_num_seqs}"
    if parallel.world_size > 1:  # a stage's weights are its own
        text += f" {parallel.tensor_parallel_size} {parallel.pipeline_parallel_size} {rank}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remembered(memo: Path) -> int:
    try:
        return int(memo.read_text())
    except (OSError, ValueError):
        return 0
