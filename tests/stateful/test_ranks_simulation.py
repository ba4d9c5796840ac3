# SPDX-License-Identifier: Apache-2.0
"""Owner and mappers under every kind of fault, in schedules drawn from seeds. A seed that fails is printed so that it runs alone."""

import json
from pathlib import Path

import pytest

from kvcached.testing.ranksim.driver import Broken
from kvcached.testing.ranksim.simulation import Profile, Simulation

REGRESSIONS = sorted((Path(__file__).parent / "ranks_regressions").glob("*.json"))
SIZES = [(ranks, stages) for ranks in (1, 2, 4, 8) for stages in (1, 2, 4)]


def replay(case):
    profile = Profile(**case["profile"]) if "profile" in case else None
    return Simulation(case["seed"], case["ranks"], case["stages"], case.get("events", 0), profile)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_once_failed_does_not_fail_again(path):
    replay(json.loads(path.read_text(encoding="utf-8"))).run()


@pytest.mark.parametrize(("ranks", "stages"), SIZES)
def test_the_ranks_never_differ(ranks, stages, capsys):
    events = settled = failed = 0
    seeds = 150 if ranks * stages <= 8 else 50
    for seed in range(seeds):
        simulation = Simulation(seed, ranks, stages)
        try:
            events += simulation.run()
        except Broken as error:
            case = json.dumps({"seed": seed, "ranks": ranks, "stages": stages})
            pytest.fail(f"{error}\nto replay it, put this into ranks_regressions/NAME.json: {case}")
        settled += simulation.cluster.settled
        failed += simulation.cluster.failed
    with capsys.disabled():
        print(f"\n{ranks} ranks x {stages} stages: {events} events checked, {settled} transactions, {failed} of {seeds} pools failed")
    assert settled > seeds  # it did something
    assert failed < seeds * 0.7  # and most of it was not the end


def test_the_same_seed_is_the_same_run():
    first, second = Simulation(5, 2, 2), Simulation(5, 2, 2)
    assert first.run() == second.run()
    assert first.now_s == second.now_s
    assert first.cluster.book.states == second.cluster.book.states
