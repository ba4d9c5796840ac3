# SPDX-License-Identifier: Apache-2.0
"""The card against simple models: a slot under torn writes, and leases under everything that entries may do."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvcached.card import Card, CardIdentity, Entry, EntrySpec, Kind
from kvcached.card.locks import slot_byte
from kvcached.card.record import EMPTY, SLOT_BYTES, Record, decode_slot, encode_slot, slot_copy_offset
from kvcached.errors import PeerRefused

BUDGET = 60
SIZES = st.integers(1, 40)


class SlotUnderTornWrites(RuleBasedStateMachine):
    """Writers that may die in any write; the next one goes on from what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = bytearray(SLOT_BYTES)
        self.allowed = {EMPTY}
        self.meant: set[Record] = set()  # by writers that died since the last whole write; see kvcached.card.record

    def read(self) -> Record:
        return decode_slot(bytes(self.raw), 0, SLOT_BYTES)

    @rule(lease=st.integers(0, 1 << 60), name=st.binary(max_size=9).filter(lambda text: not text.endswith(b"\0")))
    def write(self, lease: int, name: bytes) -> None:
        new = Record(sequence=self.read().sequence + 1, kind=Kind.KV, lease_bytes=lease, name=name)
        self._put(new, range(len(encode_slot(new))))
        self.allowed = {new}
        self.meant.clear()

    @rule(lease=st.integers(0, 1 << 60), arrived=st.sets(st.integers(0, 427)) | st.integers(0, 428).map(range))
    def die_writing(self, lease: int, arrived: set[int] | range) -> None:
        before = self.read()
        new = Record(sequence=before.sequence + 1, kind=Kind.KV, lease_bytes=lease)
        self._put(new, arrived)
        self.meant.add(new)
        self.allowed = {before, *self.meant}
        assert self.read() in self.allowed
        self.allowed = {self.read()}

    def _put(self, record: Record, indices: set[int] | range) -> None:
        copy, offset = encode_slot(record), slot_copy_offset(record, SLOT_BYTES)
        for index in indices:
            self.raw[offset + index] = copy[index]

    @invariant()
    def the_last_whole_record_is_read(self) -> None:
        assert self.read() in self.allowed


@dataclass
class Model:
    entry: Entry
    limit: int
    floor: int
    lease: int = 0
    ownable: int = 0

    @property
    def committed(self) -> int:
        return max(self.floor, self.ownable)


class CardOfManyEntries(RuleBasedStateMachine):
    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.now_s = 1.0
        self.card = self.open()
        self.live: list[Model] = []
        self.names = 0

    def open(self) -> Card:
        identity = CardIdentity("GPU-1", "a card", 1000)
        return Card.open(self.root / "run", identity, budget_bytes=BUDGET, settle_s=0, clock=lambda: self.now_s)

    def others(self, model: Model) -> list[Model]:
        return [other for other in self.live if other is not model]

    @rule(target=entries, floor=st.integers(0, 30), room=st.integers(0, 60))
    def register(self, floor: int, room: int) -> Model | None:
        self.names += 1
        fits = sum(model.floor for model in self.live) + floor <= BUDGET
        try:
            entry = self.card.register(EntrySpec(Kind.KV, f"i{self.names}", limit_bytes=floor + room, floor_bytes=floor))
        except PeerRefused:
            assert not fits
            return None
        assert fits
        self.live.append(Model(entry, floor + room, floor))
        return self.live[-1]

    @rule(model=entries, delta=SIZES, owned=st.booleans())
    def lease(self, model: Model | None, delta: int, owned: bool) -> None:
        if model not in self.live or model is None:
            return
        self.now_s += 2  # no ticket is left to respect
        fits = model.lease + delta <= model.limit and sum(other.lease for other in self.live) + delta <= BUDGET
        fits = fits and (not owned or sum(other.committed for other in self.others(model)) + model.ownable + delta <= BUDGET)
        assert model.entry.lease(delta, owned=owned).granted == fits
        if fits:
            model.lease += delta
            model.ownable += delta if owned else 0

    @rule(model=entries, delta=SIZES)
    def lease_with_a_ticket(self, model: Model | None, delta: int) -> None:
        if model in self.live and model is not None and model.entry.lease(delta, owned=True, want=True).granted:
            model.lease += delta
            model.ownable += delta

    @rule(model=entries, delta=SIZES)
    def own(self, model: Model | None, delta: int) -> None:
        if model in self.live and model is not None and delta <= model.lease - model.ownable and model.entry.own(delta).granted:
            model.ownable += delta

    @rule(model=entries, delta=SIZES)
    def give_back(self, model: Model | None, delta: int) -> None:
        if model in self.live and model is not None:
            delta = min(delta, model.lease)
            model.entry.unlease(delta)
            model.lease -= delta
            model.ownable = min(model.ownable, model.lease)

    @rule(model=entries, delta=SIZES)
    def disown(self, model: Model | None, delta: int) -> None:
        if model in self.live and model is not None:
            delta = min(delta, model.ownable)
            model.entry.disown(delta)
            model.ownable -= delta

    @rule(model=entries, floor=st.integers(0, 30))
    def change_the_floor(self, model: Model | None, floor: int) -> None:
        if model not in self.live or model is None or floor > model.limit:
            return
        fits = floor <= model.floor or sum(other.floor for other in self.others(model)) + floor <= BUDGET
        try:
            model.entry.set_limits(floor_bytes=floor)
        except PeerRefused:
            assert not fits
        else:
            assert fits
            model.floor = floor

    @rule(model=consumes(entries))
    def close(self, model: Model | None) -> None:
        if model in self.live and model is not None:
            model.entry.close()
            self.live.remove(model)

    @rule(model=consumes(entries))
    def die(self, model: Model | None) -> None:
        """What the kernel does at a process's death."""
        if model in self.live and model is not None:
            model.entry._segment.file.unlock(slot_byte(model.entry.slot))
            self.live.remove(model)

    @rule(order=st.randoms(use_true_random=False))
    def lose_the_run_directory(self, order: object) -> None:
        shutil.rmtree(self.root / "run")
        for model in sorted(self.live, key=lambda _: order.random()):  # type: ignore[attr-defined]
            assert model.entry.heartbeat()
        if not self.live:
            self.card = self.open()

    @invariant()
    def leases_never_pass_the_budget(self) -> None:
        assert sum(model.lease for model in self.live) <= BUDGET

    @invariant()
    def the_file_says_what_the_model_says(self) -> None:
        snapshot = self.card.snapshot()
        shown = sorted((view.record.lease_bytes, view.record.ownable_bytes, view.record.floor_bytes) for view in snapshot.live)
        assert shown == sorted((model.lease, model.ownable, model.floor) for model in self.live)
        assert all(model.entry.lease_bytes == model.lease for model in self.live)

    def teardown(self) -> None:
        for model in self.live:
            model.entry.close()
        shutil.rmtree(self.root)


TestSlotUnderTornWrites = SlotUnderTornWrites.TestCase
TestSlotUnderTornWrites.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCardOfManyEntries = CardOfManyEntries.TestCase
TestCardOfManyEntries.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
