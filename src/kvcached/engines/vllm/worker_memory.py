# SPDX-License-Identifier: Apache-2.0
"""The memory of one worker: its card, its mapper, and the tensors that vLLM gets instead of zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from kvcached.core.canary import Canary, guarded_bytes
from kvcached.core.stages import Stage
from kvcached.engines.canary import bytes_of
from kvcached.engines.fence import fences_of
from kvcached.engines.vllm.agreement import Seat, agree, exchange, meeting_place
from kvcached.engines.vllm.greeting import greeting
from kvcached.engines.vllm.identity import Identity
from kvcached.engines.vllm.leaving import Exit
from kvcached.engines.vllm.occupancy import Occupancy
from kvcached.engines.vllm.other_memory import OtherMemory
from kvcached.engines.vllm.placement import Allocation, measure, place
from kvcached.errors import EngineNotSupported, GeometryError
from kvcached.ranks.frames import hello_of_rank
from kvcached.ranks.server import RankServer
from kvcached.runtime.cards import OpenCard, rank_socket
from kvcached.runtime.step_gate import StepGate
from kvcached.units import MIB, ceil_div
from kvcached.views.dlpack import DeviceType, DLPackView

if TYPE_CHECKING:
    from kvcached.config import Settings
    from kvcached.core.canary import Note
    from kvcached.core.geometry import BlockGeometry
    from kvcached.engines.vllm.layouts import LayoutChoice
    from kvcached.ranks.operations import Op
    from kvcached.runtime.mapper import Mapper
    from kvcached.runtime.owner import Owner
    from kvcached.runtime.rank_memory import RankMemory

_BACKENDS: Final = {"cpu": "host", "cuda": "cuda"}
_DEVICE_TYPES: Final = {"host": DeviceType.CPU, "cuda": DeviceType.CUDA, "hip": DeviceType.ROCM}


class LocalMapper:
    """Carries a mapper from a worker to the scheduler of the same process, on the configuration that both hold.

    A copy or a pickle of the configuration carries nothing: the memory stays where it is.
    """

    def __init__(self, mapper: Mapper | None = None) -> None:
        self.mapper = mapper
        self.owner: Owner | None = None

    def __reduce__(self) -> tuple[type[LocalMapper], tuple[()]]:
        return LocalMapper, ()


class WorkerMemory:
    """Opened when the worker has its device, placed when the sizes are known, closed when the engine ends."""

    def __init__(self, settings: Settings, vllm_config: Any, device: torch.device, rank: int, local_rank: int) -> None:
        self.occupancy = Occupancy()
        self._settings = settings
        self._config = vllm_config
        self._device = device
        self._rank = rank
        self._identity = Identity.of(settings, vllm_config)
        self._card = OpenCard.open(settings, _card_name(settings, device, local_rank))
        self._fence = fences_of(device)
        self._other: OtherMemory | None = None
        if device.type == "cuda":  # a host card holds KV memory only
            self._other = OtherMemory(settings, self._card, self._identity, vllm_config, device, rank)
        self._gate = StepGate(self._fence)
        self._exit = Exit(f"rank {rank} of {self._identity.instance}", self.occupancy, self._fence)
        self._mapper: Mapper | RankMemory | None = None
        self._server: RankServer | None = None
        self._local: LocalMapper | None = None
        self._canary: Canary | None = None
        self._closed = False

    @property
    def virtual_bytes(self) -> int:
        """The address range: the most that the KV cache can ever grow to."""
        virtual = self._settings.virtual
        return self._card.budget_bytes if virtual is None else virtual.of(self._card.device.info.total_bytes)

    def note_profiled(self) -> None:
        """The worker has loaded its weights and run its largest batch."""
        if self._other is not None:
            self._other.settle()

    def place(self, kv_cache_config: Any, layout: LayoutChoice, *, first_blocks: int) -> ZerosFromArena:
        """Reserve the range, map the pages of ids 0 .. first_blocks-1, rewrite the strides. Returns what answers the allocation.

        Called by all workers of an engine at the same time: they agree on the pages first.
        Raises `EngineNotSupported`, `GeometryError`, `PoolExhausted` (no room for the first pages), `PeerRefused` (name in use).
        """
        ranks = int(self._config.parallel_config.world_size)
        seat = self._seat(kv_cache_config, layout)
        geometry = agree(seat, exchange(seat, ranks), ranks)
        allocations = place(kv_cache_config, geometry)
        self._mapper = self._open(geometry, _pages_of(first_blocks, geometry))
        if self._settings.canary:
            name = self._identity.instance if ranks == 1 else f"{self._identity.instance}, rank {self._rank}"
            self._canary = Canary(geometry, name, bytes_of(self._tensor(self._mapper, Allocation(geometry.range_bytes, 0))))
        return ZerosFromArena([self._tensor(self._mapper, allocation) for allocation in allocations])

    def _seat(self, kv_cache_config: Any, layout: LayoutChoice) -> Seat:
        """What this worker needs. What stands against it is told too, since the others wait for its word."""
        stage, problem = None, ""
        try:
            need = measure(kv_cache_config, interleaved=layout.interleaved)
            block_bytes = need.block_bytes
            if self._settings.canary:
                block_bytes = guarded_bytes(block_bytes, can_pad_stride=need.can_pad_stride)
            stage = Stage(block_bytes, self._card.device.info.granularity_bytes, need.planes, need.can_pad_stride)
        except (EngineNotSupported, GeometryError) as error:
            problem = "; ".join(filter(None, (str(error), layout.because)))
        return Seat(
            self._identity.instance,
            self._rank,
            meeting_place(self._settings.run_dir),
            int(kv_cache_config.num_blocks),
            (self._settings.page_size_mb or 0) * MIB,
            stage,
            problem,
        )

    def _open(self, geometry: BlockGeometry, initial_pages: int) -> Mapper | RankMemory:
        """For a scheduler in this process through the configuration, for one in another process through a socket."""
        instance, name = self._identity
        if self._config.parallel_config.distributed_executor_backend == "uni":
            mapper = self._card.open_mapper(geometry, instance=instance, name=name, fence=self._fence, initial_pages=initial_pages)
            self._local = self._config.kvcached_mapper = LocalMapper(mapper)
            return mapper
        memory = self._card.open_rank(geometry, instance=instance, name=name, rank=self._rank, initial_pages=initial_pages)
        self._server = RankServer(
            rank_socket(self._settings.run_dir, instance, self._rank),
            memory,
            self._gate,
            hello_of_rank(greeting(instance, memory.facts.to_text()), self._rank),
            on_owner_lost=self._owner_lost,
        )
        return memory

    def _tensor(self, mapper: Mapper | RankMemory, allocation: Allocation) -> torch.Tensor:
        info = self._card.device.info
        view = DLPackView(
            mapper.base_address + allocation.offset_bytes,
            (allocation.size_bytes,),
            (1,),
            "int8",
            _DEVICE_TYPES[info.backend],
            0 if info.backend == "host" else info.ordinal,
            mapper,
        )
        return torch.from_dlpack(view)

    def apply(self, operations: tuple[Op, ...], notes: tuple[Note, ...] = ()) -> None:
        """What the scheduler decided for the step that is about to run. Raises `InvariantBroken` when a stamp does not stand."""
        if self._server is not None:
            self._server.apply_step_ops(operations)
        if self._canary is not None:
            self._canary.obey(notes, looks_back=False)  # what was given back was looked at after its last step, and may be gone

    def _owner_lost(self) -> None:
        """Without a scheduler no step will come."""
        self._close("the scheduler of this engine is gone, and its KV memory with it")

    def note_submitted(self, step: int) -> None:
        """All work of this step is on the device's streams, so the mapper's fence covers it.

        A scheduler in this process hears of it here: in an engine that runs inside the user's own loop, nobody processes the last step
        in flight until there is a next request. Raises `InvariantBroken` when a stamp does not stand: before the step counts as done, so
        that the pages of all that it used are still there.
        """
        if self._canary is not None and step:  # an output that is no step of the scheduler's has brought no notes
            self._canary.check()
        self._gate.submitted(step)
        if self._local is not None and self._local.owner is not None:
            self._local.owner.pool.advance(step)

    def close(self) -> None:
        """Give everything back, unless a step or a call still runs over it: then it is kept, and that is reported. A second call does
        nothing."""
        self._close("the KV memory of this worker is given back")

    def _close(self, reason: str) -> None:
        if self._closed or not self._exit.work_has_ended(reason):
            return
        if self._local is not None and self._local.owner is not None:
            self._local.owner.close()
        parts = [part for part in (self._mapper, self._other, self._card) if part is not None]
        self._closed = self._exit.give_back(self._server, parts)
        if self._closed:
            self._server = self._mapper = self._other = None


def _card_name(settings: Settings, device: torch.device, local_rank: int) -> str:
    backend = "hip" if device.type == "cuda" and torch.version.hip else _BACKENDS.get(device.type)
    if backend is None:
        raise EngineNotSupported(f"vLLM on a {device.type} device cannot be elastic")
    asked, own = settings.card_of(local_rank), f"{backend}:{device.index or 0}"
    if asked != "auto" and asked != own and backend != "host":
        raise EngineNotSupported(
            f"KVCACHED_CARD gives worker {local_rank} the card {asked}, and vLLM runs it on {own}; unset KVCACHED_CARD"
        )
    return own if asked == "auto" else asked


def _pages_of(blocks: int, geometry: BlockGeometry) -> int:
    last = min(blocks, geometry.num_blocks) * geometry.block_stride_bytes
    return max(1, ceil_div(last, geometry.page_bytes))


class ZerosFromArena(TorchFunctionMode):
    """While it is active, the allocations of KV memory by `torch.zeros` are answered with the tensors given, in their order."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._left = tensors

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self._left and kwargs.get("dtype") is torch.int8 and args == (self._left[0].numel(),):
            return self._left.pop(0)
        return func(*args, **kwargs)

    def require_answered(self) -> None:
        """Raises `EngineNotSupported` when vLLM got its KV memory in some other way."""
        if self._left:
            raise EngineNotSupported(
                f"{len(self._left)} KV allocations were expected and did not come: this vLLM makes its KV memory in another way; "
                "`kvcached verify` tells what moved"
            )
