# SPDX-License-Identifier: Apache-2.0
"""What can be asked of the pools of one run directory, by name: what `kvctl` does, and the same over HTTP."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcached.card import Card
from kvcached.cli.machine import Target, find, pid_at, read_cards
from kvcached.errors import PeerLost, PeerRefused, PeerTimeout
from kvcached.runtime.endpoint import is_live, remove_abandoned

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.config import Amount
    from kvcached.runtime.control import BytesAnswer, ChangeAnswer, ControlClient, Explanation, PoolStatus, WeightAnswer


@dataclass(frozen=True, slots=True)
class Explained:
    """A pool and the bytes that it holds; `other_bytes`: what its engine leases beside it that is no KV cache."""

    status: PoolStatus
    held: Explanation
    other_bytes: int


@dataclass(frozen=True, slots=True)
class Session:
    """A pool has `timeout_s` for each answer. Every call raises `NoSuchPool`; `PeerLost` for a pool whose process has ended; and what
    a `ControlClient` raises."""

    run_dir: Path
    timeout_s: float

    def reach(self, pool: str) -> tuple[Target, ControlClient]:
        target = find(self.run_dir, pool)
        if target.rows and not target.is_alive:
            raise PeerLost(f"{pool} is dead: its process has ended and its memory is free; clear up its entry with: kvctl delete {pool}")
        return target, target.client(self.timeout_s)

    def limit(self, pool: str, amount: Amount, revision: int | None = None) -> ChangeAnswer:
        target, client = self.reach(pool)
        return client.limit(target.bytes_of(amount, client), revision)

    def floor(self, pool: str, amount: Amount) -> ChangeAnswer:
        target, client = self.reach(pool)
        return client.floor(target.bytes_of(amount, client))

    def weight(self, pool: str, weight: float) -> WeightAnswer:
        return self.reach(pool)[1].weight(weight)

    def trim(self, pool: str, amount: Amount | None = None) -> tuple[BytesAnswer, int | None]:
        """With the bytes that were asked for; None: all."""
        target, client = self.reach(pool)
        wanted_bytes = None if amount is None else target.bytes_of(amount, client)
        return client.trim(wanted_bytes), wanted_bytes

    def evict(self, pool: str, amount: Amount) -> tuple[BytesAnswer, int]:
        """With the bytes that were asked for."""
        target, client = self.reach(pool)
        wanted_bytes = target.bytes_of(amount, client)
        return client.evict(wanted_bytes), wanted_bytes

    def explain(self, pool: str) -> Explained:
        target, client = self.reach(pool)
        return Explained(client.status(), client.explain(), sum(row.other_bytes for row in target.rows))

    def delete(self, pool: str, *, force: bool = False) -> dict[str, Any]:
        """Clear up what a dead pool left. Raises `PeerRefused` for a live one, unless its process shall be ended first; `PeerTimeout`
        when that outlives the deadline."""
        target = find(self.run_dir, pool)
        if target.is_alive and not force:
            pids = ", ".join(str(pid) for row in target.rows for pid in row.pids)
            raise PeerRefused(f"{pool} is alive (pid {pids}); end it, or use --force")
        if target.is_alive:
            self._end(target)
        Card.sweep(self.run_dir)
        return {"pool": pool, "deleted": True, "entries": len(target.rows), "socket": remove_abandoned(target.endpoint)}

    def _end(self, target: Target) -> None:
        os.kill(pid_at(target.endpoint), signal.SIGTERM)
        end_s = time.monotonic() + self.timeout_s
        while self._is_there(target):
            if time.monotonic() > end_s:
                raise PeerTimeout(f"{target.instance} is still alive {self.timeout_s:g} s after SIGTERM")
            time.sleep(0.05)

    def _is_there(self, target: Target) -> bool:
        """What a process had open the kernel closes one after another: it may listen yet when its record says that it is dead."""
        rows = [row for card in read_cards(self.run_dir) for row in card.pools if row.instance == target.instance]
        return any(row.is_alive for row in rows) or is_live(target.endpoint)
