# SPDX-License-Identifier: Apache-2.0
"""The pools of this machine, read from the cards' records: one row per card and instance."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcached.card import Card
from kvcached.card.record import Kind, without_memory
from kvcached.cli.output import NoSuchPool
from kvcached.config import INSTANCE_PATTERN
from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.errors import PeerLost, PeerRefused
from kvcached.runtime.control import ControlClient, endpoint_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcached.card.view import CardSnapshot, EntryView
    from kvcached.config import Amount


@dataclass(frozen=True, slots=True)
class PoolRow:
    """An instance on a card; bytes are summed over its ranks there. `state`: `live`, `dead` (not cleared up yet, without memory),
    `other version`."""

    instance: str
    name: str
    card: str
    state: str
    pids: tuple[int, ...]
    ranks: int
    endpoint: str
    lease_bytes: int
    other_bytes: int
    limit_bytes: int
    floor_bytes: int
    weight: float
    wanted_bytes: int
    mapped_bytes: int
    owned_bytes: int
    cached_bytes: int
    parked_bytes: int
    retired_bytes: int
    handles_bytes: int
    quarantined_bytes: int

    @property
    def is_alive(self) -> bool:
        return self.state != "dead"

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values, "limit_bytes": None if self.limit_bytes >= NO_LIMIT_BYTES else self.limit_bytes}


@dataclass(frozen=True, slots=True)
class CardRow:
    """A card with its pools. `problem` is not empty when its record could not be read."""

    uuid: str
    name: str
    total_bytes: int
    budget_bytes: int
    leased_bytes: int
    free_bytes: int
    over_bytes: int
    short_bytes: int
    problem: str
    pools: tuple[PoolRow, ...]

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "pools": [pool.to_json() for pool in self.pools]}


def read_cards(run_dir: Path) -> list[CardRow]:
    """All cards of the run directory; none when it does not exist."""
    return [_card_row(snapshot, time.monotonic_ns()) for snapshot in Card.list_cards(run_dir)]


def _card_row(snapshot: CardSnapshot, now_ns: int) -> CardRow:
    groups: dict[tuple[str, bool], list[EntryView]] = {}
    for entry in snapshot.entries:
        shown = entry if entry.alive else replace(entry, record=without_memory(entry.record))
        groups.setdefault((entry.instance, entry.alive), []).append(shown)
    return CardRow(
        uuid=snapshot.identity.uuid,
        name=snapshot.identity.name,
        total_bytes=snapshot.identity.total_bytes,
        budget_bytes=snapshot.budget_bytes,
        leased_bytes=snapshot.leased_bytes,
        free_bytes=snapshot.free_bytes,
        over_bytes=snapshot.over_bytes,
        short_bytes=snapshot.short_bytes,
        problem=snapshot.problem,
        pools=tuple(_pool_row(snapshot.identity.uuid, groups[key], now_ns) for key in sorted(groups)),
    )


def _pool_row(card: str, entries: Sequence[EntryView], now_ns: int) -> PoolRow:
    kv = [entry for entry in entries if entry.kind is Kind.KV]
    shown = (kv or list(entries))[0]
    limits = [entry.record.limit_bytes for entry in kv] or [NO_LIMIT_BYTES]
    usages = [entry.usage for entry in kv]
    return PoolRow(
        instance=shown.instance,
        name=shown.name,
        card=card,
        state=_state(entries),
        pids=tuple(sorted({entry.record.pid for entry in entries})),
        ranks=len(kv),
        endpoint=next((entry.endpoint for entry in entries if entry.endpoint), ""),
        lease_bytes=sum(entry.record.lease_bytes for entry in kv),
        other_bytes=sum(entry.record.lease_bytes for entry in entries if entry.kind is not Kind.KV),
        limit_bytes=min(NO_LIMIT_BYTES, sum(limits)),
        floor_bytes=sum(entry.record.floor_bytes for entry in entries),
        weight=shown.record.weight,
        wanted_bytes=sum(entry.record.waiting_bytes(now_ns) for entry in kv),
        mapped_bytes=sum(usage.mapped_bytes for usage in usages),
        owned_bytes=sum(usage.owned_bytes for usage in usages),
        cached_bytes=sum(usage.cached_bytes for usage in usages),
        parked_bytes=sum(usage.parked_bytes for usage in usages),
        retired_bytes=sum(usage.retired_bytes for usage in usages),
        handles_bytes=sum(usage.handles_bytes for usage in usages),
        quarantined_bytes=sum(usage.quarantined_bytes for usage in usages),
    )


def _state(entries: Sequence[EntryView]) -> str:
    if not entries[0].alive:
        return "dead"
    return "live" if all(entry.known_version for entry in entries) else "other version"


@dataclass(frozen=True, slots=True)
class Target:
    """One instance as it was found: its rows (one per card) and its control endpoint."""

    instance: str
    rows: tuple[PoolRow, ...]
    budget_bytes: int
    endpoint: Path

    @property
    def is_alive(self) -> bool:
        return any(row.is_alive for row in self.rows)

    def client(self, timeout_s: float) -> ControlClient:
        return ControlClient(self.endpoint, timeout_s)

    def bytes_of(self, amount: Amount, client: ControlClient) -> int:
        """A share is of the card's budget. A pool whose card cannot be read just now knows it too."""
        return amount.of(self.budget_bytes or client.status().budget_bytes) if amount.is_percent else amount.of(0)


def find(run_dir: Path, instance: str) -> Target:
    """The instance of that name. Raises `NoSuchPool` with the names there are."""
    cards = read_cards(run_dir)
    found = [(card, row) for card in cards for row in card.pools if row.instance == instance]
    if not found and not _has_socket(run_dir, instance):
        raise NoSuchPool(f"no pool named {instance!r}; {_names_there_are(run_dir, cards)}")
    best = [(card, row) for card, row in found if row.is_alive] or found
    endpoint = next((Path(row.endpoint) for _, row in best if row.endpoint), endpoint_path(run_dir, instance))
    return Target(instance, tuple(row for _, row in best), min((card.budget_bytes for card, _ in best), default=0), endpoint)


def _has_socket(run_dir: Path, instance: str) -> bool:
    return INSTANCE_PATTERN.fullmatch(instance) is not None and endpoint_path(run_dir, instance).is_socket()


def _names_there_are(run_dir: Path, cards: Sequence[CardRow]) -> str:
    names = sorted({row.instance for card in cards for row in card.pools})
    return f"there are: {', '.join(names)}" if names else f"there are no pools in run directory {run_dir}"


def pid_at(endpoint: Path) -> int:
    """The process that listens at `endpoint`, in this process's own numbering. Raises `PeerLost`, `PeerRefused`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(endpoint))
        except OSError as error:
            raise PeerLost(f"nobody answers at {endpoint}: {error}") from None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if pid <= 0:
        raise PeerRefused(f"the process at {endpoint} is in another PID namespace; end it there")
    return int(pid)
