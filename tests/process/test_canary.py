# SPDX-License-Identifier: Apache-2.0
"""The canary over real processes that take memory from each other: nothing is ever wrong, and what is made wrong is found and named."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_pools_on_one_card import MIB, World, wait_until

from kvcached.errors import PeerError

BLOCK = 48 * 1024  # tiles no page with its stamp: some ids straddle
BUDGET = 24 * MIB
TO_BE_SEEN = ("taken", "misses", "touched", "evicted")  # by each of the processes, however busy the machine is


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.stop()


def start(world, name, **settings):
    return world.start(name, blocks=512, block_bytes=BLOCK, budget=str(BUDGET), canary=True, **settings)


class Disturber:
    """Changes limits of those that live, and kills the one that is to die, wherever they are in their work."""

    def __init__(self, world, lasting, seed):
        self.world = world
        self.lasting = lasting
        self.luck = random.Random(seed)
        self.kills = self.limits = 0
        self.mortal = None

    def disturb(self):
        if self.mortal is None:
            self.mortal = start(self.world, f"mortal-{self.kills}")
            self.mortal.tell("churn", 1 << 30, self.luck.random())
        for process in self.lasting:
            self._limit(process)
        time.sleep(0.02)  # they need the processor that this asks for them
        if self._owns_something(self.mortal):
            self.mortal.kill()
            self.mortal, self.kills = None, self.kills + 1

    def _limit(self, process):
        try:
            self.world.client(process).limit(self.luck.choice((2, 6, 12, 24)) * MIB)
            self.limits += 1
        except PeerError:  # it takes steps all the time: it may not hear in time
            pass

    def _owns_something(self, process):
        assert process.process.poll() is None, process.process.stderr.read()
        try:
            status = self.world.client(process).status()
        except PeerError:
            return False
        assert status.state != "refusing", status.reason
        return status.owned_bytes > 0


@pytest.mark.timeout(900)
def test_no_byte_is_wrong_while_processes_take_memory_from_each_other(world, is_full):
    rounds = 4_000 if is_full else 80
    lasting = [start(world, "first"), start(world, "second", zero_backing="used")]
    disturber = Disturber(world, lasting, seed=1)
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(process.ask, "churn", rounds, seed, TO_BE_SEEN) for seed, process in enumerate(lasting)]
        while not all(answer.done() for answer in answers) or disturber.kills < 2 or not disturber.limits:
            disturber.disturb()
    for answer in answers:
        counts = answer.result()
        assert counts.get("wrong_bytes") == 0, counts
        assert counts["checks"] > counts["taken"]
    wait_until(lambda: world.snapshot().leased_bytes <= BUDGET)


def test_a_write_with_a_wrong_stride_is_found_and_named(world):
    process = start(world, "stray")
    other = start(world, "other")
    wait_until(lambda: "error" not in process.ask("take", 4) and "error" not in other.ask("take", 4))
    answer = process.ask("write_with_a_wrong_stride")
    assert answer["error"] == "InvariantBroken"
    assert f"canary: pool {process.instance}, block 0 of generation 1, page 0: 256 of 256 bytes were overwritten" in answer["message"]
    assert "ab ab ab ab" in answer["message"]
    assert "canary" in process.ask("take", 1)["message"]
    other.ask("churn", 1, 1)
    assert "error" not in other.ask("take", 1)
