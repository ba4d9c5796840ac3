# SPDX-License-Identifier: Apache-2.0
"""The byte plan, the command line of engines, and `kvcached serve` where it starts nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from kvcached.cli.main import app
from kvcached.controller.build import specs_of
from kvcached.controller.config import ServeConfig, parse_config
from kvcached.controller.engine_command import command_of, environment_of
from kvcached.controller.plan import plan_of

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def config_of(**models: Any) -> ServeConfig:
    return parse_config(json.dumps({"cards": {"cuda:0": "10GiB"}, "models": models}))


def model(**keys: Any) -> dict[str, Any]:
    return {"engine": "vllm", "model": "m", "card": "cuda:0", **keys}


class TestPlan:
    def test_what_is_left(self) -> None:
        (plan,) = plan_of(config_of(a=model(weights="2GiB", floor="10%", replicas=2), b=model(weights="1GiB", limit="3GiB")))
        assert [(row.weights_bytes, row.floor_bytes, row.limit_bytes) for row in plan.rows] == [(4 * GIB, 2 * GIB, None), (GIB, 0, 3 * GIB)]
        assert (plan.awake_bytes, plan.left_bytes, plan.problems()) == (7 * GIB, 3 * GIB, [])

    def test_of_a_group_the_largest_counts(self) -> None:
        (plan,) = plan_of(config_of(a=model(weights="8GiB", group="g"), b=model(weights="7GiB", group="g"), c=model(weights="1GiB")))
        assert (plan.awake_bytes, plan.problems()) == (9 * GIB, [])

    def test_more_than_the_card_is_fine_if_they_can_take_turns(self) -> None:
        (plan,) = plan_of(config_of(a=model(weights="8GiB"), b=model(weights="7GiB")))
        assert (plan.left_bytes, plan.problems()) == (-5 * GIB, [])

    @pytest.mark.parametrize(
        ("models", "named"),
        [
            ({"a": model(weights="11GiB")}, "models.a:"),
            ({"a": model(weights="6GiB", pin=True), "b": model(weights="5GiB")}, "models.b:"),
            ({"a": model(weights="6GiB", sleep="never"), "b": model(weights="5GiB")}, "models.b:"),
            ({"a": model(floor="2GiB", limit="1GiB")}, "models.a.limit:"),
        ],
    )
    def test_what_cannot_fit_is_named(self, models: dict[str, Any], named: str) -> None:
        (plan,) = plan_of(config_of(**models))
        assert [problem.startswith(named) for problem in plan.problems()] == [True]

    def test_the_logic_counts_the_same_bytes(self) -> None:
        config = config_of(a=model(weights="2GiB", floor="10%", replicas=2, concurrency=3))
        spec = specs_of(config)["a"]
        assert (spec.cost_bytes, spec.concurrency) == (6 * GIB, 6)

    def test_what_sleep_keeps_of_the_card(self) -> None:
        kept = [specs_of(config_of(a=model(weights="2GiB", replicas=2, sleep=sleep)))["a"].rest_bytes for sleep in ("kv", "host", "stop")]
        assert kept == [4 * GIB, 0, 0]


class TestCommandLine:
    def test_of_vllm(self) -> None:
        given = config_of(chat=model(venv="/v", args=["--x", 1])).models["chat"]
        assert command_of("chat", given, 5) == (
            "/v/bin/python -m vllm.entrypoints.cli.main serve m --enable-sleep-mode "
            "--served-model-name chat --host 127.0.0.1 --port 5 --x 1"
        ).split()  # fmt: skip

    def test_of_sglang(self) -> None:
        given = config_of(chat=model(engine="sglang", python="/p", elastic=False)).models["chat"]
        assert command_of("chat", given, 5)[1:7] == [
            "-m",
            "sglang.launch_server",
            "--model-path",
            "m",
            "--enable-memory-saver",
            "--enable-weights-cpu-backup",
        ]

    @pytest.mark.parametrize("sleep", ["kv", "stop", "never"])
    def test_sleep_that_needs_no_help_asks_for_none(self, sleep: str) -> None:
        given = config_of(chat=model(sleep=sleep)).models["chat"]
        assert "--enable-sleep-mode" not in command_of("chat", given, 5)
        assert "VLLM_SERVER_DEV_MODE" not in environment_of("chat", given, 0, {})

    def test_the_environment(self) -> None:
        given = config_of(chat=model(card="cuda:0", floor="1GiB", weights="2GiB", env={"A": "file", "KVCACHED_MARGIN": 0})).models["chat"]
        assert environment_of("chat", given, 1, {"A": "inherited", "B": "b"}) == {
            "A": "file", "B": "b", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "0", "VLLM_SERVER_DEV_MODE": "1",
            "ENABLE_KVCACHED": "true", "KVCACHED_IPC_NAME": "chat-1", "KVCACHED_NAME": "chat", "KVCACHED_FLOOR": "1 GiB",
            "KVCACHED_OTHER_BYTES": str(2 * GIB), "KVCACHED_MARGIN": "0",
        }  # fmt: skip

    def test_one_that_is_not_elastic(self) -> None:
        given = config_of(chat=model(elastic=False, card="cuda:0")).models["chat"]
        assert environment_of("chat", given, 0, {})["ENABLE_KVCACHED"] == "false"


class TestServeCommand:
    def call(self, tmp_path: Path, text: str, *options: str) -> tuple[int, str]:
        (tmp_path / "models.yaml").write_text(text)
        result = CliRunner().invoke(app, ["serve", str(tmp_path / "models.yaml"), *options])
        return result.exit_code, result.output

    def test_check(self, tmp_path: Path) -> None:
        code, output = self.call(tmp_path, "models: {a: {engine: vllm, model: m}}", "--check")
        assert (code, "1 model, no mistake" in output) == (0, True)

    def test_check_names_the_key(self, tmp_path: Path) -> None:
        code, output = self.call(tmp_path, "models: {a: {engine: vllm, model: m, ttl: 3}}", "--check")
        assert (code, "models.a.ttl: there is no such key" in output) == (2, True)

    def test_check_names_a_variable_that_is_not_set(self, tmp_path: Path) -> None:
        code, output = self.call(tmp_path, "api_keys: ['env:NOT_SET_HERE']\nmodels: {a: {engine: vllm, model: m}}", "--check")
        assert (code, "api_keys.0.key: the variable NOT_SET_HERE is not set" in output) == (2, True)

    def test_dry_run_shows_the_plan(self, tmp_path: Path) -> None:
        text = "cards: {'cuda:0': 10GiB}\nmodels: {a: {engine: vllm, model: m, card: 'cuda:0', weights: 2GiB}, b: {engine: remote, address: 'http://h'}}"
        code, output = self.call(tmp_path, text, "--dry-run")
        assert code == 0
        assert "cuda:0: 10 GiB" in output
        assert "left with all awake: 8 GiB" in output
        assert "b: remote, at http://h" in output

    def test_dry_run_refuses_what_cannot_fit(self, tmp_path: Path) -> None:
        text = "cards: {'cuda:0': 1GiB}\nmodels: {a: {engine: vllm, model: m, card: 'cuda:0', weights: 2GiB}}"
        code, output = self.call(tmp_path, text, "--dry-run")
        assert (code, "models.a: " in output) == (2, True)

    def test_the_schema_is_json(self) -> None:
        result = CliRunner().invoke(app, ["serve", "--schema"])
        assert json.loads(result.output)["title"] == "ServeConfig"

    def test_without_a_file(self) -> None:
        assert CliRunner().invoke(app, ["serve"]).exit_code == 2
