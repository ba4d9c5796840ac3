# SPDX-License-Identifier: Apache-2.0
"""The card's record, read as `kvctl list` reads it: no lock, no engine asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from examples.demo.series import EngineMemory, Sample

from kvcached.card import Card

if TYPE_CHECKING:
    from pathlib import Path

    from kvcached.card import CardSnapshot, EntryView


def read_sample(run_dir: Path, at_s: float) -> Sample | None:
    """What each engine of the only card in `run_dir` holds now; None when there is no card yet, or no moment could be made out."""
    cards = Card.list_cards(run_dir)
    return sample_of(cards[0], at_s) if cards and cards[0].consistent else None


def sample_of(card: CardSnapshot, at_s: float) -> Sample:
    engines: dict[str, EngineMemory] = {}
    for entry in card.entries:
        engines[entry.instance] = _add(engines.get(entry.instance, EngineMemory()), entry)
    return Sample(at_s, engines)


def _add(memory: EngineMemory, entry: EntryView) -> EngineMemory:
    """A dead entry that nobody has reclaimed yet still counts against the budget, so it counts here."""
    usage = entry.usage
    return EngineMemory(
        lease_bytes=memory.lease_bytes + entry.record.lease_bytes,
        owned_bytes=memory.owned_bytes + usage.owned_bytes,
        cached_bytes=memory.cached_bytes + usage.cached_bytes,
        parked_bytes=memory.parked_bytes + usage.parked_bytes,
        floor_bytes=memory.floor_bytes + entry.record.floor_bytes,
        wanted_bytes=memory.wanted_bytes + entry.record.waiting_bytes(time.monotonic_ns()),
    )
