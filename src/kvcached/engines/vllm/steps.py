# SPDX-License-Identifier: Apache-2.0
"""Numbers of an engine's steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_NUMBER: Final = "kvcached_step"
_OPERATIONS: Final = "kvcached_operations"


@dataclass(slots=True)
class Steps:
    """`scheduled` is the newest step that was begun: it and earlier ones may read a block that is freed now.

    A step's number rides on its scheduler output, so it is known again when the output is processed, however many are in flight.
    """

    scheduled: int = 0
    uses: int = 0

    def begin(self) -> None:
        self.scheduled += 1

    def stamp(self, scheduler_output: Any, operations: tuple[Any, ...] = ()) -> None:
        """Number the step, and send what every worker has to map or unmap before it runs."""
        setattr(scheduler_output, _NUMBER, self.scheduled)
        if operations:
            setattr(scheduler_output, _OPERATIONS, operations)

    @staticmethod
    def number_of(scheduler_output: Any) -> int:
        """The number that `stamp` wrote; 0 for an output that was made by someone else."""
        return int(getattr(scheduler_output, _NUMBER, 0))

    @staticmethod
    def operations_of(scheduler_output: Any) -> tuple[Any, ...]:
        """What `stamp` sent; nothing on an output that was made by someone else (warm-up, dummy steps)."""
        operations: tuple[Any, ...] = getattr(scheduler_output, _OPERATIONS, ())
        return operations

    def next_use(self) -> int:
        """A number that grows with each use of cached blocks."""
        self.uses += 1
        return self.uses
