# SPDX-License-Identifier: Apache-2.0
"""A card as one looks at it: totals are computed here, stored nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.card.budget import over_bytes, short_bytes
from kvcached.card.locks import slot_byte
from kvcached.card.record import VERSION, CardIdentity, Kind, Record, Usage, text_of, usage_of
from kvcached.card.segment import Damaged, Segment, card_paths, open_existing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class EntryView:
    """One entry. `alive`: the kernel holds its process's lock. A dead entry counts against the budget until it is reclaimed."""

    slot: int
    alive: bool
    record: Record

    @property
    def kind(self) -> Kind:
        return Kind(self.record.kind)

    @property
    def instance(self) -> str:
        return text_of(self.record.instance)

    @property
    def name(self) -> str:
        return text_of(self.record.name)

    @property
    def endpoint(self) -> str:
        return text_of(self.record.endpoint)

    @property
    def usage(self) -> Usage:
        return usage_of(self.record)

    @property
    def known_version(self) -> bool:
        """False: written by another version; only lease, floor and ownable bytes are known."""
        return self.record.version == VERSION


@dataclass(frozen=True, slots=True)
class CardSnapshot:
    """A card at one instant; `consistent` is false when writers never paused and the entries are of different instants.

    `problem` is not empty when the file could not be read; there are no entries then.
    """

    path: Path
    identity: CardIdentity
    budget_bytes: int
    settling: bool
    entries: tuple[EntryView, ...]
    consistent: bool = True
    problem: str = ""

    @property
    def live(self) -> tuple[EntryView, ...]:
        return tuple(entry for entry in self.entries if entry.alive)

    @property
    def leased_bytes(self) -> int:
        return sum(entry.record.lease_bytes for entry in self.live)

    @property
    def held_bytes(self) -> int:
        return sum(entry.usage.held_bytes for entry in self.live)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.leased_bytes)

    @property
    def over_bytes(self) -> int:
        return over_bytes((entry.record for entry in self.live), self.budget_bytes)

    @property
    def short_bytes(self) -> int:
        return short_bytes((entry.record for entry in self.live), self.budget_bytes)


def look(segment: Segment, now_ns: Callable[[], int]) -> CardSnapshot:
    """Read a card without any lock. Raises `Damaged`."""
    header, records, consistent = segment.read_consistent()
    entries = tuple(
        EntryView(slot, segment.file.is_locked(slot_byte(slot)), record) for slot, record in enumerate(records) if record.kind != Kind.NONE
    )
    return CardSnapshot(
        path=segment.path,
        identity=CardIdentity(header.uuid, header.name, header.total_bytes),
        budget_bytes=header.budget_bytes,
        settling=header.settling(now_ns()),
        entries=entries,
        consistent=consistent,
    )


def list_cards(run_dir: Path, now_ns: Callable[[], int]) -> list[CardSnapshot]:
    """All cards of a run directory. Takes no lock and registers nothing: for tools."""
    return [_look_at(path, now_ns) for path in card_paths(run_dir)]


def _look_at(path: Path, now_ns: Callable[[], int]) -> CardSnapshot:
    try:
        return look(open_existing(path), now_ns)
    except (Damaged, OSError) as error:
        return CardSnapshot(path, CardIdentity(path.stem, "", 0), 0, settling=False, entries=(), consistent=False, problem=str(error))
