# SPDX-License-Identifier: Apache-2.0
"""When a page that work in flight may still read can go: after its marker is complete."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPACT_AT_LEAST: Final = 1024


class RetirementQueue:
    """Stretches of pages by marker. An entry only says "look again now": the page may have been used again meanwhile."""

    __slots__ = ("_compact_at", "_heap")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []  # (marker, first page, pages)
        self._compact_at = COMPACT_AT_LEAST

    def push(self, marker: int, first: int, pages: int) -> None:
        """Pages that are empty from now on, and whose last reader is step `marker`."""
        heappush(self._heap, (marker, first, pages))
        if len(self._heap) > self._compact_at:
            self._compact()

    def _compact(self) -> None:
        """Within one step a page may retire many times; one entry each is enough, so the queue stays in proportion to the pages."""
        self._heap = list(set(self._heap))
        heapify(self._heap)
        self._compact_at = max(COMPACT_AT_LEAST, 2 * len(self._heap))

    def pop_through(self, completed: int) -> list[tuple[int, int]]:
        """(first page, pages) of every entry whose marker is at most `completed`."""
        heap, due = self._heap, []
        while heap and heap[0][0] <= completed:
            _, first, pages = heappop(heap)
            due.append((first, pages))
        return due

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(marker, first page, pages) of every entry, in no order."""
        return iter(self._heap)
