# SPDX-License-Identifier: Apache-2.0
"""Asking the other pools of a card to give memory back."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.card.budget import ceiling_bytes
from kvcached.card.card import Card
from kvcached.card.pressure import demands
from kvcached.card.record import Kind, Record
from kvcached.errors import PeerError
from kvcached.runtime.control import ControlClient

if TYPE_CHECKING:
    from kvcached.card.view import CardSnapshot, EntryView

_log = logging.getLogger("kvcached.pressure")
_LEAST_TIMEOUT_S: Final = 0.05


class Peers:
    """The other pools on the card `card_uuid`, as its record in `run_dir` names them."""

    def __init__(self, run_dir: Path, card_uuid: str, instance: str) -> None:
        self._run_dir = run_dir
        self._card_uuid = card_uuid
        self._instance = instance

    def press(self, wanted_bytes: int, deadline_s: float) -> int:
        """Ask for `wanted_bytes`, cheapest first, within the deadline. Returns the bytes that were given back; a peer that does not
        answer is passed over, and said so."""
        end_s = time.monotonic() + deadline_s
        given_bytes = 0
        for entry in self._givers(wanted_bytes):
            left_s = end_s - time.monotonic()
            if given_bytes >= wanted_bytes or left_s <= 0:
                break
            given_bytes += self._ask(entry, wanted_bytes - given_bytes, max(_LEAST_TIMEOUT_S, left_s))
        return given_bytes

    def ceiling_bytes(self) -> int | None:
        """The most that this pool can ever hold while the others stay; None when the record cannot be read just now."""
        snapshot = self._snapshot()
        if snapshot is None:
            return None
        records, mine = self._records(snapshot)
        if mine < 0:
            return None
        records[mine] = records[mine]._replace(limit_bytes=snapshot.budget_bytes)  # the own limit is known first-hand
        return ceiling_bytes(records, mine, snapshot.budget_bytes, owned=True)

    def _records(self, snapshot: CardSnapshot) -> tuple[list[Record], int]:
        """All live records by slot, and the slot of this pool, -1 when it is not there."""
        by_slot = {entry.slot: entry for entry in snapshot.live}
        records = [by_slot[slot].record if slot in by_slot else Record() for slot in range(max(by_slot, default=-1) + 1)]
        mine = (slot for slot, entry in by_slot.items() if entry.instance == self._instance and entry.kind is Kind.KV)
        return records, next(mine, -1)

    def _givers(self, wanted_bytes: int) -> list[EntryView]:
        """Those that the record says can give, cheapest first, then the rest: what they published may be a moment old."""
        snapshot = self._snapshot()
        if snapshot is None:
            return []
        by_slot = {entry.slot: entry for entry in snapshot.live}
        records, mine = self._records(snapshot)
        by_cost = [demand.slot for demand in demands(records, mine, wanted_bytes, snapshot.budget_bytes)]
        above_floor = [
            slot
            for slot, record in enumerate(records)
            if slot != mine and record.kind == Kind.KV and record.lease_bytes > record.floor_bytes
        ]
        return [by_slot[slot] for slot in dict.fromkeys([*by_cost, *above_floor])]

    def _snapshot(self) -> CardSnapshot | None:
        cards = (card for card in Card.list_cards(self._run_dir) if card.identity.uuid == self._card_uuid)
        return next(cards, None)

    def _ask(self, entry: EntryView, size_bytes: int, timeout_s: float) -> int:
        if not entry.endpoint:
            return 0
        try:
            given_bytes = ControlClient(Path(entry.endpoint), timeout_s).pressure(size_bytes).given_bytes
        except PeerError as error:
            _log.warning("%s did not give memory back: %s", entry.instance, error)
            return 0
        _log.info("%s gave %d bytes back to %s, which asked for %d", entry.instance, given_bytes, self._instance, size_bytes)
        return given_bytes
