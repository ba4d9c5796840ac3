# SPDX-License-Identifier: Apache-2.0
"""A card in one process: opening, registering, leases, limits, a file that is deleted or damaged."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kvcached.card import NO_LIMIT_BYTES, Card, CardIdentity, Entry, EntrySpec, Kind, Refusal, Usage
from kvcached.card.record import HEADER_BYTES, SLOT_BYTES, SLOTS, Header, Record, encode_slot, new_header
from kvcached.card.segment import Access, Segment, open_or_create
from kvcached.errors import Misuse, PeerLost, PeerRefused, PeerTimeout, SettingError

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = CardIdentity("GPU-8c1f", "a card", 1000)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def card(run_dir: Path, clock: Clock) -> Card:
    return open_card(run_dir, clock)


def open_card(run_dir: Path, clock: Clock, budget: int = 100, **how: object) -> Card:
    return Card.open(run_dir, IDENTITY, budget_bytes=budget, clock=clock, settle_s=0, **how)  # type: ignore[arg-type]


def spec(instance: str = "a", **words: object) -> EntrySpec:
    return EntrySpec(Kind.KV, instance, **words)  # type: ignore[arg-type]


def granted(entry: Entry, delta: int, **how: object) -> bool:
    return entry.lease(delta, owned=True, **how).granted  # type: ignore[arg-type]


def test_leases_of_all_entries_together_never_pass_the_budget(card: Card) -> None:
    a, b = card.register(spec("a")), card.register(spec("b"))
    assert granted(a, 60)
    refused = b.lease(41, owned=True)
    assert (refused.granted, refused.grantable_bytes, refused.refusal) == (False, 40, Refusal.BUDGET)
    assert granted(b, 40)
    assert not granted(a, 1)
    a.unlease(10)
    assert granted(b, 10)
    assert (a.lease_bytes, b.lease_bytes) == (50, 50)
    assert card.snapshot().leased_bytes == 100


def test_a_snapshot_shows_what_was_registered_and_published(card: Card) -> None:
    entry = card.register(spec("chat", name="llama", endpoint="/x/y.sock", limit_bytes=80, floor_bytes=7, weight=2.0, rank=3))
    entry.lease(20, owned=False)
    entry.publish(Usage(mapped_bytes=16, parked_bytes=4, handles_bytes=2, virtual_bytes=500))
    snapshot = card.snapshot()
    (view,) = snapshot.entries
    assert (view.kind, view.instance, view.name, view.endpoint, view.alive, view.known_version) == (
        Kind.KV,
        "chat",
        "llama",
        "/x/y.sock",
        True,
        True,
    )
    assert (view.record.limit_bytes, view.record.floor_bytes, view.record.weight, view.record.rank) == (80, 7, 2.0, 3)
    assert (view.record.lease_bytes, view.record.ownable_bytes, view.record.pid) == (20, 0, os.getpid())
    assert view.usage == Usage(mapped_bytes=16, parked_bytes=4, handles_bytes=2, virtual_bytes=500)
    assert snapshot.identity == IDENTITY
    assert (snapshot.budget_bytes, snapshot.held_bytes, snapshot.free_bytes, snapshot.consistent) == (100, 18, 80, True)
    assert Card.list_cards(card.run_dir)[0].entries == snapshot.entries


def test_registration_names_what_is_wrong(card: Card) -> None:
    card.register(spec("a", floor_bytes=60))
    with pytest.raises(PeerRefused, match="'a' rank 0 is on this card already"):
        card.register(spec("a"))
    with pytest.raises(PeerRefused, match="a floor of 41 B does not fit: 40 B of the card's budget of 100 B"):
        card.register(spec("b", floor_bytes=41))
    card.register(spec("b", floor_bytes=40))
    card.register(spec("a", rank=1))
    card.register(EntrySpec(Kind.OTHER, "a"))


def test_a_full_table_is_a_named_refusal(card: Card) -> None:
    for index in range(SLOTS):
        card.register(spec(f"i{index}"))
    with pytest.raises(PeerRefused, match=f"{SLOTS} of {SLOTS} entries"):
        card.register(spec("one too many"))
    assert len(card.snapshot().live) == SLOTS


def test_weights_that_are_loaded_already_are_counted_whatever_they_are(card: Card) -> None:
    pool = card.register(spec("a"))
    assert granted(pool, 60)
    weights = card.register(EntrySpec(Kind.OTHER, "b"), adopt_lease_bytes=70)
    assert weights.lease_bytes == 70
    assert card.snapshot().over_bytes == 30
    assert pool.lease(1, owned=True).grantable_bytes == 0
    with pytest.raises(PeerRefused, match="31 B does not fit: 30 B"):
        card.register(spec("c", floor_bytes=31))


def test_the_first_opener_sets_the_budget(run_dir: Path, clock: Clock, card: Card) -> None:
    entry = card.register(spec())
    with pytest.raises(SettingError, match=r"200 B was asked for.* budget of 100 B"):
        open_card(run_dir, clock, budget=200)
    assert open_card(run_dir, clock, budget=0).snapshot().budget_bytes == 100
    entry.close()
    assert open_card(run_dir, clock, budget=200).snapshot().budget_bytes == 200
    open_card(run_dir, clock, budget=200).register(spec("b"))
    with pytest.raises(SettingError, match="100 B was asked for"):
        card.register(spec())


def test_without_a_budget_the_first_opener_takes_the_whole_card(run_dir: Path, clock: Clock) -> None:
    assert open_card(run_dir, clock, budget=0).snapshot().budget_bytes == 1000
    with pytest.raises(SettingError, match="allowed are 0 to the card's 1000 B"):
        open_card(run_dir, clock, budget=1001)


def test_a_file_of_another_card_is_refused(run_dir: Path, clock: Clock, card: Card) -> None:
    os.rename(card.snapshot().path, card.run_dir / "GPU-other.card")
    with pytest.raises(SettingError, match="belongs to card GPU-8c1f, not to GPU-other"):
        Card.open(run_dir, CardIdentity("GPU-other", "x", 1000), budget_bytes=0)


def test_odd_card_names_make_safe_file_names(run_dir: Path, clock: Clock) -> None:
    Card.open(run_dir, CardIdentity("MIG-GPU/../1:2", "x", 1000), budget_bytes=0)
    assert [path.name for path in run_dir.iterdir()] == ["MIG-GPU%2F..%2F1%3A2.card"]
    with pytest.raises(SettingError, match="uuid"):
        Card.open(run_dir, CardIdentity("u" * 65, "x", 1000), budget_bytes=0)


def test_the_run_directory_is_private(run_dir: Path, clock: Clock, card: Card) -> None:
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(card.snapshot().path.stat().st_mode) == 0o600
    assert [path.suffix for path in run_dir.iterdir()] == [".card"]
    run_dir.chmod(0o770)
    with pytest.raises(SettingError, match="nobody else can write to"):
        open_card(run_dir, clock)


def test_a_group_may_share_a_run_directory_by_setting(run_dir: Path, clock: Clock) -> None:
    card = open_card(run_dir, clock, group_mode=True)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o2770
    assert stat.S_IMODE(card.snapshot().path.stat().st_mode) == 0o660
    run_dir.chmod(0o777)
    with pytest.raises(SettingError, match="only its group can write to"):
        open_card(run_dir, clock, group_mode=True)


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PeerLost, match="cannot open"):
        open_card(tmp_path / "file" / "run", clock)


def test_the_devices_free_memory_less_the_margin_bounds_a_lease(run_dir: Path, clock: Clock) -> None:
    free = 50
    card = open_card(run_dir, clock, measure_free=lambda: free, margin_bytes=20)
    entry = card.register(spec())
    assert entry.lease(31, owned=True).refusal is Refusal.DEVICE
    assert granted(entry, 30)
    free = 19
    assert entry.lease(1, owned=True).grantable_bytes == 0


def test_a_new_file_grants_floors_only_for_a_while(run_dir: Path, clock: Clock) -> None:
    card = Card.open(run_dir, IDENTITY, budget_bytes=100, clock=clock)
    entry = card.register(spec(floor_bytes=10))
    assert card.snapshot().settling
    assert entry.lease(11, owned=True).refusal is Refusal.SETTLING
    assert granted(entry, 10)
    clock.now_s += 2.1
    assert granted(entry, 90)
    assert not card.snapshot().settling


def test_a_new_file_grants_more_when_the_device_is_measured_to_be_unused(run_dir: Path, clock: Clock) -> None:
    used = 0
    card = Card.open(run_dir, IDENTITY, budget_bytes=100, clock=clock, measure_free=lambda: 1000 - used)
    a, b = card.register(spec("a")), card.register(spec("b", floor_bytes=5))
    assert granted(a, 70)
    used = 25
    refused = a.lease(6, owned=True)
    assert (refused.grantable_bytes, refused.refusal) == (5, Refusal.SETTLING)
    assert granted(b, 5)
    used = 200
    assert a.lease(1, owned=True).refusal is Refusal.SETTLING
    clock.now_s += 2.1
    assert granted(a, 25)


def test_one_who_waits_goes_first_until_it_stops_asking(card: Card, clock: Clock) -> None:
    a, b = card.register(spec("a")), card.register(spec("b"))
    assert granted(a, 90)
    assert not granted(b, 30, want=True)
    assert b.record.wanted_bytes == 30
    assert a.lease(5, owned=True, want=True).refusal is Refusal.TURN
    assert a.record.ticket > b.record.ticket > 0
    a.unlease(20)
    assert not granted(a, 1)
    assert granted(b, 30)
    assert (b.record.wanted_bytes, b.record.ticket) == (0, 0)
    a.unlease(5)
    assert granted(a, 5)
    a.unlease(10)
    assert not granted(b, 30, want=True)
    assert not granted(a, 1)
    clock.now_s += 1.1
    assert granted(a, 1), "a ticket that nobody renews must not hold others up"
    assert not granted(b, 30, want=True)
    b.unwant()
    assert granted(a, 1)


def test_a_ticket_keeps_its_place_when_its_holder_asks_again(card: Card) -> None:
    a, b, c = (card.register(spec(name)) for name in "abc")
    assert granted(c, 100)
    assert not granted(a, 30, want=True)
    assert not granted(b, 30, want=True)
    assert not granted(a, 20, want=True)
    assert a.record.wanted_bytes == 20
    assert 0 < a.record.ticket < b.record.ticket
    c.unlease(30)
    assert not granted(b, 30, want=True)
    assert granted(a, 10)
    assert a.record.wanted_bytes == 10
    assert granted(a, 10)
    assert a.record.ticket == 0


def test_what_nobody_else_can_cure_leaves_no_ticket(card: Card) -> None:
    entry = card.register(spec(limit_bytes=50))
    assert entry.lease(51, owned=True, want=True).refusal is Refusal.LIMIT
    assert entry.record.ticket == 0
    other = card.register(spec("b", floor_bytes=60))
    assert entry.lease(41, owned=True, want=True).refusal is Refusal.NEVER
    assert entry.record.ticket == 0
    other.close()


def test_lent_floors_are_for_parked_and_cached_pages(card: Card) -> None:
    a, b = card.register(spec("a")), card.register(spec("b", floor_bytes=40))
    assert granted(a, 30)
    assert a.lease(70, owned=False).granted
    assert (a.lease_bytes, a.ownable_bytes) == (100, 30)
    assert a.own(31).refusal is Refusal.NEVER
    assert a.own(30).granted
    assert b.lease(40, owned=True).refusal is Refusal.BUDGET
    a.unlease(40)
    assert a.ownable_bytes == 60, "the floor came back without a single owned byte of the other"
    assert granted(b, 40)
    a.disown(20)
    assert granted(b, 0 + 1) is False
    assert (a.lease_bytes, a.ownable_bytes) == (60, 40)
    a.unlease(60)
    assert a.ownable_bytes == 0


def test_bad_numbers_are_misuse(card: Card) -> None:
    entry = card.register(spec())
    assert granted(entry, 10)
    for call in (
        lambda: entry.lease(0, owned=True),
        lambda: entry.lease(-1, owned=False),
        lambda: entry.unlease(11),
        lambda: entry.unlease(-1),
        lambda: entry.disown(11),
        lambda: entry.own(1),
        lambda: entry.own(0),
    ):
        with pytest.raises(Misuse):
            call()
    assert (entry.lease_bytes, entry.ownable_bytes) == (10, 10)


def test_limits_change_live_and_a_raised_floor_must_fit(card: Card) -> None:
    a, b = card.register(spec("a", floor_bytes=20)), card.register(spec("b", floor_bytes=30))
    a.set_limits(limit_bytes=50, weight=3.0, revision=7)
    assert a.lease(51, owned=True).refusal is Refusal.LIMIT
    assert (a.record.limit_bytes, a.record.floor_bytes, a.record.weight, a.record.revision) == (50, 20, 3.0, 7)
    with pytest.raises(PeerRefused, match="71 B does not fit: 70 B"):
        a.set_limits(limit_bytes=100, floor_bytes=71)
    assert a.record.limit_bytes == 50
    a.set_limits(limit_bytes=100, floor_bytes=70)
    with pytest.raises(SettingError, match="0 <= floor <= limit"):
        b.set_limits(limit_bytes=10)
    b.set_limits(floor_bytes=0, limit_bytes=NO_LIMIT_BYTES)
    a.set_limits(floor_bytes=90)
    with a._segment.file.ledger(0), pytest.raises(PeerTimeout):
        b.set_limits(floor_bytes=5, deadline_s=0.01)


def test_closing_gives_the_lease_back_and_ends_all_use(card: Card) -> None:
    a, b = card.register(spec("a")), card.register(spec("b"))
    assert granted(a, 100)
    a.close()
    a.close()
    assert granted(b, 100)
    for call in (lambda: a.lease(1, owned=True), lambda: a.lease_bytes, lambda: a.publish(Usage()), a.heartbeat, a.unwant):
        with pytest.raises(Misuse, match="closed"):
            call()
    with card:
        pass
    assert card.snapshot().entries == ()
    assert granted(card.register(spec("a")), 100)


def test_a_busy_lock_is_a_miss_within_the_deadline(card: Card) -> None:
    entry = card.register(spec())
    with entry._segment.file.ledger(0) as held:
        assert held
        assert entry.lease(1, owned=True, deadline_s=0.01).refusal is Refusal.BUSY
        with pytest.raises(PeerTimeout):
            card.register(spec("b"), deadline_s=0.01)
        entry.publish(Usage(mapped_bytes=1))
        entry.unlease(0)
    assert granted(entry, 1)


def test_a_deleted_run_directory_comes_back_with_the_true_values(card: Card, run_dir: Path) -> None:
    a, b = card.register(spec("a", floor_bytes=5)), card.register(spec("b"))
    assert granted(a, 60)
    assert b.lease(40, owned=False).granted
    shutil.rmtree(run_dir)
    with pytest.raises(PeerLost, match="cannot read"):
        card.snapshot()
    assert a.heartbeat()
    assert not a.heartbeat()
    assert b.heartbeat()
    assert sorted((view.instance, view.record.lease_bytes, view.record.ownable_bytes) for view in card.snapshot().live) == [
        ("a", 60, 60),
        ("b", 40, 0),
    ]
    assert not granted(a, 1)
    b.unlease(40)
    assert granted(a, 40)


def test_a_lease_after_the_deletion_is_granted_in_the_new_file(card: Card, run_dir: Path) -> None:
    a, b = card.register(spec("a")), card.register(spec("b"))
    assert granted(a, 60)
    shutil.rmtree(run_dir)
    assert b.lease(30, owned=True).granted
    assert a.lease(20, owned=True).refusal is Refusal.BUDGET
    assert card.snapshot().leased_bytes == 90


def test_a_file_that_went_away_during_a_lease_takes_the_grant_with_it(card: Card, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = card.register(spec())
    store = entry._store
    written: list[int] = []

    def store_and_delete(record: Record) -> None:
        store(record)
        written.append(record.lease_bytes)
        if len(written) == 1:
            shutil.rmtree(run_dir)

    monkeypatch.setattr(entry, "_store", store_and_delete)
    assert granted(entry, 10)
    assert written == [10, 0, 10], "granted in the old file, undone, granted in the new one"
    assert card.snapshot().leased_bytes == entry.lease_bytes == 10


@pytest.mark.parametrize("damage", ["truncate", "overwrite"])
def test_a_damaged_file_is_replaced_like_a_deleted_one(run_dir: Path, clock: Clock, damage: str) -> None:
    card = Card.open(run_dir, IDENTITY, budget_bytes=100, clock=clock)
    a, b = card.register(spec("a")), card.register(spec("b"))
    clock.now_s += 2.1
    assert granted(a, 60)
    path = card.snapshot().path
    path.write_bytes(b"" if damage == "truncate" else b"x" * (HEADER_BYTES + SLOTS * SLOT_BYTES))
    assert Card.list_cards(card.run_dir)[0].problem
    assert b.lease(1, owned=True).refusal is Refusal.SETTLING
    assert a.heartbeat()
    clock.now_s += 2.1
    assert b.lease(41, owned=True).grantable_bytes == 40
    assert granted(b, 40)
    assert [view.record.lease_bytes for view in card.snapshot().live] == [40, 60]


def test_a_new_opener_replaces_a_damaged_file(card: Card, run_dir: Path, clock: Clock) -> None:
    card.snapshot().path.write_bytes(b"junk")
    assert granted(open_card(run_dir, clock).register(spec()), 100)


def test_a_heartbeat_mends_an_entry_that_was_overwritten_and_nothing_is_granted_meanwhile(card: Card) -> None:
    a, b = card.register(spec("a")), card.register(spec("b"))
    assert granted(a, 60)
    with open(os.open(card.snapshot().path, os.O_RDWR), "r+b", closefd=False) as file:
        file.seek(HEADER_BYTES)
        file.write(b"\xff" * SLOT_BYTES)
    assert b.lease(1, owned=True).refusal is Refusal.UNREADABLE
    assert not a.heartbeat()
    assert b.lease(41, owned=True).grantable_bytes == 40


def test_another_version_is_counted_and_reclaimed_when_dead(card: Card) -> None:
    entry = card.register(spec())
    foreign = Record(version=9, sequence=1, lease_bytes=70, ownable_bytes=70, kind=Kind.KV)
    header, _ = entry._segment.read()
    entry._segment.write_header(header._replace(sequence=header.sequence + 1, high_slots=2))
    header, _ = entry._segment.read()
    entry._segment.write_slot(header, 1, foreign)
    assert entry._segment.file.try_lock(2)
    assert len(encode_slot(foreign)) < SLOT_BYTES // 2
    assert entry.lease(31, owned=True).grantable_bytes == 30
    assert not card.snapshot().entries[1].known_version
    entry._segment.file.unlock(2)
    assert granted(entry, 100)


def test_a_run_directory_that_cannot_come_back_is_a_miss_and_the_lease_stays(card: Card, run_dir: Path) -> None:
    entry = card.register(spec())
    assert granted(entry, 10)
    shutil.rmtree(run_dir)
    run_dir.write_text("in the way")
    assert entry.lease(1, owned=True).refusal is Refusal.LOST
    with pytest.raises(PeerLost):
        entry.heartbeat()
    assert entry.lease_bytes == 10
    run_dir.unlink()
    assert entry.heartbeat()
    assert granted(entry, 90)


def test_the_janitor_removes_what_nobody_uses(card: Card, run_dir: Path) -> None:
    entry = card.register(spec(endpoint=str(run_dir / "live.sock")))
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as unnamed:
        live.bind(str(run_dir / "live.sock"))
        dead.bind(str(run_dir / "dead.sock"))
        unnamed.bind(str(run_dir / "unnamed.sock"))
        unnamed.listen()
        (run_dir / ".new-0123").write_bytes(b"")
        (run_dir / "notes.txt").write_text("not ours")
        assert Card.sweep(run_dir).files == (), "young files may still be in the making"
        swept = Card.sweep(run_dir, remove_idle=True, abandoned_after_s=0)
        assert sorted(path.name for path in swept.files) == [".new-0123", "dead.sock"]
        entry.close()
        swept = Card.sweep(run_dir, remove_idle=True, abandoned_after_s=0)
        assert sorted(path.name for path in swept.files) == ["GPU-8c1f.card", "live.sock"]
        assert sorted(path.name for path in run_dir.iterdir()) == ["notes.txt", "unnamed.sock"]


def test_the_janitor_does_not_wait_for_a_busy_card(card: Card, run_dir: Path) -> None:
    entry = card.register(spec())
    with entry._segment.file.ledger(0):
        assert Card.sweep(run_dir, remove_idle=True, deadline_s=0.01).busy == (card.snapshot().path,)


def test_a_card_whose_file_the_janitor_removed_is_made_again_by_the_next_registration(card: Card, run_dir: Path) -> None:
    Card.sweep(run_dir, remove_idle=True)
    assert list(run_dir.iterdir()) == []
    assert granted(card.register(spec()), 100)


def test_files_that_nobody_uses_are_closed_and_locked_ones_are_not(run_dir: Path, clock: Clock) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # what earlier tests have left is not closed in between
    entry = open_card(run_dir, clock).register(spec())
    before = descriptors()
    for _ in range(20):
        shutil.rmtree(run_dir)
        assert Card.list_cards(run_dir) == []
        assert entry.heartbeat()
        assert len(Card.list_cards(run_dir)[0].live) == 1
    assert descriptors() == before
    del entry
    assert len(Card.list_cards(run_dir)[0].live) == 1, "a lock that nobody gave back stays"
    assert descriptors() == before


def test_threads_of_one_process_exclude_each_other(card: Card) -> None:
    entries = [card.register(spec(f"i{index}")) for index in range(3)]
    seen: list[int] = []

    def work(entry: Entry) -> None:
        for _ in range(150):
            if entry.lease(40, owned=True, deadline_s=5.0).granted:
                snapshot = card.snapshot()
                seen.append(snapshot.leased_bytes if snapshot.consistent else 0)
                entry.unlease(40)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, entries * 2))
    assert max(seen) <= 100
    assert [entry.lease_bytes for entry in entries] == [0, 0, 0]


def test_of_two_that_make_the_file_at_once_the_first_wins(run_dir: Path) -> None:
    path, access, header = run_dir / "x.card", Access(group=False), new_header(IDENTITY, 100, 0)
    first: list[Segment] = []

    def make_late() -> Header:
        first.append(open_or_create(path, access, lambda: header))
        return header._replace(budget_bytes=7)

    second = open_or_create(path, access, make_late)
    assert second.file is first[0].file
    assert second.is_current()
    assert second.header().budget_bytes == 100
    assert [entry.name for entry in run_dir.iterdir()] == ["x.card"]
