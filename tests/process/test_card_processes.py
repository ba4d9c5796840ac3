# SPDX-License-Identifier: Apache-2.0
"""Leases among real processes: killed, stopped, forked, in other namespaces, of other users, with their files deleted."""

from __future__ import annotations

import os
import random
import socket
import time
from typing import TYPE_CHECKING

import pytest
from card_workers import BUDGET, IDENTITY, TIMEOUT_S, Plan, Worker, start, workers
from deletion import delete_at_once

from kvcached.card import Card, CardSnapshot, Entry, EntrySpec, Kind, Refusal
from kvcached.errors import PeerLost, PeerRefused, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LONG_S = 5.0
"""For a new file to settle: longer than it takes two processes to enter it, however busy the machine."""
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change namespaces and users")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def observer(run_dir: Path) -> Iterator[Card]:
    with Card.open(run_dir, IDENTITY, budget_bytes=BUDGET, settle_s=0) as card:
        yield card


def enter(card: Card, instance: str = "observer") -> Entry:
    return card.register(EntrySpec(Kind.KV, instance))


def look(card: Card) -> CardSnapshot:
    """A snapshot that keeps the one promise."""
    snapshot = card.snapshot()
    assert not snapshot.consistent or snapshot.leased_bytes <= BUDGET, snapshot
    return snapshot


def leases(card: Card) -> dict[str, int]:
    return {view.instance: view.record.lease_bytes for view in look(card).live}


def eventually(true: Callable[[], bool], within_s: float = TIMEOUT_S) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.005)


def both_ask(card: Card, pair: list[Worker]) -> bool:
    """Or one of them has done so: before that, what one holds says nothing about how they share."""
    return min(leases(card).values()) > 0 or any(worker.connection.poll(0) for worker in pair)


def test_two_processes_share_a_card_fairly_and_never_pass_its_budget(run_dir: Path, observer: Card) -> None:
    held = {"a": 0, "b": 0}
    with workers(Plan(run_dir, "a"), Plan(run_dir, "b")) as pair:
        for seed, worker in enumerate(pair):
            worker.send("churn", 5000, 60, seed)
        eventually(lambda: both_ask(observer, pair))
        consistent = 0
        while not any(worker.connection.poll(0.001) for worker in pair):
            snapshot = look(observer)
            consistent += snapshot.consistent
            for view in snapshot.live:
                held[view.instance] += view.record.lease_bytes
        grants = [worker.answer() for worker in pair]
    assert consistent > 20
    assert min(held.values()) >= 0.4 * sum(held.values()), held
    assert min(grants) >= 0.4 * sum(grants), grants


def test_rounds_of_asking_with_a_holder_killed_in_every_hundredth(run_dir: Path, observer: Card, is_full: bool) -> None:
    """A round: both ask for 60 of 100 pages, one at a time, with random frees."""
    luck = random.Random(11)
    held = {"a": 0, "b": 0}
    for hundred in range(100 if is_full else 3):
        with workers(Plan(run_dir, "a"), Plan(run_dir, "b")) as pair:
            for seed, worker in enumerate(pair):
                worker.send("churn", 100 * 60, 60, 2 * hundred + seed)
            eventually(lambda: both_ask(observer, pair))
            looks = luck.randint(20, 60)
            while looks and not any(worker.connection.poll(0.001) for worker in pair):
                for view in look(observer).live:
                    held[view.instance] += view.record.lease_bytes
                looks -= 1
            victim, other = luck.sample(pair, 2)
            victim.kill()
            eventually(lambda: len(leases(observer)) == 1)
            assert other.answer() > 0  # it went on asking, and got what had been the victim's
    assert min(held.values()) >= 0.4 * sum(held.values()), held


def test_the_lease_of_a_killed_process_is_free_at_once(run_dir: Path, observer: Card) -> None:
    mine = enter(observer)
    luck = random.Random(7)
    for _ in range(10):
        with workers(Plan(run_dir, "victim"), Plan(run_dir, "other")) as (victim, other):
            for worker in (victim, other):
                worker.call("churn_for_ever", BUDGET)
            end_s = time.monotonic() + luck.uniform(0, 0.04)
            while time.monotonic() < end_s:
                look(observer)
            victim.kill()
            look(observer)
            other.kill()
            eventually(lambda: mine.lease(BUDGET, owned=True).granted)
            look(observer)
            mine.unlease(BUDGET)


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_death_in_the_middle_of_any_write_leaves_a_readable_card(run_dir: Path, observer: Card, nth: int, part: float) -> None:
    mine = enter(observer)
    with workers(Plan(run_dir, "victim")) as (victim,):
        assert victim.call("lease", 30).granted
        victim.send("die_at_write", nth, part)
        victim.process.join(TIMEOUT_S)
        assert victim.process.exitcode == -9
        records = {view.instance: view.record.lease_bytes for view in observer.snapshot().entries}
        assert records["victim"] in (30, 35, 10, 80)
    assert mine.lease(BUDGET, owned=True).granted
    assert leases(observer) == {"observer": BUDGET}


@pytest.mark.parametrize("close_all", [False, True])
def test_a_forked_child_has_no_card_and_its_end_leaves_the_parents_alone(run_dir: Path, observer: Card, close_all: bool) -> None:
    mine = enter(observer)
    with workers(Plan(run_dir, "parent")) as (parent,):
        assert parent.call("lease", 30).granted
        assert parent.call("fork", close_all=close_all) == ["Misuse"] * 8 + ["own card: 70", "without the parent's: 70"]
        assert leases(observer)["parent"] == 30
        assert mine.lease(BUDGET, owned=True).grantable_bytes == 70
        assert parent.call("lease", 1).granted


def test_tools_in_a_process_that_holds_leases_do_not_drop_its_locks(run_dir: Path, observer: Card) -> None:
    with workers(Plan(run_dir, "a")) as (a,):
        assert a.call("lease", 30).granted
        assert a.call("tools") == 1
        assert leases(observer) == {"a": 30}
        assert Card.sweep(run_dir).entries == 0
        assert enter(observer).lease(BUDGET, owned=True).grantable_bytes == 70


def test_a_stopped_holder_of_the_lock_costs_the_others_a_miss_and_nothing_else(run_dir: Path, observer: Card) -> None:
    mine = enter(observer)
    assert mine.lease(10, owned=True).granted
    with workers(Plan(run_dir, "a"), Plan(run_dir, "b")) as (a, b):
        assert b.call("lease", 50).granted
        assert a.call("hold_ledger") is True
        a.stop()
        begin_s = time.monotonic()
        assert mine.lease(5, owned=True).refusal is Refusal.BUSY
        assert b.call("lease", 5).refusal is Refusal.BUSY
        mine.unlease(4)
        mine.heartbeat()
        assert leases(observer) == {"observer": 6, "a": 0, "b": 50}
        assert Card.sweep(run_dir, deadline_s=0.01).busy
        assert time.monotonic() - begin_s < TIMEOUT_S
        a.resume()
        a.connection.send("go on")
        assert a.answer() is None
        assert mine.lease(44, owned=True).granted
        assert a.call("lease", 1).refusal is Refusal.BUDGET


def test_processes_stopped_at_any_moment_never_pass_the_budget(run_dir: Path, observer: Card) -> None:
    mine = enter(observer)
    luck = random.Random(3)
    with workers(Plan(run_dir, "a"), Plan(run_dir, "b")) as pair:
        for worker in pair:
            worker.call("churn_for_ever", BUDGET)
        for _ in range(60):
            stopped = luck.choice(pair)
            stopped.stop()
            mine.lease(luck.randint(1, 50), owned=True, deadline_s=0.005)
            look(observer)
            stopped.resume()
            mine.unlease(mine.lease_bytes)
            time.sleep(luck.uniform(0, 0.005))


def test_the_run_directory_may_be_deleted_under_live_processes(run_dir: Path, observer: Card) -> None:
    pair = (Plan(run_dir, "a", heartbeat_s=0.05, settle_s=LONG_S), Plan(run_dir, "b", heartbeat_s=0.05, settle_s=LONG_S))
    with workers(*pair) as (a, b):
        assert a.call("lease", 60).granted
        assert b.call("lease", 40).granted
        for _ in range(5):
            delete_at_once(run_dir)
            newcomer = Card.open(run_dir, IDENTITY, budget_bytes=BUDGET, settle_s=LONG_S)
            entry = enter(newcomer, "newcomer")
            end_s = time.monotonic() + 0.3
            while time.monotonic() < end_s or len(leases(newcomer)) < 3:
                assert not entry.lease(1, owned=True).granted
                look(newcomer)
            assert leases(newcomer) == {"a": 60, "b": 40, "newcomer": 0}
            assert (a.call("lease_bytes"), b.call("lease_bytes")) == (60, 40)
            newcomer.close()
        a.call("unlease", 20)
        eventually(lambda: b.call("lease", 20).granted)


def test_many_processes_may_open_a_card_at_once(run_dir: Path) -> None:
    with workers(*(Plan(run_dir, f"i{index}") for index in range(12))) as crowd:
        assert [path.suffix for path in run_dir.iterdir()] == [".card"]
        for worker in crowd:
            worker.send("lease", 15)
        granted = [worker.answer() for worker in crowd]
        (snapshot,) = Card.list_cards(run_dir)
        assert len(snapshot.live) == 12
        assert snapshot.leased_bytes == 15 * sum(result.granted for result in granted) <= BUDGET


def test_two_engines_that_start_together_never_hold_more_than_the_budget(run_dir: Path) -> None:
    with workers(Plan(run_dir, "a", floor=5), Plan(run_dir, "b", floor=5)) as (a, b):
        observer = Card.open(run_dir, IDENTITY, budget_bytes=0)
        a.send("churn", 400, 76, 1)
        b.send("churn", 400, 76, 2)
        while not (a.connection.poll(0.001) and b.connection.poll(0)):
            look(observer)
        assert min(a.answer(), b.answer()) > 0


def test_engines_that_disagree_about_the_budget_are_told_so(run_dir: Path) -> None:
    with workers(Plan(run_dir, "a", budget=90)):
        b = start(Plan(run_dir, "b", budget=95))
        with pytest.raises(SettingError, match=r"95 B was asked for.* 90 B"):
            b.answer()
        b.kill()
    with workers(Plan(run_dir, "b", budget=95)):
        assert Card.list_cards(run_dir)[0].budget_bytes == 95


def test_an_instance_name_is_taken_while_its_holder_lives_and_starts_clean_after(run_dir: Path, observer: Card) -> None:
    with workers(Plan(run_dir, "a"), Plan(run_dir, "b")) as (a, b):
        assert a.call("lease", 60).granted
        assert b.call("lease", 40).granted
        with pytest.raises(PeerRefused, match="'a' rank 0 is on this card already"):
            enter(observer, "a")
        a.kill()
        assert leases(observer) == {"b": 40}
        with workers(Plan(run_dir, "a")) as (again,):
            assert again.call("lease_bytes") == 0
            assert again.call("lease", 60).granted
            assert b.call("lease", 1).refusal is Refusal.BUDGET
            assert leases(observer) == {"a": 60, "b": 40}


def test_a_process_that_dies_waiting_holds_nobody_up(run_dir: Path, observer: Card) -> None:
    mine = enter(observer)
    assert mine.lease(90, owned=True).granted
    with workers(Plan(run_dir, "a")) as (a,):
        assert not a.call("lease", 50, want=True).granted
        assert mine.lease(1, owned=True).refusal is Refusal.TURN
        a.kill()
        assert mine.lease(1, owned=True).granted


def test_a_hundred_starts_and_kills_leave_nothing_after_the_janitor(run_dir: Path) -> None:
    for index in range(25):
        crew: list[Worker] = [start(Plan(run_dir, f"i{index}-{n}", endpoint=str(run_dir / f"{index}-{n}.sock"))) for n in range(4)]
        for worker in crew[: index % 5]:
            worker.answer()
        for worker in crew:
            worker.kill()
    Card.sweep(run_dir, remove_idle=True, abandoned_after_s=0)
    assert list(run_dir.iterdir()) == []


def test_the_socket_of_a_dead_process_goes_with_its_entry(run_dir: Path, observer: Card) -> None:
    mine = enter(observer)
    path = run_dir / "owner.sock"
    with workers(Plan(run_dir, "owner", endpoint=str(path))) as (owner,):
        assert owner.call("lease", 10).granted
        owner.kill()
        assert path.exists()
        assert mine.lease(BUDGET, owned=True).granted
        assert not path.exists()


def test_the_socket_of_a_live_owner_stays_when_its_mapper_dies(run_dir: Path, observer: Card) -> None:
    mine = enter(observer)
    path = run_dir / "owner.sock"
    with socket.socket(socket.AF_UNIX) as owner, workers(Plan(run_dir, "mapper", endpoint=str(path), listens=False)) as (mapper,):
        owner.bind(str(path))
        owner.listen()
        assert mapper.call("lease", 10).granted
        mapper.kill()
        assert mine.lease(BUDGET, owned=True).granted
        assert path.exists()


def test_a_socket_stays_while_another_live_entry_names_it(run_dir: Path, observer: Card) -> None:
    mine = enter(observer)
    path = run_dir / "owner.sock"
    plans = [Plan(run_dir, name, endpoint=str(path), listens=False) for name in ("rank 0", "rank 1")]
    with socket.socket(socket.AF_UNIX) as owner, workers(*plans) as (first, second):
        owner.bind(str(path))
        for worker, stays in ((first, True), (second, False)):
            assert worker.call("lease", 10).granted
            worker.kill()
            assert mine.lease(BUDGET, owned=True).granted
            assert path.exists() is stays
            mine.unlease(BUDGET)


def test_a_socket_outside_the_run_directory_is_not_ours_to_remove(run_dir: Path, tmp_path: Path, observer: Card) -> None:
    mine = enter(observer)
    path = tmp_path / "outside.sock"
    with workers(Plan(run_dir, "owner", endpoint=str(path))) as (owner,):
        assert owner.call("lease", 10).granted
        owner.kill()
        assert mine.lease(BUDGET, owned=True).granted
        assert path.exists()


@pytest.mark.root
@ROOT_ONLY
def test_processes_in_two_pid_namespaces_share_a_card(run_dir: Path, observer: Card) -> None:
    try:
        _share_across_pid_namespaces(run_dir, observer)
    except PermissionError as error:
        pytest.skip(f"this machine lets nobody make namespaces: {error}")


def _share_across_pid_namespaces(run_dir: Path, observer: Card) -> None:
    with workers(Plan(run_dir, "a", pid_namespace=True), Plan(run_dir, "b", pid_namespace=True)) as (a, b):
        assert a.call("getpid") == b.call("getpid") == 1
        assert a.call("lease", 60).granted
        assert b.call("lease", 41).grantable_bytes == 40
        assert leases(observer) == {"a": 60, "b": 0}
        assert Card.sweep(run_dir).entries == 0
        a.kill()
        eventually(lambda: b.call("lease", BUDGET).granted)
        assert leases(observer) == {"b": BUDGET}


@pytest.mark.root
@ROOT_ONLY
def test_two_users_of_one_group_share_a_card(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        parent.chmod(parent.stat().st_mode | 0o011)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    os.chown(run_dir, 0, 4321)
    run_dir.chmod(0o2770)
    plans = [Plan(run_dir, name, uid=uid, gid=4321, group_mode=True) for name, uid in (("a", 4001), ("b", 4002))]
    with workers(*plans) as (a, b):
        assert a.call("lease", 60).granted
        assert b.call("lease", 41).grantable_bytes == 40
        a.kill()
        eventually(lambda: b.call("lease", BUDGET).granted)
    stranger = start(Plan(run_dir, "stranger", uid=4003, gid=4003, group_mode=True))
    with pytest.raises(PeerLost, match="cannot open the card's file"):
        stranger.answer()
    stranger.kill()


@pytest.mark.root
@ROOT_ONLY
def test_a_file_that_one_may_only_read_is_shown_but_not_used(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        parent.chmod(parent.stat().st_mode | 0o011)
    run_dir = tmp_path / "run"
    with Card.open(run_dir, IDENTITY, budget_bytes=BUDGET, settle_s=0) as card:
        entry = enter(card)
        run_dir.chmod(0o755)
        card.snapshot().path.chmod(0o644)
        reader = start(Plan(run_dir, "reader", uid=4003, gid=4003))
        with pytest.raises(PeerLost, match="cannot open the card's file"):
            reader.answer()
        reader.kill()
        assert entry.lease(BUDGET, owned=True).granted
