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
from kvcached.core.reserve import AskingAhead
from kvcached.errors import PeerError
from kvcached.log_lines import fields
from kvcached.runtime.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.card.view import CardSnapshot, EntryView

_log = logging.getLogger("kvcached.pressure")
_LEAST_TIMEOUT_S: Final = 0.05


class Peers:
    """The other pools on the cards that a pool is on, as the records in `run_dir` name them.

    `page_bytes_by_card`: what one page of the pool takes of each card (by uuid), `page_bytes` what the caller's bytes count for it.
    `most_ahead_bytes`: what may be asked for beyond what is wanted, see `AskingAhead`.
    """

    def __init__(
        self, run_dir: Path, page_bytes_by_card: Mapping[str, int], page_bytes: int, instance: str, *, most_ahead_bytes: int = 0
    ) -> None:
        self._run_dir = run_dir
        self._ahead = AskingAhead(most_ahead_bytes)
        self._page_bytes_by_card = page_bytes_by_card
        self._page_bytes = page_bytes
        self._instance = instance

    def press(self, wanted_bytes: int, deadline_s: float) -> int:
        """Ask for `wanted_bytes` on every card that lacks them, cheapest first, within the deadline; and for more, where asks follow each
        other. Returns the bytes that were given back; a peer that does not answer is passed over, and said so."""
        begun_s = time.monotonic()
        more_bytes = self._ahead.more_bytes(begun_s)
        given_bytes = 0
        for snapshot in self._snapshots():
            page_bytes = self._page_bytes_by_card[snapshot.identity.uuid]
            needed_bytes = wanted_bytes * page_bytes // self._page_bytes
            has_room = snapshot.budget_bytes - snapshot.leased_bytes >= needed_bytes
            if has_room and len(self._page_bytes_by_card) > 1:
                continue  # it is another card that is short
            given_bytes += self._press_card(snapshot, needed_bytes, more_bytes * page_bytes // self._page_bytes, begun_s + deadline_s)
        self._ahead.given(given_bytes, begun_s)
        return given_bytes

    def _press_card(self, snapshot: CardSnapshot, wanted_bytes: int, more_bytes: int, end_s: float) -> int:
        """Nobody is asked for `more_bytes` alone."""
        given_bytes = 0
        for entry in self._givers(snapshot, wanted_bytes):
            left_s = end_s - time.monotonic()
            if given_bytes >= wanted_bytes or left_s <= 0:
                break
            given_bytes += self._ask(entry, wanted_bytes + more_bytes - given_bytes, max(_LEAST_TIMEOUT_S, left_s))
        return given_bytes

    def ceiling_bytes(self) -> int | None:
        """The most that this pool can ever hold while the others stay, on the card that allows least; None when no record can be read
        just now."""
        ceilings = []
        for snapshot in self._snapshots():
            records, mine = self._records(snapshot)
            if mine >= 0:
                records[mine] = records[mine]._replace(limit_bytes=snapshot.budget_bytes)  # the own limit is known first-hand
                ceiling = ceiling_bytes(records, mine, snapshot.budget_bytes, owned=True)
                ceilings.append(ceiling * self._page_bytes // self._page_bytes_by_card[snapshot.identity.uuid])
        return min(ceilings, default=None)

    def spare_bytes(self) -> int:
        """What the other pools hold parked or cached beyond their floors, as they last told, in whole pages of this one, on the card with
        least of it; of several cards, those with room for a page are not short.
        """
        pages = [self._spare_pages(snapshot) for snapshot in self._snapshots() if not self._is_other_short(snapshot)]
        return min(pages, default=0) * self._page_bytes

    def _is_other_short(self, snapshot: CardSnapshot) -> bool:
        return len(self._page_bytes_by_card) > 1 and snapshot.free_bytes >= self._page_bytes_by_card[snapshot.identity.uuid]

    def _spare_pages(self, snapshot: CardSnapshot) -> int:
        records, mine = self._records(snapshot)
        others = [record for slot, record in enumerate(records) if slot != mine and record.kind == Kind.KV]
        return sum(_spare_bytes(record) // self._page_bytes_by_card[snapshot.identity.uuid] for record in others)

    def _records(self, snapshot: CardSnapshot) -> tuple[list[Record], int]:
        """All live records by slot, and the slot of this pool, -1 when it is not there. Ranks that share a card count as one."""
        by_slot = {entry.slot: entry for entry in snapshot.live}
        records = [by_slot[slot].record if slot in by_slot else Record() for slot in range(max(by_slot, default=-1) + 1)]
        mine = [slot for slot, entry in by_slot.items() if entry.instance == self._instance and entry.kind is Kind.KV]
        for slot in mine[1:]:
            records[mine[0]] = records[mine[0]]._replace(lease_bytes=records[mine[0]].lease_bytes + records[slot].lease_bytes)
            records[slot] = Record()
        return records, mine[0] if mine else -1

    def _givers(self, snapshot: CardSnapshot, wanted_bytes: int) -> list[EntryView]:
        """Those that the record says can give, cheapest first, then the rest: what they published may be a moment old."""
        by_slot = {entry.slot: entry for entry in snapshot.live}
        records, mine = self._records(snapshot)
        by_cost = [demand.slot for demand in demands(records, mine, wanted_bytes, snapshot.budget_bytes, time.monotonic_ns())]
        above_floor = [
            slot
            for slot, record in enumerate(records)
            if slot != mine and record.kind == Kind.KV and record.lease_bytes > record.floor_bytes
        ]
        by_endpoint: dict[str, EntryView] = {}  # one owner answers for all its ranks
        for slot in (*by_cost, *above_floor):
            by_endpoint.setdefault(by_slot[slot].endpoint, by_slot[slot])
        return list(by_endpoint.values())

    def _snapshots(self) -> list[CardSnapshot]:
        return [card for card in Card.list_cards(self._run_dir) if card.identity.uuid in self._page_bytes_by_card]

    def _ask(self, entry: EntryView, size_bytes: int, timeout_s: float) -> int:
        if not entry.endpoint:
            return 0
        try:
            given_bytes = ControlClient(Path(entry.endpoint), timeout_s).pressure(size_bytes).given_bytes
        except PeerError as error:
            _log.warning(
                "%s did not give memory back: %s",
                entry.instance,
                error,
                extra=fields("gave_nothing", giver=entry.instance, asker=self._instance, wanted_bytes=size_bytes, reason=str(error)),
            )
            return 0
        level = logging.INFO if given_bytes else logging.DEBUG  # one that had nothing is no event
        facts = fields("gave_back", giver=entry.instance, asker=self._instance, given_bytes=given_bytes, wanted_bytes=size_bytes)
        words = (entry.instance, given_bytes, self._instance, size_bytes)
        _log.log(level, "%s gave %d bytes back to %s, which asked for %d", *words, extra=facts)
        return given_bytes


def _spare_bytes(record: Record) -> int:
    keeps_bytes = record.parked_bytes + record.handles_bytes + record.cached_bytes
    return min(keeps_bytes, max(0, record.lease_bytes - record.floor_bytes))
