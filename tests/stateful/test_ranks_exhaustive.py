# SPDX-License-Identifier: Apache-2.0
"""Every order of events for one transaction of each kind, with one fault anywhere: loss, repetition, an early reminder, a call that
fails, an undo that fails, a device or a process that is lost.

`RANKS_STATES=200000` explores so many states of the larger cases, which is all there are, instead of the few that fit into CI.
"""

import os

import pytest
import test_ranks_mutants as mutants

from kvcached.testing.ranksim.cluster import Cluster
from kvcached.testing.ranksim.driver import Broken
from kvcached.testing.ranksim.exploration import explore, started, successors

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
WHOLE = [
    *((case, ranks) for case in ("acquire", "map", "release") for ranks in (2, 3, 4)),
    ("shrink", 2),
    ("shrink", 3),
    *((case, 2) for case in ("promise", "promise and shrink", "recall")),
]
IN_PART = [("shrink", 4), ("promise", 3)]
# With nothing left out these are quick enough to be compared.
COMPARED = ("acquire", "map", "release", "shrink", "promise")
# Which of the mutants can be seen with one transaction and one fault, and in which case.
VISIBLE = [
    ("acquire", mutants.FailureIsSuccess),
    ("map", mutants.FailureIsSuccess),
    ("shrink", mutants.UndoFailureIsSwallowed),
    ("shrink", mutants.AbortAfterCommit),
    ("shrink", mutants.UnmapsWithoutWaiting),
    ("recall", mutants.StrandedPagesAreFree),
]


def run(case, ranks, faults, most, cluster_class=Cluster, **options):
    prepare, begin = CASES[case]
    return explore(prepare, begin, cluster_class([1] * ranks, 4, RUNS), faults=faults, most=most, **options)


def shown(case, ranks, faults, most, capsys):
    try:
        found = run(case, ranks, faults, most)
    except Broken as error:
        pytest.fail(str(error), pytrace=False)
    with capsys.disabled():
        print(f"\n{case}, {ranks} ranks, {faults} faults: {found}")
    return found


@pytest.mark.parametrize(("case", "ranks"), WHOLE)
def test_every_order_with_one_fault(case, ranks, capsys):
    assert shown(case, ranks, 1, 200_000, capsys).complete


@pytest.mark.parametrize("case", CASES)
def test_every_order_without_a_fault(case, capsys):
    assert shown(case, 2, 0, 200_000, capsys).complete


@pytest.mark.parametrize(("case", "ranks"), IN_PART)
def test_orders_with_one_fault(case, ranks, capsys):
    found = shown(case, ranks, 1, DEEPER or 500, capsys)
    assert found.complete or found.states >= (DEEPER or 500)


@pytest.mark.parametrize("case", COMPARED)
def test_orders_that_are_left_out_end_nowhere_else(case):
    every, fewer = (run(case, 2, 1, 200_000, reduced=reduced) for reduced in (False, True))
    assert every.complete
    assert fewer.complete
    assert fewer.ends == every.ends
    assert fewer.states < every.states


@pytest.mark.parametrize("case", ["acquire", "map", "release", "shrink"])
def test_states_that_count_as_one_go_on_alike(case):
    """Of every state that is reached twice, what can come next is the same both times."""
    next_keys, twice = {}, 0
    todo = [started(*CASES[case], Cluster([1] * 2, 4, RUNS), faults=1)]
    while todo:
        state = todo.pop()
        after = list(successors(state, reduced=False))
        keys = {each.key() for each in after}
        twice += state.key() in next_keys
        if next_keys.setdefault(state.key(), keys) is keys:
            todo += after
        assert next_keys[state.key()] == keys, str(state.way)
    assert twice > 100


@pytest.mark.parametrize(("case", "mutant"), VISIBLE)
def test_a_mutant_is_found_among_the_orders_that_are_left(case, mutant):
    with pytest.raises(Broken):
        run(case, 2, 1, 200_000, mutants.cluster_with(mutant))
