# SPDX-License-Identifier: Apache-2.0
"""Numbers of an engine's steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_NUMBER: Final = "kvcached_step"
_OPERATIONS: Final = "kvcached_operations"
_NOTES: Final = "kvcached_notes"


@dataclass(slots=True)
class Steps:
    """`scheduled` is the newest step that was begun: it and earlier ones may read a block that is freed now.

    A step's number rides on its scheduler output, so it is known again when the output is processed, however many are in flight.
    """

    scheduled: int = 0
    uses: int = 0

    def begin(self) -> None:
        self.scheduled += 1

    def stamp(self, scheduler_output: Any, operations: tuple[Any, ...] = (), notes: tuple[Any, ...] = ()) -> None:
        """Number the step, and send what every worker has to map or unmap before it runs, and what its canary is told."""
        setattr(scheduler_output, _NUMBER, self.scheduled)
        if operations:
            setattr(scheduler_output, _OPERATIONS, operations)
        if notes:
            setattr(scheduler_output, _NOTES, notes)

    @staticmethod
    def number_of(scheduler_output: Any) -> int:
        """The number that `stamp` wrote; 0 for an output that was made by someone else."""
        return int(getattr(scheduler_output, _NUMBER, 0))

    @staticmethod
    def operations_of(scheduler_output: Any) -> tuple[Any, ...]:
        """What `stamp` sent; nothing on an output that was made by someone else (warm-up, dummy steps)."""
        operations: tuple[Any, ...] = getattr(scheduler_output, _OPERATIONS, ())
        return operations

    @staticmethod
    def notes_of(scheduler_output: Any) -> tuple[Any, ...]:
        """The notes that `stamp` sent."""
        notes: tuple[Any, ...] = getattr(scheduler_output, _NOTES, ())
        return notes

    def next_use(self) -> int:
        """A number that grows with each use of cached blocks."""
        self.uses += 1
        return self.uses
