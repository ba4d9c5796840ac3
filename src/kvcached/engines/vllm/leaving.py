# SPDX-License-Identifier: Apache-2.0
"""How a worker gives its memory back: first everything ends that may read it or change it, then the memory goes, then the owner."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.engines.vllm.occupancy import Occupancy
    from kvcached.ranks.server import RankServer
    from kvcached.runtime.fence import FenceFactory

_log = logging.getLogger("kvcached.vllm")
_STEP_END_S: Final = 5.0


class Part(Protocol):
    def close(self) -> None: ...


class Exit:
    """`who`: how the log calls the worker. `fence` covers what its steps have queued."""

    def __init__(self, who: str, occupancy: Occupancy, fence: FenceFactory) -> None:
        self._who = who
        self._occupancy = occupancy
        self._fence = fence

    def work_has_ended(self, reason: str) -> bool:
        """Let no step begin any more, because of `reason`, and wait, bounded, for what runs. False: it was reported, and its memory must
        stay until the process ends."""
        if self._occupancy.close(reason, _STEP_END_S) and self._fence().wait(_STEP_END_S):
            return True
        _log.error("the work of %s has not ended for %g s: its memory is kept until the process ends (%s)", self._who, _STEP_END_S, reason)
        return False

    def give_back(self, server: RankServer | None, parts: Sequence[Part]) -> bool:
        """After the work has ended: stop the calls of the owner, close the parts in their order, then let the owner go. So the owner's
        wait for a rank ends when the memory is free, and no newcomer finds the name free before. False: a call has not ended."""
        if server is not None and not server.stop():
            return False
        try:
            for part in parts:
                part.close()
        finally:
            if server is not None:
                server.close()
        return True
