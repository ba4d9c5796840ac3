# SPDX-License-Identifier: Apache-2.0
"""The memory of one worker: its card, its mapper, and the tensors that vLLM gets instead of zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from kvcached import __version__
from kvcached.engines.vllm.fence import fences_of
from kvcached.engines.vllm.identity import Identity
from kvcached.engines.vllm.other_memory import OtherMemory
from kvcached.engines.vllm.placement import Allocation, measure, place
from kvcached.errors import EngineNotSupported
from kvcached.ranks.messages import Hello
from kvcached.ranks.server import MapperServer
from kvcached.runtime.cards import OpenCard, rank_socket
from kvcached.units import ceil_div
from kvcached.views.dlpack import DeviceType, DLPackView

if TYPE_CHECKING:
    from kvcached.config import Settings
    from kvcached.core.geometry import BlockGeometry
    from kvcached.runtime.mapper import Mapper
    from kvcached.runtime.owner import Owner

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

    def __init__(self, settings: Settings, vllm_config: Any, device: torch.device) -> None:
        self._settings = settings
        self._config = vllm_config
        self._device = device
        self._identity = Identity.of(settings, vllm_config)
        self._card = OpenCard.open(settings, _card_name(settings, device))
        self._other: OtherMemory | None = None
        if device.type == "cuda":  # a host card holds KV memory only
            self._other = OtherMemory(settings, self._card, self._identity, vllm_config, device)
        self._mapper: Mapper | None = None
        self._server: MapperServer | None = None
        self._local: LocalMapper | None = None

    @property
    def virtual_bytes(self) -> int:
        """The address range: the most that the KV cache can ever grow to."""
        virtual = self._settings.virtual
        return self._card.budget_bytes if virtual is None else virtual.of(self._card.device.info.total_bytes)

    def note_profiled(self) -> None:
        """The worker has loaded its weights and run its largest batch."""
        if self._other is not None:
            self._other.settle()

    def place(self, kv_cache_config: Any, *, interleaved: bool, first_blocks: int) -> ZerosFromArena:
        """Reserve the range, map the pages of ids 0 .. first_blocks-1, rewrite the strides. Returns what answers the allocation.

        Raises `EngineNotSupported`, `GeometryError`, `PoolExhausted` (no room for the first pages), `PeerRefused` (name in use).
        """
        need = measure(kv_cache_config, interleaved=interleaved)
        geometry = self._card.geometry(need.block_bytes, kv_cache_config.num_blocks, planes=need.planes, can_pad_stride=need.can_pad_stride)
        allocations = place(kv_cache_config, geometry)
        self._mapper = self._card.open_mapper(
            geometry,
            instance=self._identity.instance,
            name=self._identity.name,
            fence=fences_of(self._device),
            initial_pages=_pages_of(first_blocks, geometry),
        )
        self._offer(self._mapper)
        return ZerosFromArena([self._tensor(self._mapper, allocation) for allocation in allocations])

    def _offer(self, mapper: Mapper) -> None:
        """To a scheduler in this process through the configuration, to one in another process through a socket."""
        if self._config.parallel_config.distributed_executor_backend == "uni":
            self._local = self._config.kvcached_mapper = LocalMapper(mapper)
            return
        self._server = MapperServer(
            rank_socket(self._settings.run_dir, self._identity.instance, 0),
            mapper,
            Hello(__version__, self._identity.instance, mapper.facts.to_text()),
            on_owner_lost=mapper.close,
        )

    def _tensor(self, mapper: Mapper, allocation: Allocation) -> torch.Tensor:
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

    def note_submitted(self, step: int) -> None:
        """All work of this step is on the device's streams, so the mapper's fence covers it.

        A scheduler in this process hears of it here: in an engine that runs inside the user's own loop, nobody processes the last step
        in flight until there is a next request.
        """
        if self._local is not None and self._local.owner is not None:
            self._local.owner.pool.advance(step)

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        if self._local is not None and self._local.owner is not None:
            self._local.owner.close()
        for part in (self._server, self._mapper, self._other, self._card):
            if part is not None:
                part.close()
        self._server = self._mapper = self._other = None


def _card_name(settings: Settings, device: torch.device) -> str:
    if settings.card != "auto":
        return settings.card
    backend = "hip" if device.type == "cuda" and torch.version.hip else _BACKENDS.get(device.type)
    if backend is None:
        raise EngineNotSupported(f"vLLM on a {device.type} device cannot be elastic")
    return f"{backend}:{device.index or 0}"


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
