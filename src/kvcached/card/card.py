# SPDX-License-Identifier: Apache-2.0
"""The card as a pool uses it: open it, register, look.

with Card.open(run_dir, identity, budget_bytes=40 * GIB) as card:
    entry = card.register(EntrySpec(Kind.KV, instance="chat", limit_bytes=40 * GIB, floor_bytes=2 * GIB))
    if entry.lease(64 * MIB, owned=True).granted: ...
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.card.entry import Entry, Home
from kvcached.card.record import UUID_CHARS, CardIdentity, EntrySpec, Header, Kind, fresh_record, new_header
from kvcached.card.registry import Swept, check_welcome, enrol, reclaim, settle_budget, sweep
from kvcached.card.segment import Access, Segment, card_path, open_existing
from kvcached.card.view import CardSnapshot, list_cards, look
from kvcached.errors import PeerLost, PeerTimeout, SettingError
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_SETTLE_S: Final = 2.0
_OPEN_DEADLINE_S: Final = 1.0


class Card:
    """One card's shared record. Safe to use from any thread; after a fork every call in the child raises `Misuse`."""

    def __init__(self, home: Home, segment: Segment, asked_budget_bytes: int, total_bytes: int) -> None:
        """Use `open`."""
        self._home = home
        self._opened = segment.file
        self._asked_budget_bytes = asked_budget_bytes
        self._total_bytes = total_bytes
        self._entries: list[Entry] = []
        self._guard = threading.Lock()

    @classmethod
    def open(
        cls,
        run_dir: Path,
        identity: CardIdentity,
        *,
        budget_bytes: int,
        margin_bytes: int = 0,
        measure_free: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        group_mode: bool = False,
        settle_s: float = _SETTLE_S,
        deadline_s: float = _OPEN_DEADLINE_S,
    ) -> Card:
        """Open the card's file in `run_dir`, or make it.

        `budget_bytes` 0 takes the budget that is there, or all of the card for the first opener. A new file grants floors only for
        `settle_s`, since live processes of a deleted one may still have to register again; 0 is right where that cannot be.
        `measure_free` returns the device's free bytes; `margin_bytes` of them are left alone.

        Raises `SettingError` (budget, run directory), `PeerTimeout` (the ledger lock), `PeerLost` (the file cannot be made).
        """
        if not 0 <= budget_bytes <= identity.total_bytes:
            raise SettingError(
                f"budget is {format_size(budget_bytes)}; allowed are 0 to the card's {format_size(identity.total_bytes)} ({identity.name})"
            )
        if not 0 < len(identity.uuid.encode()) <= UUID_CHARS:
            raise SettingError(f"the card's uuid is {identity.uuid!r}; it needs 1 to {UUID_CHARS} bytes")
        first_budget_bytes = budget_bytes or identity.total_bytes

        def make_header() -> Header:
            return new_header(identity, first_budget_bytes, int((clock() + settle_s) * 1e9))

        home = Home(card_path(Path(run_dir).absolute(), identity.uuid), Access(group_mode), make_header, measure_free, margin_bytes, clock)
        segment = home.open()
        card = cls(home, segment, budget_bytes, identity.total_bytes)
        if segment.header().uuid != identity.uuid:
            raise SettingError(f"{segment.path} belongs to card {segment.header().uuid}, not to {identity.uuid}")
        if budget_bytes not in (0, segment.header().budget_bytes):
            card._with_ledger(deadline_s, lambda _: None)
        return card

    @property
    def run_dir(self) -> Path:
        return self._home.path.parent

    def register(self, spec: EntrySpec, *, adopt_lease_bytes: int = 0, deadline_s: float = _OPEN_DEADLINE_S) -> Entry:
        """Enter the card. `adopt_lease_bytes` is memory that is held already: it is counted even where it passes the budget.

        Raises `PeerRefused` (table full, floor does not fit, same kind, instance and rank alive), `SettingError` (spec, budget),
        `PeerTimeout`.
        """
        self._opened.check_process()
        newcomer = fresh_record(spec, os.getpid(), adopt_lease_bytes)
        entry: list[Entry] = []

        def enter(segment: Segment) -> None:
            header, records = segment.read()
            check_welcome([record for record in records if record.kind != Kind.NONE], newcomer, header.budget_bytes)
            entry.append(Entry(self._home, segment, *enrol(segment, header, records, newcomer)))

        self._with_ledger(deadline_s, enter)
        with self._guard:
            self._entries.append(entry[0])
        return entry[0]

    def snapshot(self) -> CardSnapshot:
        """The card now, read without a lock. Raises `PeerLost` when the file is gone and nothing has made it again."""
        self._opened.check_process()
        try:
            return look(open_existing(self._home.path), self._home.now_ns)
        except OSError as error:
            raise PeerLost(f"cannot read the card's file {self._home.path}: {error.strerror}") from error

    @staticmethod
    def list_cards(run_dir: Path, clock: Callable[[], float] = time.monotonic) -> list[CardSnapshot]:
        """All cards of a run directory; registers nothing and takes no lock."""
        return list_cards(Path(run_dir).absolute(), lambda: int(clock() * 1e9))

    @staticmethod
    def sweep(run_dir: Path, *, remove_idle: bool = False, deadline_s: float = 0.1, abandoned_after_s: float = 10.0) -> Swept:
        """The janitor: entries, sockets and files that dead processes left; with `remove_idle` also cards that nobody uses."""
        return sweep(Path(run_dir).absolute(), remove_idle=remove_idle, deadline_s=deadline_s, abandoned_after_s=abandoned_after_s)

    def close(self) -> None:
        """Close all entries. A second call does nothing."""
        self._opened.check_process()
        with self._guard:
            entries, self._entries = self._entries, []
        for entry in entries:
            entry.close()

    def __enter__(self) -> Card:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _with_ledger(self, deadline_s: float, body: Callable[[Segment], None]) -> None:
        """Run `body` under the ledger lock of the current file, dead entries reclaimed and the budget agreed."""
        end_s = time.monotonic() + deadline_s
        while True:
            segment = self._home.open()
            with segment.file.ledger(end_s - time.monotonic()) as held:
                if not held:
                    raise PeerTimeout(f"the ledger lock of {segment.path} was not free within {deadline_s} s")
                if not segment.is_current():
                    if time.monotonic() > end_s:
                        raise PeerTimeout(f"{segment.path} was replaced again and again for {deadline_s} s")
                    continue
                header, records = segment.read()
                reclaim(segment, header, records)
                alone = all(record.kind == Kind.NONE for record in records)
                settle_budget(segment, self._asked_budget_bytes, self._total_bytes, alone=alone)
                body(segment)
                return
