# SPDX-License-Identifier: Apache-2.0
"""Real pools in real processes on one host card: sharing, pressure, limits, and every way to die."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deletion import delete_at_once

from kvcached.card.card import Card
from kvcached.card.locks import LEDGER_BYTE
from kvcached.runtime.control import ControlClient
from kvcached.testing.stopping import stop_process

MIB = 1 << 20
PAGE = 2 * MIB
CHILD = Path(__file__).with_name("pool_child.py")
GROUP = 4321
WAIT_S = 60.0
SETTLED_S = 2.3  # a new card file grants only what is unused until then


class Process:
    def __init__(self, world, name, *, blocks=128, block_bytes=MIB, prefix=(), pool=None, uid=None, **settings):
        card = {
            "run_dir": str(world.run_dir),
            "host_dir": str(world.host_dir),
            "host_capacity_bytes": 128 * MIB,
            "host_granularity_bytes": 65536,
            "budget": "100MiB",
            "idle_trim_s": 30.0,
            "prealloc_enabled": False,
            "handle_cache_mb": 0,
            "large_run_mb": 0,
            **settings,
        }
        options = json.dumps({"card": card, "name": name, "blocks": blocks, "block_bytes": block_bytes, "pool": pool or {}, "uid": uid})
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(CHILD), options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        first = json.loads(line)
        self.pid, self.instance = first["pid"], first["instance"]

    def ask(self, name, *arguments):
        self.tell(name, *arguments)
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def tell(self, name, *arguments):
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


class World:
    def __init__(self, folder):
        self.run_dir = folder / "run"
        self.host_dir = folder / "host"
        self.processes = []

    def start(self, name, **options):
        process = Process(self, name, **options)
        self.processes.append(process)
        return process

    def snapshot(self):
        (snapshot,) = Card.list_cards(self.run_dir)
        assert snapshot.problem == ""
        return snapshot

    def client(self, process):
        return ControlClient(self.run_dir / "pools" / f"{process.instance}.sock", 10)

    def stop_between_leases(self, process):
        """SIGSTOP, while it does not hold the card's lock: then others would miss until it goes on."""
        stopped = False
        with self.snapshot().path.open("rb+") as file:
            while not stopped:
                stop_process(process.pid)
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, LEDGER_BYTE)
                    stopped = True
                except BlockingIOError:
                    os.kill(process.pid, signal.SIGCONT)
                    time.sleep(0.01)

    def stop(self):
        for process in self.processes:
            if process.process.poll() is None:
                process.kill()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.stop()


def keeps(parked_bytes):
    """Settings with which so much stays parked; without them what is given back goes with the keeper's next tick."""
    pages = parked_bytes // PAGE
    return {"prealloc_enabled": True, "min_reserved_pages": pages, "max_reserved_pages": pages}


def take_eventually(process, blocks):
    """A miss is an engine's cue to ask again: on a busy machine a peer may answer too late for one deadline."""
    answer = process.ask("take", blocks)
    end = time.monotonic() + WAIT_S
    while "error" in answer:
        assert answer["error"] == "PoolExhausted", answer
        assert time.monotonic() < end, answer
        answer = process.ask("take", blocks)
    return answer


def wait_until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def test_a_starving_pool_makes_the_other_give_its_parked_memory(world):
    first, second = world.start("first", **keeps(80 * MIB)), world.start("second")
    time.sleep(SETTLED_S)
    take_eventually(first, 80)
    first.ask("give")
    assert first.ask("stats")["parked_bytes"] >= 80 * MIB
    assert take_eventually(second, 80)["owned_bytes"] == 80 * MIB
    assert world.snapshot().leased_bytes <= 100 * MIB


def test_a_cached_prefix_that_fills_the_card_makes_room_for_a_second_engine(world):
    first = world.start("first")
    time.sleep(SETTLED_S)
    take_eventually(first, 100)
    first.ask("cache")
    assert world.snapshot().leased_bytes == 100 * MIB
    second = world.start("second", pool={"floor": 8 * MIB})
    assert take_eventually(second, 60)["owned_bytes"] == 60 * MIB
    assert first.ask("stats")["cached_bytes"] <= 40 * MIB
    assert world.snapshot().leased_bytes <= 100 * MIB


def test_what_is_owned_is_never_taken(world):
    first, second = world.start("first"), world.start("second")
    time.sleep(SETTLED_S)
    take_eventually(first, 90)
    answer = second.ask("take", 20)
    assert answer["error"] == "PoolExhausted"
    assert "first" in first.instance
    assert first.ask("stats")["owned_bytes"] == 90 * MIB


def test_kill_9_frees_the_lease_for_the_other(world):
    first, second = world.start("first"), world.start("second")
    time.sleep(SETTLED_S)
    take_eventually(first, 90)
    assert second.ask("take", 50)["error"] == "PoolExhausted"
    first.kill()
    wait_until(lambda: "error" not in second.ask("take", 50))
    assert world.snapshot().leased_bytes <= 100 * MIB
    assert {entry.instance for entry in world.snapshot().live} == {second.instance}


def test_a_stopped_process_keeps_its_memory_and_blocks_nobody(world):
    first, second = world.start("first", **keeps(60 * MIB)), world.start("second")
    time.sleep(SETTLED_S)
    take_eventually(first, 60)
    first.ask("give")
    wait_until(lambda: first.ask("stats")["parked_bytes"] == 60 * MIB)
    world.stop_between_leases(first)
    assert second.ask("take", 80)["error"] == "PoolExhausted"  # nobody answers the pressure
    assert "error" not in second.ask("take", 20)
    assert world.snapshot().leased_bytes <= 100 * MIB
    os.kill(first.pid, signal.SIGCONT)
    wait_until(lambda: "error" not in second.ask("take", 60))


def test_a_fork_has_no_pool_and_takes_none_away(world):
    first = world.start("first")
    time.sleep(SETTLED_S)
    take_eventually(first, 30)
    answer = first.ask("fork_and_use")
    assert answer["child_exit"] == answer["calls"]
    assert answer["lease_bytes"] >= 30 * MIB
    assert [entry.instance for entry in world.snapshot().live] == [first.instance]
    assert "error" not in first.ask("take", 10)


def test_the_run_directory_deleted_under_live_pools(world):
    first, second = world.start("first"), world.start("second")
    time.sleep(SETTLED_S)
    take_eventually(first, 50)
    take_eventually(second, 40)
    delete_at_once(world.run_dir)
    wait_until(lambda: len(Card.list_cards(world.run_dir)) == 1 and len(world.snapshot().live) == 2)
    assert world.snapshot().leased_bytes >= 90 * MIB
    assert second.ask("take", 20)["error"] == "PoolExhausted"
    assert world.snapshot().leased_bytes <= 100 * MIB
    wait_until(lambda: (world.run_dir / "pools" / f"{first.instance}.sock").exists())
    assert world.client(first).status().owned_bytes == 50 * MIB
    third = world.start("third")
    assert third.ask("take", 20)["error"] == "PoolExhausted"


@pytest.mark.root
def test_another_pid_namespace_sees_the_same_card(world):
    probe = subprocess.run(["unshare", "-p", "-f", "--mount-proc", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no right to make a PID namespace here: {probe.stderr.decode()}")
    first = world.start("first")
    time.sleep(SETTLED_S)
    take_eventually(first, 60)
    inside = world.start("inside", prefix=("unshare", "-p", "-f", "--mount-proc"))
    assert inside.ask("take", 60)["error"] == "PoolExhausted"
    assert "error" not in inside.ask("take", 30)
    assert world.snapshot().leased_bytes <= 100 * MIB
    assert len(world.snapshot().live) == 2
    inside.ask("close")
    wait_until(lambda: world.snapshot().leased_bytes <= 64 * MIB)


@pytest.mark.root
def test_two_pods_press_each_other_as_two_processes_do(world):
    """Processes, semaphores, networks, names and mounts of their own; common are the run directory and the card."""
    pod = ("unshare", "-p", "-i", "-n", "-u", "-m", "--kill-child", "--mount-proc")
    probe = subprocess.run([*pod, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"no right to make namespaces here: {probe.stderr.decode()}")
    first, second = world.start("first", prefix=pod), world.start("second", prefix=pod)
    time.sleep(SETTLED_S)
    take_eventually(first, 90)
    first.ask("cache")
    assert take_eventually(second, 60)["owned_bytes"] == 60 * MIB, "the first is asked for its cached blocks, over its socket"
    assert world.snapshot().leased_bytes <= 100 * MIB
    answer = world.client(second).limit(20 * MIB)
    assert answer.in_force_bytes == 20 * MIB, "whoever shares the directory can ask"
    second.kill()
    wait_until(lambda: [entry.name for entry in world.snapshot().live] == ["first"])
    assert take_eventually(first, 95)["owned_bytes"] == 95 * MIB, "what the dead pod held"


def test_an_idle_pool_obeys_its_limit_down_and_up_again(world):
    first = world.start("first", max_cached_tokens=-1)
    time.sleep(SETTLED_S)
    take_eventually(first, 90)
    first.ask("cache")
    client = world.client(first)
    answer = client.limit(20 * MIB)
    assert (answer.outcome, answer.in_force_bytes) == ("applied", 20 * MIB)
    assert world.snapshot().leased_bytes <= 20 * MIB
    answer = client.limit(900 * MIB)
    assert (answer.outcome, answer.in_force_bytes) == ("clamped", 100 * MIB)
    assert "error" not in first.ask("take", 95)
    ids = client.explain()
    assert sum(row.size_bytes for row in ids.rows) == client.status().held_bytes


def test_killed_processes_leave_nothing_behind(world):
    world.start("witness")
    for number in range(5):
        world.start(f"mortal-{number}").kill()
    Card.sweep(world.run_dir, abandoned_after_s=0)
    assert sorted(path.name for path in (world.run_dir / "pools").glob("*.sock")) == [f"{world.processes[0].instance}.sock"]
    assert len(world.snapshot().entries) == 1


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change users")
def test_pools_of_two_users_of_one_group_share_a_card(world, tmp_path):
    for folder in (world.run_dir, world.host_dir):
        folder.mkdir()
        os.chown(folder, 0, GROUP)
        folder.chmod(0o2770)
    for parent in [tmp_path, *tmp_path.parents[:3]]:
        parent.chmod(parent.stat().st_mode | 0o011)
    first, second = (world.start(name, uid=uid, run_group=GROUP) for name, uid in (("first", 4001), ("second", 4002)))
    time.sleep(SETTLED_S)
    take_eventually(first, 90)
    assert second.ask("take", 20)["error"] == "PoolExhausted"
    first.ask("give")
    assert take_eventually(second, 80)["owned_bytes"] == 80 * MIB  # first, of another user, gave its parked pages
    assert world.snapshot().leased_bytes <= 100 * MIB
    second.kill()
    assert take_eventually(first, 90)["owned_bytes"] == 90 * MIB
