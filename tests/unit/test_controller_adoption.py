# SPDX-License-Identifier: Apache-2.0
"""Which servers of an earlier gateway are adopted, by their records alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvcached.controller.adoption import Purpose, Record, digests, record_from, why_not
from kvcached.controller.config import parse_config
from kvcached.controller.engine_command import purpose_of
from kvcached.controller.fleet import Fleet
from kvcached.controller.states import Left, Removed, Sleep, Spec, Start, State, Wake

PURPOSE = Purpose("chat", 0, "chat.log", "/here", ("python", "--port", "0"), {"A": "1", "B": "2"})
RECORD = Record(7, 100, "boot", 15_000, "host", State.READY, PURPOSE)
OTHER = replace(RECORD, pid=8, purpose=replace(PURPOSE, replica=1))
BOTH = [PURPOSE, OTHER.purpose]


def of(purpose: Purpose) -> list[Record]:
    return [replace(RECORD, purpose=purpose)]


class TestRecord:
    def test_it_can_be_read_again(self) -> None:
        assert record_from(json.loads(json.dumps(RECORD.as_json()))) == RECORD

    @pytest.mark.parametrize("change", [{"more": 1}, {"state": "happy"}, {"purpose": {}}, {"purpose": None}])
    def test_one_of_another_version_is_none(self, change: dict[str, object]) -> None:
        assert record_from({**RECORD.as_json(), **change}) is None
        assert record_from({"pid": 7, "start": 100, "boot": "boot"}) is None


class TestWhyNot:
    def test_the_same_thing_is_adopted_awake_or_asleep(self) -> None:
        assert why_not([RECORD], [PURPOSE], "host") == ""
        assert why_not([RECORD], [PURPOSE], "discard") == "", "awake it does not matter how it would sleep"
        assert why_not([replace(RECORD, state=State.ASLEEP)], [PURPOSE], "host") == ""
        assert why_not([RECORD, OTHER], BOTH, "host") == ""

    @pytest.mark.parametrize(
        ("purpose", "words"),
        [
            (replace(PURPOSE, model="other"), "model"),
            (replace(PURPOSE, replica=1), "replica"),
            (replace(PURPOSE, log="chat-0.log"), "log"),
            (replace(PURPOSE, folder="/there"), "folder"),
            (replace(PURPOSE, command=("python", "--port", "0", "--new")), "command"),
            (replace(PURPOSE, environment={"A": "1", "B": "3", "C": "4"}), r"environment \(B, C\)"),
            (replace(PURPOSE, environment={"B": "2"}), r"environment \(A\)"),
        ],
    )
    def test_another_purpose_is_named(self, purpose: Purpose, words: str) -> None:
        with pytest.raises(AssertionError, match=f"started with another {words}"):
            raise AssertionError(why_not(of(purpose), [PURPOSE], "host"))

    def test_all_of_several_or_none(self) -> None:
        assert why_not([RECORD], BOTH, "host") == "1 of 2 servers are left"
        assert why_not([RECORD, OTHER], [PURPOSE], "host") == "2 of 1 servers are left"
        assert why_not([RECORD, replace(OTHER, state=State.ASLEEP)], BOTH, "host") == "it was left asleep and ready"
        assert why_not([RECORD, replace(OTHER, state=State.STARTING)], BOTH, "host") == "it was left ready and starting"

    @pytest.mark.parametrize("state", [State.STARTING, State.GOING_TO_SLEEP, State.WAKING])
    def test_what_was_between_two_states_is_not_adopted(self, state: State) -> None:
        assert why_not([replace(RECORD, state=state)], [PURPOSE], "host") == f"it was left {state.value}"

    def test_nor_what_sleeps_in_another_way(self) -> None:
        assert why_not([replace(RECORD, state=State.ASLEEP)], [PURPOSE], "discard") == "it sleeps in another way"


class TestPurpose:
    def test_a_secret_is_not_in_it_and_variables_of_a_session_are_not_unless_the_file_has_them(self) -> None:
        def found(env: dict[str, str], **inherited: str) -> Purpose:
            model = {"engine": "vllm", "model": "none", "card": "host:0", "weights": "1GiB", "env": env}
            chat = parse_config(json.dumps({"models": {"chat": model}})).models["chat"]
            return purpose_of("chat", chat, 0, inherited, Path("/here"), "chat.log")

        one = found({"KEY": "secret"}, TERM="a", INVOCATION_ID="1", HF_HOME="/a")
        assert "secret" not in repr(one)
        assert one == found({"KEY": "secret"}, TERM="b", INVOCATION_ID="2", HF_HOME="/a")
        assert one != found({"KEY": "other"}, HF_HOME="/a")
        assert one != found({"KEY": "secret"}, HF_HOME="/b")
        assert found({"TERM": "a"}) != found({"TERM": "b"})
        assert one.command[one.command.index("--port") + 1] == "0"
        assert digests({"A": "\udcff"}, ()) != digests({"A": ""}, ())


class TestFleet:
    def test_what_was_found_ready_serves_at_once_and_what_was_found_asleep_is_woken(self) -> None:
        fleet = Fleet([Spec("a", keep=True), Spec("b", keep=True), Spec("c", keep=True)], 0.0)
        assert fleet.begin(0.0, {"a": State.READY, "b": State.ASLEEP}) == [Start("c", 1)]
        assert [model.state for model in fleet.models.values()] == [State.READY, State.ASLEEP, State.STARTING]
        assert fleet.tick(100.0) == []
        assert [type(effect).__name__ for effect in fleet.asked("a", 101.0)[1]] == ["Admit"]
        assert fleet.asked("b", 101.0)[1] == [Wake("b", 1)]

    def test_its_time_to_live_begins_again(self) -> None:
        fleet = Fleet([Spec("a", ttl_s=10.0)], 0.0)
        fleet.begin(5.0, {"a": State.READY})
        assert fleet.next_tick_s(11.0) == 15.0

    def test_only_what_is_at_rest_is_left_to_another_gateway(self) -> None:
        names = ("ready", "asleep", "busy", "stopped", "starting", "removed")
        fleet = Fleet([Spec(name) for name in names], 0.0)
        fleet.begin(0.0, dict.fromkeys(("ready", "busy", "removed"), State.READY) | {"asleep": State.ASLEEP})
        fleet.asked("busy", 0.0)
        fleet.asked("removed", 0.0)
        fleet.retire("removed", 0.0)
        fleet.wish_wake("starting", 0.0)
        effects = fleet.let_go(1.0)
        assert [effect for effect in effects if isinstance(effect, Left)] == [Left("ready"), Left("asleep")]
        assert Removed("stopped") in effects
        assert not any(isinstance(effect, Sleep) for effect in effects)
        assert [(name, fleet.models[name].retiring) for name in fleet.models] == [("busy", True), ("starting", True), ("removed", True)]
