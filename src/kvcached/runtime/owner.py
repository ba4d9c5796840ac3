# SPDX-License-Identifier: Apache-2.0
"""An owner: pool, keeper and control endpoint of one engine, in the process that decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvcached.core.limits import Limits
from kvcached.errors import PeerRefused
from kvcached.runtime.canary import WatchedPool
from kvcached.runtime.cards import floor_bytes, limit_bytes
from kvcached.runtime.control import ControlServer
from kvcached.runtime.endpoint import endpoint_path, prepare_run_dir
from kvcached.runtime.keeper import Keeper, KeeperOptions
from kvcached.runtime.operations import PoolOperations
from kvcached.runtime.peers import Peers
from kvcached.runtime.pool import Pool
from kvcached.runtime.pool_options import PoolOptions
from kvcached.units import MIB, ceil_div

if TYPE_CHECKING:
    from kvcached.config import Settings
    from kvcached.ranks.api import MapperPort
    from kvcached.ranks.facts import MapperFacts
    from kvcached.runtime.canary import Watcher

_log = logging.getLogger("kvcached.owner")


class Owner:
    """Start it with the port of a mapper and what the mapper told; close it to give everything back.

    `longest_request_blocks`: blocks of the longest request that the engine accepts, for the floor. `block_tokens`: tokens of a block,
    for the bound of the prefix cache. `watcher`: the canary, which hears of every block.
    """

    def __init__(
        self,
        settings: Settings,
        port: MapperPort,
        facts: MapperFacts,
        *,
        instance: str,
        name: str,
        block_tokens: int = 1,
        longest_request_blocks: int = 1,
        watcher: Watcher | None = None,
    ) -> None:
        geometry = facts.geometry
        step_bytes = geometry.release_step_bytes
        longest_bytes = ceil_div(longest_request_blocks, geometry.max_blocks_per_page) * step_bytes
        floor = floor_bytes(settings, facts.budget_bytes, longest_bytes)
        self._settings = settings
        reserve_pages = settings.max_reserved_pages if settings.prealloc_enabled else 0
        self._peers = Peers(settings.run_dir, facts.page_bytes_by_card, step_bytes, instance, most_ahead_bytes=reserve_pages * step_bytes)
        self.facts = facts
        self.instance = instance
        make = Pool if watcher is None else partial(WatchedPool, watcher=watcher, name=instance)
        self.pool: Pool = make(
            geometry,
            port,
            Limits(limit_bytes(settings, facts.budget_bytes), floor, float(settings.weight)),
            PoolOptions(
                large_run_pages=max(1, settings.large_run_mb * MIB // step_bytes),
                max_cached_blocks=-1 if settings.max_cached_tokens < 0 else settings.max_cached_tokens // block_tokens,
            ),
            adopted_pages=facts.adopted_pages,
            press=self._peers.press,
        )
        self.pool.others_spare_bytes = self._peers.spare_bytes
        self.control: ControlServer | None = None
        self.keeper = Keeper(
            self.pool,
            KeeperOptions(
                min_reserved_pages=min(settings.min_reserved_pages, reserve_pages),
                max_reserved_pages=reserve_pages,
                idle_trim_s=settings.idle_trim_s,
            ),
            watch=self._keep_reachable,
        )
        self.operations = PoolOperations(self.pool, self.keeper, facts, instance=instance, name=name)
        self.control = ControlServer(endpoint_path(settings.run_dir, instance), self.operations, group=settings.run_group)

    def start(self) -> None:
        """Answer control calls and keep the reserve. Raises `SettingError` when a live process has the same instance name."""
        assert self.control is not None
        self._enter_limits()
        self._look_at_card()
        self.control.start()
        self.keeper.start()
        self.pool.report()

    def _enter_limits(self) -> None:
        """A floor that was asked for must fit beside the others'; the default one may be given up."""
        limits = self.pool.limits
        try:
            self.pool.set_limits(limits)
        except PeerRefused as error:
            if self._settings.floor is not None:
                raise
            _log.warning("%s starts without a floor: %s", self.instance, error)
            self.pool.set_limits(replace(limits, floor_bytes=0))

    def _look_at_card(self) -> None:
        ceiling_bytes = self._peers.ceiling_bytes()
        if ceiling_bytes is not None:
            self.pool.ceiling_bytes = ceiling_bytes

    def _keep_reachable(self) -> None:
        """The run directory may be deleted under a live engine."""
        self._look_at_card()
        if self.control is not None:
            prepare_run_dir(self._settings.run_dir, self._settings.run_group)
            self.control.ensure_bound()

    def rest(self) -> int:
        """The engine goes to sleep: everything that is empty leaves now, the pinned page apart. Returns bytes."""
        self.keeper.rest()
        given_bytes = self.pool.shrink(self.pool.geometry.pages) + self.pool.trim_handles()
        self.pool.report()
        return given_bytes

    def close(self) -> None:
        """Refuse control calls, stop the keeper, give everything back. A second call does nothing."""
        if self.control is not None:
            self.control.stop()
        self.keeper.stop()
        self.pool.close()
