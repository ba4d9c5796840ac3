# SPDX-License-Identifier: Apache-2.0
"""The states of models, one rule at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvcached.controller.fleet import LONGEST_PAUSE_S, Fleet
from kvcached.controller.states import Admit, Effect, Hurry, Interrupt, Refuse, Removed, Renewed, Sleep, Spec, Start, State, Why
from kvcached.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Callable

A = Spec("a")
B = Spec("b")


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def state(fleet: Fleet, name: str = "a") -> State:
    return fleet.models[name].state


def ready(fleet: Fleet, *names: str, now_s: float = 0.0) -> Fleet:
    for name in names:
        fleet.wish_wake(name, now_s)
        fleet.done(name, fleet.models[name].attempt, now_s)
        assert state(fleet, name) is State.READY
    return fleet


def asleep(fleet: Fleet, *names: str, now_s: float = 0.0) -> Fleet:
    for name in names:
        ready(fleet, name, now_s=now_s).wish_sleep(name, now_s)
        fleet.done(name, fleet.models[name].attempt, now_s)
        assert state(fleet, name) is State.ASLEEP
    return fleet


class TestRequests:
    def test_fifty_requests_to_a_sleeping_model_make_one_wake_up(self) -> None:
        fleet = asleep(Fleet([A], 0.0), "a")
        effects = [effect for _ in range(50) for effect in fleet.asked("a", 1.0)[1]]
        assert kinds(effects) == ["Wake"]
        assert kinds(fleet.done("a", fleet.models["a"].attempt, 2.0)) == ["Admit"] * 50

    def test_a_request_starts_a_model_that_never_ran(self) -> None:
        fleet = Fleet([A], 0.0)
        _, effects = fleet.asked("a", 0.0)
        assert effects == [Start("a", 1)]

    def test_no_more_than_its_concurrency_and_first_come_first_served(self) -> None:
        fleet = ready(Fleet([replace(A, concurrency=2)], 0.0), "a")
        tickets = [fleet.asked("a", 0.0)[0] for _ in range(4)]
        assert fleet.models["a"].open == set(tickets[:2])
        assert fleet.left(tickets[1], 1.0) == [Admit(tickets[2])]
        assert fleet.left(tickets[0], 1.0) == [Admit(tickets[3])]

    def test_a_full_queue_refuses(self) -> None:
        fleet = Fleet([replace(A, queue=1)], 0.0)
        fleet.asked("a", 0.0)
        ticket, effects = fleet.asked("a", 0.0)
        assert isinstance(effects[0], Refuse)
        assert (effects[0].ticket, effects[0].why) == (ticket, Why.QUEUE_FULL)

    def test_without_a_queue_a_ready_model_still_serves(self) -> None:
        fleet = ready(Fleet([replace(A, queue=0, concurrency=1)], 0.0), "a")
        assert kinds(fleet.asked("a", 0.0)[1]) == ["Admit"]
        assert kinds(fleet.asked("a", 0.0)[1]) == ["Refuse"]

    def test_a_request_that_waits_too_long_is_refused(self) -> None:
        fleet = Fleet([replace(A, queue_timeout_s=5.0)], 0.0)
        ticket, _ = fleet.asked("a", 1.0)
        assert fleet.next_tick_s(1.0) == 6.0
        assert fleet.tick(5.9) == []
        effects = fleet.tick(6.0)
        assert [(effect.ticket, effect.why) for effect in effects if isinstance(effect, Refuse)] == [(ticket, Why.QUEUE_TIMEOUT)]

    def test_a_client_that_leaves_the_queue_takes_no_place(self) -> None:
        fleet = Fleet([A], 0.0)
        ticket, _ = fleet.asked("a", 0.0)
        fleet.left(ticket, 0.5)
        assert fleet.done("a", 1, 1.0) == []
        assert fleet.left(ticket, 2.0) == []


class TestSleep:
    def test_by_ttl_after_the_last_byte_of_the_last_stream(self) -> None:
        fleet = ready(Fleet([replace(A, ttl_s=10.0)], 0.0), "a")
        ticket, _ = fleet.asked("a", 1.0)
        assert fleet.tick(1000.0) == []
        fleet.left(ticket, 1000.0)
        assert fleet.next_tick_s(1005.0) == 1010.0
        assert fleet.tick(1009.0) == []
        assert kinds(fleet.tick(1010.0)) == ["Sleep"]

    def test_a_pinned_model_never_sleeps_but_by_an_action(self) -> None:
        fleet = ready(Fleet([replace(A, ttl_s=10.0, pin=True)], 0.0), "a")
        assert fleet.tick(1e6) == []
        assert fleet.wish_sleep("a", 1e6) == [Sleep("a", 2)]

    def test_an_action_waits_for_open_streams(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        ticket, _ = fleet.asked("a", 0.0)
        assert fleet.wish_sleep("a", 1.0) == []
        assert state(fleet) is State.DRAINING
        assert fleet.left(ticket, 2.0) == [Sleep("a", 2)]

    def test_an_action_in_a_hurry_ends_them(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        fleet.asked("a", 0.0)
        assert fleet.wish_sleep("a", 1.0, hurry=True) == [Hurry("a")]

    def test_sleep_during_wake_waits_and_who_waits_is_served_first(self) -> None:
        fleet = asleep(Fleet([A], 0.0), "a")
        ticket, _ = fleet.asked("a", 1.0)
        assert fleet.wish_sleep("a", 1.0) == []
        assert state(fleet) is State.WAKING
        assert fleet.done("a", fleet.models["a"].attempt, 2.0) == [Admit(ticket)]
        assert kinds(fleet.left(ticket, 3.0)) == ["Sleep"]

    def test_a_request_during_going_to_sleep_wakes_it_after(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        fleet.wish_sleep("a", 0.0)
        assert fleet.asked("a", 0.5)[1] == []
        assert kinds(fleet.done("a", fleet.models["a"].attempt, 1.0)) == ["Wake"]

    def test_one_that_dies_while_it_goes_to_sleep_is_not_ready(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        fleet.wish_sleep("a", 0.0)
        attempt = fleet.models["a"].attempt
        fleet.ended("a", "killed", 0.5)
        fleet.failed("a", attempt, "lost", 0.6)  # what the call for sleep met
        assert state(fleet) is State.FAILED

    def test_the_end_of_one_that_sleeps_by_ending_is_no_news(self) -> None:
        fleet = ready(Fleet([replace(A, sleep_stops=True)], 0.0), "a")
        fleet.wish_sleep("a", 0.0)
        assert fleet.ended("a", "ended", 0.5) == []
        assert state(fleet) is State.GOING_TO_SLEEP

    def test_one_that_sleeps_by_ending_is_started_again(self) -> None:
        fleet = ready(Fleet([replace(A, sleep_stops=True)], 0.0), "a")
        assert fleet.wish_sleep("a", 0.0) == [Sleep("a", 2, stop=True)]
        fleet.done("a", 2, 1.0)
        assert state(fleet) is State.STOPPED
        assert kinds(fleet.asked("a", 2.0)[1]) == ["Start"]

    def test_one_that_cannot_sleep_says_so(self) -> None:
        fleet = ready(Fleet([replace(A, can_sleep=False, ttl_s=1.0)], 0.0), "a")
        assert fleet.tick(100.0) == []
        with pytest.raises(Misuse):
            fleet.wish_sleep("a", 0.0)

    def test_one_that_does_not_fall_asleep_is_ended_at_last(self) -> None:
        fleet = ready(Fleet([replace(A, ttl_s=1.0)], 0.0), "a")
        now_s, seen = 1.0, []
        for _ in range(4):
            now_s = max(now_s, fleet.next_tick_s(now_s) or now_s)
            seen += fleet.tick(now_s)
            fleet.failed("a", fleet.models["a"].attempt, "no", now_s)
        assert [effect.stop for effect in seen if isinstance(effect, Sleep)] == [False, False, False, True]


class TestFailures:
    def test_the_pause_doubles_and_has_an_end(self) -> None:
        fleet = Fleet([replace(A, keep=True)], 0.0)
        effects, now_s, pauses = fleet.begin(0.0), 0.0, []
        for _ in range(9):
            assert kinds(effects) == ["Start"]
            fleet.failed("a", fleet.models["a"].attempt, "no", now_s)
            due_s = fleet.next_tick_s(now_s)
            assert due_s is not None
            pauses.append(due_s - now_s)
            now_s = due_s
            effects = fleet.tick(now_s)
        assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]

    def test_requests_wait_through_two_failures_and_are_refused_with_the_third(self) -> None:
        fleet = Fleet([A], 0.0)
        ticket, _ = fleet.asked("a", 0.0)
        assert fleet.failed("a", 1, "no", 1.0) == []
        assert kinds(fleet.tick(2.0)) == ["Start"]
        assert fleet.failed("a", 2, "no", 3.0) == []
        assert kinds(fleet.tick(5.0)) == ["Start"]
        effects = fleet.failed("a", 3, "no", 6.0)
        assert effects == [Refuse(ticket, Why.FAILED, 4.0, "a failed: no")]
        _, effects = fleet.asked("a", 7.0)
        assert effects == [Refuse(ticket + 1, Why.FAILED, 3.0, "a failed: no")]
        assert kinds(fleet.asked("a", 10.0)[1]) == ["Refuse"]
        fleet.tick(10.0)
        assert kinds(fleet.asked("a", 10.0)[1]) == ["Start"]

    def test_a_late_report_of_an_earlier_attempt_does_nothing(self) -> None:
        fleet = Fleet([A], 0.0)
        fleet.asked("a", 0.0)
        fleet.failed("a", 1, "no", 1.0)
        fleet.tick(2.0)
        assert fleet.done("a", 1, 3.0) == []
        assert state(fleet) is State.STARTING

    def test_a_server_that_ends_under_requests_is_started_again(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        ticket, _ = fleet.asked("a", 1.0)
        assert fleet.ended("a", "killed", 2.0) == []
        assert state(fleet) is State.FAILED
        fleet.left(ticket, 2.0)
        assert kinds(fleet.tick(3.0)) == ["Start"]

    def test_a_failure_after_long_health_counts_as_the_first(self) -> None:
        fleet = ready(Fleet([replace(A, keep=True)], 0.0), "a")
        fleet.models["a"].failures = 5
        fleet.ended("a", "killed", 100.0)
        assert fleet.next_tick_s(100.0) == 101.0

    def test_a_wake_up_without_memory_leaves_it_asleep_and_makes_room(self) -> None:
        fleet = asleep(ready(Fleet([A, B], 0.0), "b"), "a")
        ticket, _ = fleet.asked("a", 1.0)
        effects = fleet.failed("a", fleet.models["a"].attempt, "no memory", 2.0, no_memory=True)
        assert state(fleet) is State.ASLEEP
        assert [effect.name for effect in effects if isinstance(effect, Sleep)] == ["b"]
        assert kinds(fleet.tick(3.0)) == ["Wake"]
        assert fleet.done("a", fleet.models["a"].attempt, 4.0) == [Admit(ticket)]


class TestRoom:
    def test_models_of_a_group_exclude_each_other(self) -> None:
        fleet = ready(Fleet([replace(A, group="g"), replace(B, group="g")], 0.0, hold_s=0.0), "a")
        ticket, _ = fleet.asked("a", 1.0)
        assert fleet.asked("b", 2.0)[1] == []
        assert state(fleet) is State.DRAINING
        assert kinds(fleet.left(ticket, 3.0)) == ["Sleep"]
        assert kinds(fleet.done("a", fleet.models["a"].attempt, 4.0)) == ["Start"]

    def test_the_cheapest_to_bring_back_leaves(self) -> None:
        specs = [Spec(name, card="c", cost_bytes=40, wake_guess_s=guess_s) for name, guess_s in (("a", 9.0), ("b", 2.0), ("c", 5.0))]
        fleet = ready(Fleet(specs, 0.0, {"c": 100}), "a", "b")
        effects = fleet.asked("c", 1.0)[1]
        assert [effect.name for effect in effects if isinstance(effect, Sleep)] == ["b"]

    def test_nobody_leaves_in_vain(self) -> None:
        specs = [Spec(name, card="c", cost_bytes=cost, wake_guess_s=guess_s) for name, cost, guess_s in (("a", 10, 1.0), ("b", 80, 5.0))]
        fleet = ready(Fleet([*specs, Spec("c", card="c", cost_bytes=60)], 0.0, {"c": 100}), "a", "b")
        effects = fleet.asked("c", 1.0)[1]
        assert [effect.name for effect in effects if isinstance(effect, Sleep)] == ["b"]
        assert state(fleet, "a") is State.READY

    def test_what_can_never_fit_makes_nobody_leave_and_is_in_nobodys_way(self) -> None:
        fleet = ready(
            Fleet(
                [replace(A, card="c", cost_bytes=50), Spec("big", card="c", cost_bytes=200), Spec("b", card="c", cost_bytes=50)],
                0.0,
                {"c": 100},
            ),
            "a",
        )
        assert fleet.asked("big", 1.0)[1] == []
        assert kinds(fleet.asked("b", 2.0)[1]) == ["Start"]

    def test_a_busy_model_leaves_for_its_peers_but_not_for_those_below(self) -> None:
        for priority, expected in ((0, State.DRAINING), (1, State.READY)):
            fleet = ready(Fleet([replace(A, group="g", priority=priority), replace(B, group="g")], 0.0, hold_s=0.0), "a")
            fleet.asked("a", 1.0)
            fleet.asked("b", 1.0)
            assert state(fleet) is expected

    def test_a_busy_model_may_serve_for_a_while_first(self) -> None:
        fleet = ready(Fleet([replace(A, group="g"), replace(B, group="g")], 0.0, hold_s=5.0), "a")
        fleet.asked("a", 1.0)
        fleet.asked("b", 1.0)
        assert (state(fleet), fleet.next_tick_s(1.0)) == (State.READY, 5.0)
        fleet.tick(5.0)
        assert state(fleet) is State.DRAINING

    def test_who_waits_for_a_leaving_model_is_not_overtaken(self) -> None:
        specs = [replace(A, card="c", cost_bytes=100), Spec("b", card="c", cost_bytes=105), Spec("c", card="c", cost_bytes=10)]
        fleet = ready(Fleet(specs, 0.0, {"c": 110}), "a")
        fleet.asked("b", 1.0)
        assert fleet.asked("c", 2.0)[1] == []
        effects = fleet.done("a", fleet.models["a"].attempt, 3.0)
        assert [effect.name for effect in effects if isinstance(effect, Start)] == ["b"]


THIN = Spec("thin", card="c", cost_bytes=30, rest_bytes=25)


class TestWhatSleepKeeps:
    def test_a_sleeper_whose_memory_is_needed_is_ended(self) -> None:
        fleet = asleep(Fleet([THIN, replace(A, card="c", cost_bytes=80)], 0.0, {"c": 100}), "thin")
        assert fleet.asked("a", 1.0)[1] == [Sleep("thin", 3, stop=True)]
        assert fleet.done("thin", 3, 2.0) == [Start("a", 1)]
        assert state(fleet, "thin") is State.STOPPED

    def test_one_that_is_awake_ends_where_its_sleep_would_keep_too_much(self) -> None:
        fleet = ready(Fleet([THIN, replace(A, card="c", cost_bytes=80)], 0.0, {"c": 100}), "thin")
        assert fleet.asked("a", 9.0)[1] == [Sleep("thin", 2, stop=True)]

    def test_it_only_sleeps_where_that_is_enough(self) -> None:
        fleet = ready(Fleet([THIN, replace(A, card="c", cost_bytes=75)], 0.0, {"c": 100}), "thin")
        assert fleet.asked("a", 9.0)[1] == [Sleep("thin", 2)]
        assert fleet.done("thin", 2, 10.0) == [Start("a", 1)]
        assert state(fleet, "thin") is State.ASLEEP

    def test_it_ends_only_that_once(self) -> None:
        fleet = ready(Fleet([THIN, replace(A, card="c", cost_bytes=80)], 0.0, {"c": 100}), "thin")
        fleet.left(fleet.asked("a", 9.0)[0], 9.0)
        fleet.done("thin", 2, 10.0)
        assert ready(fleet, "thin", now_s=20.0).wish_sleep("thin", 30.0) == [Sleep("thin", 4)]

    @pytest.mark.parametrize("prepare", [ready, asleep])
    def test_while_it_ends_nobody_else_has_to_leave(self, prepare: Callable[..., Fleet]) -> None:
        specs = [THIN, replace(B, card="c", cost_bytes=20), replace(A, card="c", cost_bytes=75)]
        fleet = ready(prepare(Fleet(specs, 0.0, {"c": 100}), "thin"), "b")
        attempt = fleet.models["thin"].attempt + 1
        assert fleet.asked("a", 9.0)[1] == [Sleep("thin", attempt, stop=True)]
        assert fleet.tick(9.5) == []
        assert fleet.done("thin", attempt, 10.0) == [Start("a", 1)]

    def test_nor_after_it_died_on_the_way(self) -> None:
        fleet = ready(Fleet([THIN, replace(A, card="c", cost_bytes=80)], 0.0, {"c": 100}), "thin")
        ticket, _ = fleet.asked("thin", 8.0)
        other, _ = fleet.asked("a", 9.0)
        fleet.left(other, 9.0)
        assert fleet.models["thin"].evicted
        fleet.ended("thin", "killed", 10.0)
        fleet.left(ticket, 10.0)
        fleet.wish_wake("thin", 99.0)
        fleet.done("thin", fleet.models["thin"].attempt, 99.0)
        assert fleet.wish_sleep("thin", 100.0)[-1] == Sleep("thin", fleet.models["thin"].attempt)

    def test_one_that_is_asked_for_more_is_not_ended_for_a_lesser(self) -> None:
        fleet = asleep(Fleet([replace(THIN, priority=1), replace(A, card="c", cost_bytes=80)], 0.0, {"c": 100}), "thin")
        fleet.models["thin"].retry_at_s = 50.0
        fleet.asked("thin", 1.0)
        assert fleet.asked("a", 1.0)[1] == []

    def test_it_costs_a_start_so_another_leaves_first(self) -> None:
        specs = [THIN, replace(B, card="c", cost_bytes=30, wake_guess_s=20.0), replace(A, card="c", cost_bytes=70)]
        fleet = Fleet(specs, 0.0, {"c": 100})
        fleet.wish_wake("thin", 0.0)
        fleet.done("thin", 1, 30.0)
        assert ready(fleet, "b", now_s=30.0).asked("a", 39.0)[1] == [Sleep("b", 2)]


class TestTheFile:
    def test_what_is_kept_is_started_at_once(self) -> None:
        assert Fleet([replace(A, keep=True), B], 0.0).begin(0.0) == [Start("a", 1)]

    def test_a_removed_model_serves_what_is_open_and_ends(self) -> None:
        fleet = ready(Fleet([replace(A, concurrency=1)], 0.0), "a")
        first, _ = fleet.asked("a", 0.0)
        second, _ = fleet.asked("a", 0.0)
        assert fleet.retire("a", 1.0) == [Refuse(second, Why.GONE, 0.0, "a was removed")]
        assert fleet.left(first, 2.0) == [Sleep("a", 2, stop=True)]
        assert fleet.done("a", 2, 3.0) == [Removed("a")]
        assert fleet.models == {}

    def test_a_sleeping_model_that_is_removed_ends(self) -> None:
        fleet = asleep(Fleet([A], 0.0), "a")
        assert fleet.retire("a", 1.0) == [Sleep("a", 3, stop=True)]
        assert fleet.done("a", 3, 2.0) == [Removed("a")]

    def test_closing_refuses_and_ends_everything(self) -> None:
        fleet = ready(Fleet([A, B, Spec("c")], 0.0), "a")
        ticket, _ = fleet.asked("c", 0.5)
        effects = fleet.close(1.0)
        assert [(effect.ticket, effect.why) for effect in effects if isinstance(effect, Refuse)] == [(ticket, Why.CLOSING)]
        assert Removed("b") in effects
        assert Sleep("a", 2, stop=True) in effects

    def test_new_facts_of_a_model_leave_its_streams_alone(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        ticket, _ = fleet.asked("a", 0.0)
        fleet.add(replace(A, ttl_s=5.0), 1.0)
        assert fleet.models["a"].open == {ticket}
        fleet.left(ticket, 2.0)
        assert fleet.next_tick_s(6.0) == 7.0

    def test_a_changed_model_ends_its_streams_and_its_server_and_who_waits_gets_the_new_one(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        first, _ = fleet.asked("a", 0.0)
        assert fleet.renew(replace(A, concurrency=3), 1.0) == []
        second, effects = fleet.asked("a", 1.5)
        assert effects == []
        assert fleet.left(first, 2.0) == [Sleep("a", 2, stop=True)]
        assert fleet.done("a", 2, 3.0) == [Renewed("a"), Start("a", 3)]
        assert fleet.models["a"].spec.concurrency == 3
        assert fleet.done("a", 3, 4.0) == [Admit(second)]

    @pytest.mark.parametrize("prepare", [lambda fleet: fleet, lambda fleet: asleep(fleet, "a")])
    def test_one_at_rest_is_changed_without_being_started(self, prepare: Callable[[Fleet], Fleet]) -> None:
        fleet = prepare(Fleet([A], 0.0))
        effects = fleet.renew(replace(A, priority=1), 1.0)
        effects += fleet.done("a", fleet.models["a"].attempt, 2.0)
        assert Renewed("a") in effects
        assert (state(fleet), fleet.models["a"].spec.priority) == (State.STOPPED, 1)

    def test_a_second_change_before_the_first_is_there_wins(self) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        fleet.renew(replace(A, priority=1), 1.0)
        fleet.add(replace(A, priority=2), 1.5)
        assert fleet.done("a", 2, 2.0) == [Renewed("a")]
        assert fleet.models["a"].spec.priority == 2

    @pytest.mark.parametrize("leave", [lambda fleet: fleet.retire("a", 1.0), lambda fleet: fleet.renew(replace(A, priority=1), 1.0)])
    def test_one_that_falls_asleep_just_then_is_ended_after_it(self, leave: Callable[[Fleet], list[Effect]]) -> None:
        fleet = ready(Fleet([A], 0.0), "a")
        assert fleet.wish_sleep("a", 0.5) == [Sleep("a", 2)]
        assert leave(fleet) == []
        assert fleet.done("a", 2, 2.0) == [Sleep("a", 3, stop=True)]
        assert kinds(fleet.done("a", 3, 3.0)) in (["Removed"], ["Renewed"])

    def test_a_start_is_not_waited_for_and_who_waits_gets_the_new_one(self) -> None:
        fleet = Fleet([A], 0.0)
        ticket, _ = fleet.asked("a", 0.0)
        assert fleet.renew(replace(A, priority=1), 1.0) == [Interrupt("a", 1)]
        assert fleet.failed("a", 1, "it was ended", 2.0) == [Renewed("a"), Start("a", 2)]
        assert fleet.done("a", 2, 3.0) == [Admit(ticket)]

    def test_one_that_is_removed_while_it_starts_is_ended_then(self) -> None:
        fleet = Fleet([A], 0.0)
        fleet.wish_wake("a", 0.0)
        assert fleet.retire("a", 1.0) == [Interrupt("a", 1)]
        assert fleet.failed("a", 1, "it was ended", 2.0) == [Removed("a")]

    def failing(self, times: int = 3) -> tuple[Fleet, int]:
        """One that is kept, and a request that waits for it if so many failures leave one."""
        fleet = Fleet([replace(A, keep=True)], 0.0)
        fleet.begin(0.0)
        ticket, _ = fleet.asked("a", 0.0)
        for _ in range(times):
            now_s = fleet.models["a"].retry_at_s
            fleet.tick(now_s)
            fleet.failed("a", fleet.models["a"].attempt, "no such model", now_s)
        return fleet, ticket

    def test_a_new_file_ends_the_pause_of_one_that_fails(self) -> None:
        fleet, _ = self.failing()
        now_s = fleet.models["a"].retry_at_s - 1.0
        assert kinds(fleet.asked("a", now_s)[1]) == ["Refuse"]
        assert fleet.renew(replace(A, keep=True, priority=1), now_s) == [Renewed("a"), Start("a", 4)]
        assert fleet.models["a"].failures == 0
        assert fleet.asked("a", now_s)[1] == [], "it waits"

    def test_a_new_file_that_its_server_need_not_know_does_so_too(self) -> None:
        fleet, _ = self.failing()
        assert fleet.add(replace(A, keep=True, ttl_s=9.0), fleet.models["a"].retry_at_s - 1.0) == [Start("a", 4)]

    def test_the_failure_of_a_start_that_nobody_wants_any_more_refuses_nobody(self) -> None:
        fleet, ticket = self.failing(2)
        now_s = fleet.models["a"].retry_at_s
        assert fleet.tick(now_s) == [Start("a", 3)]
        assert fleet.renew(replace(A, keep=True, priority=1), now_s) == [Interrupt("a", 3)]
        assert fleet.failed("a", 3, "no such model", now_s) == [Renewed("a"), Start("a", 4)]
        assert fleet.done("a", 4, now_s) == [Admit(ticket)]
