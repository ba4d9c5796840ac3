# SPDX-License-Identifier: Apache-2.0
"""The engine-free Python API: open a card, open pools on it, take and give blocks, look at them as tensors.

with kvcached.open_card("host:0") as card, card.open_pool("demo", block_bytes=64 * 1024, blocks=4096) as pool:
    ranges = pool.take(16)
    ...
    pool.give(ranges)
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Final

from kvcached.config import Settings, load_settings, override
from kvcached.core.canary import Canary
from kvcached.errors import Misuse, SettingError
from kvcached.runtime.canary import HostBytes, WatchedPool, WatcherHere
from kvcached.runtime.cards import OpenCard, floor_bytes
from kvcached.runtime.fence import FenceFactory, NothingInFlight
from kvcached.runtime.owner import Owner
from kvcached.runtime.pool import NOTHING_IN_FLIGHT, Ranges
from kvcached.units import parse_size
from kvcached.views.dlpack import DeviceType, DLPackView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from kvcached.card.view import CardSnapshot
    from kvcached.runtime.control import ChangeAnswer, Explanation, PoolStatus
    from kvcached.runtime.pool import Pool

_DEVICE_TYPES: Final = {"host": DeviceType.CPU, "cuda": DeviceType.CUDA, "hip": DeviceType.ROCM}


def open_card(name: str = "host:0", *, settings: Settings | None = None, **changes: object) -> ElasticCard:
    """Open `host:N`, `cuda:N` or `hip:N`. `changes` replace settings by their names, such as `budget="4GiB"` or `run_dir="/run/kv"`.

    Raises `DeviceError` (no such card here), `SettingError`, `PeerError` (the card's record cannot be reached).
    """
    base = load_settings() if settings is None else settings
    return ElasticCard(OpenCard.open(override(base, changes) if changes else base, name))


class ElasticCard:
    """A card and the pools that this process opened on it. Use it as a context manager, or close it."""

    def __init__(self, card: OpenCard) -> None:
        self._card = card
        self._pools: list[ElasticPool] = []

    @property
    def budget_bytes(self) -> int:
        """What all pools of all processes may hold together."""
        return self._card.budget_bytes

    def snapshot(self) -> CardSnapshot:
        """All pools of all processes on this card, now."""
        return self._card.record.snapshot()

    def open_pool(
        self,
        name: str,
        *,
        block_bytes: int,
        blocks: int,
        planes: int = 1,
        can_pad_stride: bool = True,
        limit: int | str | None = None,
        floor: int | str | None = None,
        fence: FenceFactory = NothingInFlight,
    ) -> ElasticPool:
        """A pool of `blocks` block ids of `block_bytes` in each of `planes` planes. Only addresses are reserved, no memory.

        With `KVCACHED_CANARY` the stride has room for a stamp behind each block, which counts in `geometry.block_bytes`.
        `limit`, `floor`: bytes, or text such as `512MiB`, or a share of the budget such as `40%`. `fence`: makes the fence behind which
        pages are unmapped; without one the caller vouches that nothing reads a block that it has given back.
        Raises `GeometryError`, `SettingError`, `PeerRefused` (same name alive in this process, floor does not fit).
        """
        changes = {key: value for key, value in (("limit", limit), ("floor", floor)) if value is not None}
        card = self._card
        settings = override(card.settings, changes) if changes else card.settings
        if settings.canary and card.device.info.backend != "host":
            raise SettingError(
                f"KVCACHED_CANARY=true: pools of a program have a canary on host cards only, and this is {card.device.info.name}"
            )
        geometry = card.geometry(block_bytes, blocks, planes=planes, can_pad_stride=can_pad_stride)
        instance = settings.instance_name or re.sub(r"[^A-Za-z0-9._-]", "-", f"{name}-{os.getpid()}")[:48]
        mapper = OpenCard(settings, card.device, card.record, card.budget_bytes).open_mapper(
            geometry,
            instance=instance,
            name=name,
            floor_bytes=floor_bytes(settings, card.budget_bytes, geometry.release_step_bytes),
            fence=fence,
        )
        with contextlib.ExitStack() as undo:
            undo.callback(mapper.close)
            watcher = WatcherHere(Canary(geometry, instance, HostBytes(mapper.base_address))) if settings.canary else None
            owner = Owner(settings, mapper, mapper.facts, instance=instance, name=name, watcher=watcher)
            owner.start()
            undo.pop_all()
        pool = ElasticPool(owner, mapper.base_address, card)
        self._pools.append(pool)
        return pool

    def close(self) -> None:
        """Close all pools, then the card. A second call does nothing."""
        pools, self._pools = self._pools, []
        for pool in pools:
            pool.close()
        self._card.close()

    def __enter__(self) -> ElasticCard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ElasticPool:
    """Blocks with memory behind them only while they are in use. Safe to use from any thread. Made by `ElasticCard.open_pool`."""

    def __init__(self, owner: Owner, base_address: int, card: OpenCard) -> None:
        self._owner = owner
        self._card = card
        self._pool: Pool = owner.pool
        self.base_address = base_address
        self.geometry = owner.pool.geometry
        self.take = owner.pool.take  # the warm path: no layer between
        self.available = owner.pool.available

    @property
    def instance(self) -> str:
        """The name that `kvctl` knows this pool by."""
        return self._owner.instance

    def give(self, ranges: Ranges | Iterable[tuple[int, int]], marker: int = NOTHING_IN_FLIGHT) -> None:
        """Give blocks back, as (first, count). `marker`: number of the last step queued that may still read them; see `advance`."""
        self._pool.give(ranges, marker)

    def advance(self, completed_marker: int) -> None:
        """All steps up to this number have finished: what was given behind them may be unmapped."""
        self._pool.advance(completed_marker)

    def check_stamps(self) -> None:
        """Look at the stamp behind every block in use, as each `advance` does. Raises `InvariantBroken`, which names pool, block, page and
        what stands there; `Misuse` without `KVCACHED_CANARY`."""
        if not isinstance(self._pool, WatchedPool):
            raise Misuse("this pool has no stamps; open its card with canary=True (KVCACHED_CANARY)")
        self._pool.check_stamps()

    def stats(self) -> PoolStatus:
        """Bytes by state, limits and lease, now."""
        return self._owner.operations.status()

    def explain(self) -> Explanation:
        """A reason for every byte that is held."""
        return self._owner.operations.explain()

    def set_limit(self, limit: int | str) -> ChangeAnswer:
        """Let the pool hold at most this much, from now on. What running work owns stays until it is given back."""
        return self._owner.operations.limit(parse_size(limit) if isinstance(limit, str) else limit)

    def trim(self) -> int:
        """Give parked pages back now. Returns bytes."""
        return self._owner.operations.trim().given_bytes

    def view(self, shape: Sequence[int], strides: Sequence[int], dtype: str, offset_bytes: int = 0) -> DLPackView:
        """A tensor over the range for `from_dlpack` of torch or numpy: `strides` in elements, `offset_bytes` from the base address.

        Making it touches no memory; reading a block that is not taken faults (or reads as zeros, see `KVCACHED_ZERO_BACKING`).
        """
        info = self._card.device.info
        device_id = 0 if info.backend == "host" else info.ordinal
        return DLPackView(self.base_address + offset_bytes, shape, strides, dtype, _DEVICE_TYPES[info.backend], device_id, self)

    def close(self) -> None:
        """Give everything back. Tensors over the range must not be used any more. A second call does nothing."""
        self._owner.close()

    def __enter__(self) -> ElasticPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
