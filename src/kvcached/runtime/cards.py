# SPDX-License-Identifier: Apache-2.0
"""A card as one process opens it: the device, its shared record, and the mappers on it."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, TypeVar

from kvcached.card.card import Card
from kvcached.card.record import CardIdentity, EntrySpec, Kind
from kvcached.core.canary import guarded_bytes
from kvcached.core.geometry import BlockGeometry, choose_geometry
from kvcached.errors import DeviceError, PoolExhausted, SettingError
from kvcached.ranks.actions import MapFresh
from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.facts import MapperFacts
from kvcached.runtime.endpoint import endpoint_path, prepare_directory, prepare_run_dir
from kvcached.runtime.fence import FenceFactory, NothingInFlight
from kvcached.runtime.mapper import Mapper
from kvcached.runtime.peers import Peers
from kvcached.runtime.rank_memory import RankMemory
from kvcached.units import MIB, format_size
from kvcached.vmm.api import ArenaConfig, ZeroBacking
from kvcached.vmm.native import open_device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.card.entry import Entry
    from kvcached.config import Settings
    from kvcached.ranks.transactions import PageRuns
    from kvcached.vmm.api import Arena, Device

_log = logging.getLogger("kvcached.cards")
_ZERO_BACKING: Final = {"never": ZeroBacking.NEVER, "used": ZeroBacking.USED, "all": ZeroBacking.ALL}
_RETRY_S: Final = 0.05
T = TypeVar("T", Mapper, RankMemory)


def rank_socket(run_dir: Path, instance: str, rank: int) -> Path:
    """Where the mapper `rank` of `instance` waits for its owner."""
    return run_dir / "ranks" / f"{instance}-{rank}.sock"


class OpenCard:
    """Close it last: its mappers hold memory of its device. Use `open`."""

    def __init__(self, settings: Settings, device: Device, card: Card, budget_bytes: int) -> None:
        self.settings = settings
        self.device = device
        self.record = card
        self.budget_bytes = budget_bytes

    @classmethod
    def open(cls, settings: Settings, name: str) -> OpenCard:
        """`name` is `host:N`, `cuda:N` or `hip:N`. Raises `DeviceError` (no such card), `SettingError`, `PeerError`."""
        backend, _, ordinal = name.partition(":")
        host = backend == "host"
        prepare_run_dir(settings.run_dir, settings.run_group)
        if host:
            settings.host_dir.parent.mkdir(parents=True, exist_ok=True)
            prepare_directory(settings.host_dir, settings.run_group)
        device = open_device(
            backend,
            int(ordinal),
            host_capacity_bytes=settings.host_capacity_bytes if host else 0,
            host_granularity_bytes=settings.host_granularity_bytes if host else 0,
            host_dir=settings.host_dir if host else None,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(device.close)
            card = cls._enter(settings, device)
            undo.pop_all()
        return card

    @classmethod
    def _enter(cls, settings: Settings, device: Device) -> OpenCard:
        info = device.info
        budget_bytes = settings.budget_bytes(info.total_bytes)
        card = Card.open(
            settings.run_dir,
            CardIdentity(info.uuid, info.name, info.total_bytes),
            budget_bytes=budget_bytes,
            margin_bytes=0 if info.backend == "host" else settings.margin_bytes,  # a host card has no other tenants than pools
            measure_free=lambda: device.memory()[0],
            group_mode=settings.run_group is not None,
        )
        Card.sweep(settings.run_dir)  # what killed processes left: entries, sockets, half-made files
        return cls(settings, device, card, budget_bytes)

    def geometry(self, block_bytes: int, blocks: int, *, planes: int = 1, can_pad_stride: bool = True) -> BlockGeometry:
        """Page and stride for `blocks` blocks of `block_bytes` (and the canary's stamp) per plane on this card. Raises `GeometryError`."""
        floor_mb = self.settings.page_size_mb
        return choose_geometry(
            guarded_bytes(block_bytes, can_pad_stride=can_pad_stride) if self.settings.canary else block_bytes,
            blocks,
            self.device.info.granularity_bytes,
            planes=planes,
            can_pad_stride=can_pad_stride,
            page_bytes_floor=None if floor_mb is None else floor_mb * MIB,
        )

    def lease_other(self, instance: str, name: str, size_bytes: int, timeout_s: float, rank: int = 0) -> Entry:
        """Lease memory that is not KV (weights, activations) before it is allocated; other pools are pressed for it.

        Raises `PoolExhausted` with both numbers when the card cannot grant it within `timeout_s`.
        """
        entry = self.record.register(EntrySpec(Kind.OTHER, instance, name, rank=rank))
        deadline = time.monotonic() + timeout_s
        while True:
            result = entry.lease(size_bytes, owned=True)
            if result.granted:
                return entry
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                entry.close()
                raise PoolExhausted(
                    size_bytes, result.grantable_bytes, "bytes", f"weights and activations do not fit the card: {result.reason}"
                )
            if self._peers(instance).press(size_bytes - result.grantable_bytes, left_s) == 0:
                time.sleep(min(_RETRY_S, left_s))

    def adopt_other(self, instance: str, name: str, size_bytes: int, rank: int = 0) -> Entry:
        """Count memory that is not KV and that this process has allocated already, whether or not the budget has room for it."""
        return self.record.register(EntrySpec(Kind.OTHER, instance, name, rank=rank), adopt_lease_bytes=size_bytes)

    def open_mapper(
        self,
        geometry: BlockGeometry,
        *,
        instance: str,
        name: str,
        rank: int = 0,
        fence: FenceFactory = NothingInFlight,
        initial_pages: int = 0,
        floor_bytes: int = 0,
    ) -> Mapper:
        """Register, reserve the range and map pages 0 .. initial_pages-1.

        Raises `PeerRefused` (the same instance lives, the floor does not fit), `PoolExhausted` (no room for the first pages).
        """
        settings = self.settings

        def make(arena: Arena, entry: Entry, facts: MapperFacts) -> Mapper:
            return Mapper(
                arena,
                entry,
                facts=facts,
                fence=fence,
                lease_deadline_s=settings.lease_timeout_ms / 1000,
                handle_cache_bytes=settings.handle_cache_mb * MIB,
            )

        spec = self._spec(instance, name, rank, floor_bytes)
        return self._open(spec, geometry, initial_pages, make, lambda mapper, runs: mapper.map(runs, urgent=True).result())

    def open_rank(
        self, geometry: BlockGeometry, *, instance: str, name: str, rank: int, initial_pages: int = 0, floor_bytes: int = 0
    ) -> RankMemory:
        """The same for one of the ranks of an owner in another process."""

        def make(arena: Arena, entry: Entry, facts: MapperFacts) -> RankMemory:
            return RankMemory(arena, entry, facts=facts, lease_deadline_s=self.settings.lease_timeout_ms / 1000)

        spec = self._spec(instance, name, rank, floor_bytes)
        return self._open(spec, geometry, initial_pages, make, lambda memory, runs: memory.perform(MapFresh(runs, urgent=True, ticket=0)))

    def _spec(self, instance: str, name: str, rank: int, floor_bytes: int) -> EntrySpec:
        return EntrySpec(
            Kind.KV,
            instance,
            name,
            endpoint=str(endpoint_path(self.settings.run_dir, instance)),
            limit_bytes=limit_bytes(self.settings, self.budget_bytes),
            floor_bytes=floor_bytes,
            weight=self.settings.weight,
            rank=rank,
        )

    def _open(
        self,
        spec: EntrySpec,
        geometry: BlockGeometry,
        initial_pages: int,
        make: Callable[[Arena, Entry, MapperFacts], T],
        map_now: Callable[[T, PageRuns], Outcome],
    ) -> T:
        with contextlib.ExitStack() as undo:
            entry = self.record.register(spec)
            undo.callback(entry.close)
            arena = self._reserve(geometry)
            undo.callback(arena.close)
            memory = make(arena, entry, MapperFacts(geometry, initial_pages, self.device.info.uuid, self.budget_bytes))
            undo.pop_all()  # they are the memory's from here on
            undo.callback(memory.close)
            self._map_first(lambda runs: map_now(memory, runs), spec.instance, initial_pages, geometry.release_step_bytes)
            undo.pop_all()
        return memory

    def _reserve(self, geometry: BlockGeometry) -> Arena:
        return self.device.create_arena(
            ArenaConfig(
                page_bytes=geometry.page_bytes,
                pages=geometry.pages,
                planes=geometry.planes,
                plane_stride_bytes=geometry.plane_bytes,
                zero_backing=_ZERO_BACKING[self.settings.zero_backing],
            )
        )

    def _map_first(self, map_now: Callable[[PageRuns], Outcome], instance: str, pages: int, page_bytes: int) -> None:
        """The pages that the engine touches before its scheduler exists."""
        if not pages:
            return
        deadline = time.monotonic() + self.settings.ipc_timeout_s
        needed_bytes = pages * page_bytes
        while True:
            outcome = map_now(tuple((page, 1) for page in range(pages)))
            left_s = deadline - time.monotonic()
            if outcome.verdict is Verdict.DONE:
                return
            if outcome.verdict is not Verdict.EXHAUSTED:
                raise DeviceError(
                    "map", int(outcome.verdict), needed_bytes, f"the first {pages} pages could not be mapped: {outcome.reason}"
                )
            if left_s <= 0:
                raise PoolExhausted(needed_bytes, outcome.size_bytes, "bytes", f"no room on the card for the first pages: {outcome.reason}")
            if self._peers(instance).press(needed_bytes - outcome.size_bytes, left_s) == 0:
                time.sleep(min(_RETRY_S, left_s))

    def _peers(self, instance: str) -> Peers:
        return Peers(self.settings.run_dir, {self.device.info.uuid: 1}, 1, instance)

    def close(self) -> None:
        self.record.close()
        self.device.close()


def limit_bytes(settings: Settings, budget_bytes: int) -> int:
    """The limit that a pool starts with. Raises `SettingError` above the budget."""
    asked_bytes = budget_bytes if settings.limit is None else settings.limit.of(budget_bytes)
    if asked_bytes > budget_bytes:
        raise SettingError(f"KVCACHED_LIMIT is {format_size(asked_bytes)}; allowed is at most KVCACHED_BUDGET, {format_size(budget_bytes)}")
    return asked_bytes


def floor_bytes(settings: Settings, budget_bytes: int, longest_request_bytes: int) -> int:
    """The floor that a pool starts with: one longest request, at most 1/16 of the budget, unless it is set.

    Raises `SettingError` for a floor above the limit.
    """
    if settings.floor is None:
        return min(longest_request_bytes, budget_bytes // 16)
    asked_bytes, most_bytes = settings.floor.of(budget_bytes), limit_bytes(settings, budget_bytes)
    if asked_bytes > most_bytes:
        raise SettingError(f"KVCACHED_FLOOR is {format_size(asked_bytes)}; allowed is at most the pool's limit, {format_size(most_bytes)}")
    return asked_bytes
