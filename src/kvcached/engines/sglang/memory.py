# SPDX-License-Identifier: Apache-2.0
"""The memory of one SGLang scheduler: its card, and for each KV pool an arena with the owner of its slots."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcached.engines.fence import StreamFence
from kvcached.engines.sglang.agreed import AgreedGate
from kvcached.engines.sglang.bank import PageBank
from kvcached.engines.sglang.gate import Gate
from kvcached.engines.sglang.identity import Identity
from kvcached.engines.sglang.placement import Placement, page_floor_bytes, place
from kvcached.engines.sglang.ranks import Accord, Crew, Topic
from kvcached.engines.sglang.staged import StagedGate
from kvcached.engines.sglang.stock import StockedBank
from kvcached.engines.sglang.tree_pool import TreePool
from kvcached.errors import EngineNotSupported
from kvcached.runtime.cards import OpenCard
from kvcached.runtime.fence import Fence, NothingInFlight
from kvcached.runtime.owner import Owner
from kvcached.units import MIB, ceil_div, format_size
from kvcached.views.dlpack import DeviceType, DLPackView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.card.entry import Entry
    from kvcached.config import Settings
    from kvcached.core.tally import Eviction
    from kvcached.runtime.mapper import Mapper

_log = logging.getLogger("kvcached.sglang")
_BACKENDS: Final = {"cpu": "host", "cuda": "cuda"}
_DEVICE_TYPES: Final = {"host": DeviceType.CPU, "cuda": DeviceType.CUDA, "hip": DeviceType.ROCM}
_CONTEXT_BYTES: Final = 512 * MIB  # the driver's context, libraries and graphs: not in torch's own count


class Streams:
    """The streams on which an engine's work may read KV memory. Its scheduler makes them late, and anew, so they are looked up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.scheduler: Any = None

    def _named(self, *names: str) -> list[Any]:
        found = [getattr(self.scheduler, name, None) for name in names]
        return [stream for stream in found if isinstance(stream, torch.cuda.Stream)]

    def fence(self) -> Fence:
        if self._device.type != "cuda":
            return NothingInFlight()
        return StreamFence(self._device, (torch.cuda.default_stream(self._device), *self._named("forward_stream", "schedule_stream")))

    def of_scheduler(self) -> contextlib.AbstractContextManager[Any]:
        """Work queued within comes after all that the scheduler has queued, whatever thread queues it."""
        streams = self._named("schedule_stream") if self._device.type == "cuda" else []
        context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(streams[0]) if streams else contextlib.nullcontext()
        return context


class EngineMemory:
    """Opened when the engine asks for its capacity; closed when the engine ends."""

    def __init__(self, settings: Settings, model: str, device: torch.device, *, interleaved: bool, replicas: int = 1) -> None:
        """`model`: path or name of the model as SGLang was given it. `replicas`: of attention. All ranks of an engine make theirs at the
        same time."""
        self.settings = settings
        self.accord = Accord.of_engine(replicas)
        self.deciders = None if self.accord is None else self.accord.of_replica()
        self.identity = identity = Identity.of(settings, model, self.accord)
        self.crew = None if self.accord is None else Crew(self.accord, identity.instance.removesuffix(self.accord.mine.suffix))
        self.device = device
        self.interleaved = interleaved if settings.contiguous_layout is None else settings.contiguous_layout
        self.streams = Streams(device)
        self.parts: list[PoolMemory] = []
        self.lock = threading.RLock()  # of all pools
        self.card = OpenCard.open(settings, _card_name(settings, device, 0 if self.accord is None else self.accord.mine.rank))
        self._other: Entry | None = None
        if device.type == "cuda":  # a host card holds KV memory only
            measured_bytes = torch.cuda.max_memory_reserved(device) + _CONTEXT_BYTES
            given_bytes = None if settings.other is None else settings.other.of(self.card.budget_bytes)
            self._other = self.card.adopt_other(identity.instance, identity.name, given_bytes or measured_bytes)

    def virtual_bytes(self) -> int:
        """The address range: the most that the KV cache can ever grow to, the same on all ranks. All of them ask at the same time."""
        virtual = self.settings.virtual
        size_bytes = self.card.budget_bytes if virtual is None else virtual.of(self.card.device.info.total_bytes)
        return size_bytes if self.accord is None else self.accord.least(Topic.RANGE, [size_bytes])[0]

    def part_of(self, kv_pool: Any) -> PoolMemory:
        """The memory that was made for this KV pool. Raises `EngineNotSupported` where it got its memory in some other way."""
        for part in self.parts:
            if part.kv_pool is kv_pool:
                return part
        raise EngineNotSupported(f"SGLang's {type(kv_pool).__name__} got its memory in another way than this adapter knows")

    def serve(self) -> None:
        """Start keepers and control endpoints, when the engine is complete: their threads ask for events, which spoils a graph capture.

        Raises `SettingError` (a live process has the name), `PeerRefused` (a floor that was asked for does not fit).
        """
        for part in self.parts:
            if part.owner is not None:
                part.owner.start()
        if self.crew is not None:
            self.crew.start()

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        for part in self.parts:
            part.close()
        self.parts = []
        if self._other is not None:
            self._other.close()
            self._other = None
        self.card.close()


class PoolMemory:
    """One pool of SGLang's over an arena; `start` makes it the pool of an allocator."""

    def __init__(
        self, engine: EngineMemory, kv_pool: Any, rows_bytes: Sequence[int], *, slots: int, page_slots: int, part: str = ""
    ) -> None:
        """`rows_bytes`: of a slot in each tensor, in their order. `part` tells the pools of an engine apart.

        Raises `GeometryError`, `PoolExhausted` (no room for the first page), `PeerRefused` (name in use).
        """
        self.kv_pool = kv_pool
        self.engine = engine
        self.identity = engine.identity.part(part)
        self.part = part
        self.slots = slots
        self.page_slots = page_slots
        self.placement: Placement = place(
            rows_bytes,
            page_slots=page_slots,
            blocks=ceil_div(slots, page_slots),
            granularity_bytes=engine.card.device.info.granularity_bytes,
            interleaved=engine.interleaved,
            page_bytes_floor=page_floor_bytes(engine.settings.page_size_mb),
        )
        self.mapper: Mapper = engine.card.open_mapper(
            self.placement.geometry,
            instance=self.identity.instance,
            name=self.identity.name,
            fence=engine.streams.fence,
            initial_pages=1,
        )
        engine.parts.append(self)
        self.owner: Owner | None = None

    def view(self, offset_bytes: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the arena; strides are counted in elements."""
        info = self.engine.card.device.info
        return torch.from_dlpack(
            DLPackView(
                self.mapper.base_address + offset_bytes,
                tuple(shape),
                tuple(strides),
                str(dtype).removeprefix("torch."),
                _DEVICE_TYPES[info.backend],
                0 if info.backend == "host" else info.ordinal,
                self.mapper,
            )
        )

    def start(self, longest_request_tokens: int) -> Gate:
        """Make the pool of slots, with the padding page taken for ever; `EngineMemory.serve` starts its owner."""
        page_slots = self.page_slots
        self.owner = Owner(
            self.engine.settings,
            self.mapper,
            self.mapper.facts,
            instance=self.identity.instance,
            name=self.identity.name,
            block_tokens=page_slots,
            longest_request_blocks=ceil_div(longest_request_tokens, page_slots) + 1,
        )
        pool = TreePool.adopt(self.owner.pool, self.engine.lock)
        pool.take_ids([0])
        pool.pin_page_of(0)
        gate = _gate_of(pool, page_slots, self.engine.device, self.engine.deciders)
        pool.reclaim = lambda blocks, why: self._reclaim(gate, blocks, why)
        pool.answers_later = self.engine.deciders is not None
        pool.kept_blocks = lambda: gate.pages(gate.tree.evictable())
        self.owner.operations.longest_request_tokens = lambda: gate.most_slots
        return gate

    def _reclaim(self, gate: Gate, blocks: int, why: Eviction) -> int:
        """From the keeper's or the control endpoint's thread: what the tree holds was made on the scheduler's stream."""
        with self.engine.streams.of_scheduler():
            return gate.reclaim(blocks, why)

    def describe(self) -> str:
        """What a person wants to know of it at the start."""
        geometry = self.placement.geometry
        layout = "interleaved" if geometry.planes == 1 else "per layer"
        limit = "" if self.owner is None else f", limit {format_size(self.owner.pool.limits.limit_bytes)}"
        return (
            f"{type(self.kv_pool).__name__}, page size {self.page_slots}, layout {layout}, page {format_size(geometry.page_bytes)}, "
            f"release step {format_size(geometry.release_step_bytes)}, range {format_size(geometry.range_bytes)}{limit}, "
            f"instance {self.identity.instance}"
        )

    def close(self) -> None:
        if self.owner is not None:
            self.owner.close()
            self.owner = None
        self.mapper.close()


class TokenMemory(PoolMemory):
    """One KV pool of SGLang's."""

    def __init__(self, engine: EngineMemory, kv_pool: Any, rows: Sequence[tuple[int, int]]) -> None:
        """`rows`: (heads, elements of a head) of each tensor, in the order in which `tensors` returns them. Of two KV pools of an engine
        the second one is that of sliding windows."""
        self._rows = rows
        self._dtype: torch.dtype = kv_pool.store_dtype
        super().__init__(
            engine,
            kv_pool,
            [heads * size * self._dtype.itemsize for heads, size in rows],
            slots=kv_pool.size + kv_pool.page_size,
            page_slots=kv_pool.page_size,
            part="window" if any(not part.part for part in engine.parts) else "",
        )

    def tensors(self) -> list[torch.Tensor]:
        """One tensor `[slots, heads, size]` for each row."""
        slot = self.placement.slot_bytes // self._dtype.itemsize
        return [
            self.view(offset, (self.slots, heads, size), (slot, size, 1), self._dtype)
            for offset, (heads, size) in zip(self.placement.offsets_bytes, self._rows, strict=True)
        ]


def _gate_of(pool: TreePool, page_slots: int, device: torch.device, accord: Accord | None) -> Gate:
    if accord is None:
        return Gate(PageBank(pool, page_slots, device))
    if accord.stages == 1:
        return AgreedGate(PageBank(pool, page_slots, device), accord)
    return StagedGate(StockedBank(pool, page_slots, device), accord)


def _card_name(settings: Settings, device: torch.device, rank: int) -> str:
    asked = settings.card_of(rank)
    if asked != "auto":
        return asked
    backend = "hip" if device.type == "cuda" and torch.version.hip else _BACKENDS.get(device.type)
    if backend is None:
        raise EngineNotSupported(f"SGLang on a {device.type} device cannot be elastic")
    return f"{backend}:{device.index or 0}"
