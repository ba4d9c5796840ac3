# SPDX-License-Identifier: Apache-2.0
"""How large the card is, and who asks what when. Pure arithmetic and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BUDGET_FACTOR = 1.3
"""The card holds this many engines of full size; two static ones would need 2."""
GRANULARITY_BYTES = 2 << 20

SYSTEM = "You are a friendly assistant. Give a clear and correct answer in a few sentences."


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token costs in the KV cache of a model."""

    layers: int
    kv_heads: int
    head_size: int
    element_bytes: int

    @classmethod
    def from_config(cls, config: dict[str, Any], element_bytes: int) -> KvShape:
        """From the model's `config.json`."""
        heads = int(config["num_attention_heads"])
        head_size = config.get("head_dim") or int(config["hidden_size"]) // heads
        return cls(int(config["num_hidden_layers"]), int(config.get("num_key_value_heads") or heads), int(head_size), element_bytes)

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_size * self.element_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """The card of the demo. `static_bytes`: what one engine must reserve to serve `requests` of `request_tokens` tokens at once."""

    requests: int
    request_tokens: int
    block_tokens: int
    token_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def blocks_per_request(self) -> int:
        return -(-self.request_tokens // self.block_tokens)

    @property
    def static_bytes(self) -> int:
        return self.requests * self.blocks_per_request * self.block_bytes

    @property
    def budget_bytes(self) -> int:
        """Rounded down to what a host card can map: 2 MiB."""
        return int(self.static_bytes * BUDGET_FACTOR) // GRANULARITY_BYTES * GRANULARITY_BYTES


class Relay:
    """Who is to start the next burst. Bursts alternate; the next begins when a part of the last has been answered.

    Events in: `answered`. Effects out: `due`, the number of the burst to start now, or None.
    """

    def __init__(self, bursts: int, size: int, handover_fraction: float = 0.5) -> None:
        self._bursts = bursts
        self._handover = max(1, int(size * handover_fraction))
        self._started = 0
        self._answered: dict[int, int] = {}

    @property
    def started(self) -> int:
        return self._started

    def due(self) -> int | None:
        """Start this burst now; counted as started from here on."""
        last = self._started - 1
        if self._started >= self._bursts or (last >= 0 and self._answered.get(last, 0) < self._handover):
            return None
        self._started += 1
        return self._started - 1

    def answered(self, burst: int) -> None:
        self._answered[burst] = self._answered.get(burst, 0) + 1

    def stop(self) -> None:
        """Let no further burst start."""
        self._bursts = self._started


def burst_prompts(prompts: tuple[str, ...], burst_of_engine: int, size: int) -> list[str]:
    """The prompts of one engine's n-th burst: the list from where the last burst ended, over and over."""
    first = burst_of_engine * size
    return [prompts[(first + index) % len(prompts)] for index in range(size)]
