# SPDX-License-Identifier: Apache-2.0
"""How long a scheduler that can only wait for memory rests before it looks again. Pure."""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 0.02
LONGEST_S: Final = 0.1


class Rests:
    """Each twice as long as the one before, while nothing else happens in between."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def next_s(self, *, only_waits: bool) -> float:
        self._last_s = min(max(FIRST_S, 2 * self._last_s), LONGEST_S) if only_waits else 0.0
        return self._last_s
