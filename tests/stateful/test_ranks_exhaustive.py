# SPDX-License-Identifier: Apache-2.0
"""Every order of events for one transaction of each kind, with one fault anywhere: loss, repetition, an early reminder, a call that
fails, an undo that fails, a device or a process that is lost.

`RANKS_STATES=200000` explores so many states of each case instead of the few that fit into CI.
"""

import os

import pytest

from kvcached.testing.ranksim.cluster import Cluster
from kvcached.testing.ranksim.driver import Broken
from kvcached.testing.ranksim.exploration import explore

RUNS = ((0, 1), (1, 1))
FIRST = RUNS[:1]
DEEPER = int(os.environ.get("RANKS_STATES", "0"))


def nothing(cluster):
    pass


def credit(cluster):
    cluster.grow_credit(((1, 1),), False)


def mapped(cluster):
    cluster.map_now(FIRST, False)


def map_two(cluster):
    cluster.map_now(RUNS, False)


def release(cluster):
    cluster.release_credit(((1, 1),))


def shrink_behind_a_step(cluster):
    cluster.run_step(FIRST)
    cluster.shrink(FIRST)


def promise_on_both_channels(cluster):
    cluster.promise(FIRST)
    cluster.run_step(FIRST)
    cluster.flush()


def promise_and_shrink(cluster):
    """The map may come with the step, or with the Prepare that takes the page away again."""
    cluster.promise(FIRST)
    cluster.run_step(FIRST)
    cluster.shrink(FIRST)


def recall_on_both_channels(cluster):
    cluster.promise(FIRST)
    cluster.run_step(FIRST)
    cluster.recall(FIRST[0])
    cluster.flush()


CASES = {
    "acquire": (nothing, credit),
    "map": (nothing, map_two),
    "release": (credit, release),
    "shrink": (mapped, shrink_behind_a_step),
    "promise": (credit, promise_on_both_channels),
    "promise and shrink": (credit, promise_and_shrink),
    "recall": (credit, recall_on_both_channels),
}
WHOLE = [("acquire", 2), ("acquire", 3), ("map", 2), ("release", 2), ("shrink", 2)]
IN_PART = [
    *((case, ranks) for case in ("map", "release", "shrink") for ranks in (3, 4)),
    ("acquire", 4),
    *((case, 2) for case in ("promise", "promise and shrink", "recall")),
]


def run(case, ranks, faults, most, capsys):
    prepare, begin = CASES[case]
    try:
        found = explore(prepare, begin, Cluster([1] * ranks, 4, RUNS), faults=faults, most=most)
    except Broken as error:
        pytest.fail(str(error), pytrace=False)
    with capsys.disabled():
        print(f"\n{case}, {ranks} ranks, {faults} faults: {found}")
    return found


@pytest.mark.parametrize(("case", "ranks"), WHOLE)
def test_every_order_with_one_fault(case, ranks, capsys):
    assert run(case, ranks, 1, 200_000, capsys).complete


@pytest.mark.parametrize("case", CASES)
def test_every_order_without_a_fault(case, capsys):
    assert run(case, 2, 0, 200_000, capsys).complete


@pytest.mark.parametrize(("case", "ranks"), IN_PART)
def test_orders_with_one_fault(case, ranks, capsys):
    found = run(case, ranks, 1, DEEPER or 500, capsys)
    assert found.complete or found.states >= (DEEPER or 500)
