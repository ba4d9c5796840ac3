# SPDX-License-Identifier: Apache-2.0
"""The workers of one engine agree on how blocks lie on pages: each says once what it needs, and all compute the same answer.

The one exchange is at the start, over vLLM's own CPU group. A worker that cannot go on says so in it, so that no other waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcached.core.stages import Stage, choose_stages
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.core.geometry import BlockGeometry

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Seat:
    """What one worker tells the others. `place` is the same for workers that can meet in the run directory."""

    instance: str
    rank: int
    place: str
    num_blocks: int
    page_bytes_floor: int
    stage: Stage | None
    problem: str = ""


def meeting_place(run_dir: Path) -> str:
    """Of the machine and the directory: Unix sockets and card records are shared by those who see the same of both."""
    found = run_dir.stat()
    return f"{_BOOT_ID.read_text().strip()} {found.st_dev} {found.st_ino}"


def exchange(seat: Seat, ranks: int) -> list[Seat]:
    """The seats of all workers that vLLM runs together; with data parallelism those of other engine cores may be among them."""
    if ranks == 1:
        return [seat]
    import torch.distributed
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group().cpu_group
    seats: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(seats, seat, group=group)
    return seats


def agree(mine: Seat, seats: Sequence[Seat], ranks: int) -> BlockGeometry:
    """Where this worker's blocks lie. Every worker of the instance gets a geometry with the same pages, or every one the same error.

    Raises `EngineNotSupported` with the rank that cannot go on or cannot be met, `GeometryError` when no pages suit all of them.
    """
    crew = sorted((seat for seat in seats if seat.instance == mine.instance), key=lambda seat: seat.rank)
    _require_complete(crew, ranks)
    stages = [_usable(seat, crew[0]) for seat in crew]
    geometries = choose_stages(stages, mine.num_blocks, page_bytes_floor=max(seat.page_bytes_floor for seat in crew) or None)
    return geometries[mine.rank]


def _require_complete(crew: Sequence[Seat], ranks: int) -> None:
    if [seat.rank for seat in crew] != list(range(ranks)):
        raise EngineNotSupported(
            f"the workers of {crew[0].instance} say that they are ranks {[seat.rank for seat in crew]}, and {ranks} were started; "
            "KVCACHED_IPC_NAME must be the same for all of them and for no other engine"
        )


def _usable(seat: Seat, first: Seat) -> Stage:
    if seat.problem or seat.stage is None:
        raise EngineNotSupported(f"rank {seat.rank} cannot be elastic: {seat.problem}")
    if seat.place != first.place:
        raise EngineNotSupported(
            f"rank {seat.rank} is on another machine than rank 0, or sees another run directory; all workers of an engine and its "
            "scheduler must share KVCACHED_RUN_DIR on one machine"
        )
    if seat.num_blocks != first.num_blocks:
        raise EngineNotSupported(f"vLLM gave rank {seat.rank} {seat.num_blocks} KV blocks and rank 0 {first.num_blocks}")
    return seat.stage
