# SPDX-License-Identifier: Apache-2.0
"""How a pool behaves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Pages and blocks are counts; `max_cached_blocks` < 0 is unlimited.

    `refusal_pause_s`: after a refusal, takes that cached blocks can serve do not ask the card again for so long.
    """

    grow_deadline_s: float = 0.25
    refusal_pause_s: float = 0.05
    large_run_pages: int = 1
    stranded_fraction: float = 0.05
    max_cached_blocks: int = -1
