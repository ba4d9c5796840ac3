# SPDX-License-Identifier: Apache-2.0
"""Turn prompts away that the pool can never hold, in the front end: the scheduler could only say "internal error" to their clients."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvcached.errors import KVCachedError
from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SHORT_TOKENS: Final = 256  # left to the scheduler: a pool that small serves nobody
_FRESH_S: Final = 1.0
_TIMEOUT_S: Final = 0.1


class PromptCheck:
    """Asks the pools of an engine's cores what they can hold, at most once a second. Only what none of them can hold is turned away;
    a pool that does not answer might hold anything.
    """

    def __init__(self, run_dir: Path, instances: Sequence[str]) -> None:
        self._clients = [ControlClient(endpoint_path(run_dir, instance), _TIMEOUT_S) for instance in instances]
        self._asked_s = float("-inf")
        self._longest_tokens = 0

    def require_room(self, processed_inputs: Any) -> None:
        """Raises `ValueError` with both numbers."""
        prompt = processed_inputs.get("prompt_token_ids") if isinstance(processed_inputs, dict) else None
        if prompt is None or len(prompt) <= _SHORT_TOKENS:
            return
        longest_tokens = self._longest()
        if 0 < longest_tokens < len(prompt):
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and the KV cache of this engine can hold {longest_tokens} at its present limit; "
                "send a shorter one, or raise the limit (kvctl limit, KVCACHED_LIMIT)"
            )

    def _longest(self) -> int:
        now_s = time.monotonic()
        if now_s - self._asked_s > _FRESH_S:
            self._asked_s = now_s
            try:
                longest_tokens = [client.status().longest_request_tokens for client in self._clients]
            except KVCachedError:  # the scheduler decides then
                longest_tokens = [0]
            self._longest_tokens = max(longest_tokens) if all(longest_tokens) else 0
        return self._longest_tokens
