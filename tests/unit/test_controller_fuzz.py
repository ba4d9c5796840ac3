# SPDX-License-Identifier: Apache-2.0
"""Any text as `models.yaml`: it is a file that can be run, or one error that names a key. Never anything else."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcached.config import load_settings
from kvcached.controller.access import Access
from kvcached.controller.build import card_bytes, specs_of
from kvcached.controller.config import ApiKey, Model, ServeConfig, parse_config
from kvcached.controller.engine_command import command_of, environment_of
from kvcached.controller.fleet import Fleet
from kvcached.controller.plan import plan_of
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from kvcached.controller.config import ServeConfig as Config

WORDS = (
    *(
        "chat",
        "host:0",
        "cuda:0",
        "vllm",
        "sglang",
        "remote",
        "host",
        "discard",
        "kv",
        "stop",
        "never",
        "wait",
        "abort",
        "session",
        "prefix",
    ),
    *(
        "http://a:1",
        "127.0.0.1:0",
        "[::1]:9",
        "env:NONE",
        "env:",
        "40%",
        "1e400%",
        "2GiB",
        "-1",
        "1e9",
        "~",
        "~nobody/x",
        "\0",
        "a\nb",
        "",
        " ",
    ),
    *(
        "9" * 30,
        "9" * 5000,
        "9" * 400 + ".5GiB",
        "99999999999TiB",
        10**30,
        2**62,
        "100.0001%",
        "0x10",
        "\ud800",
        "\u202e",
        "../..",
        "a" * 300,
        "²",
        "٣",
        "1_000",
        "inf",
        "nan",
    ),
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 70_000), st.floats(), st.sampled_from(WORDS), st.text(max_size=12)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=3)
)
KEYS = {"model": tuple(Model.model_fields), "top": tuple(ServeConfig.model_fields), "key": tuple(ApiKey.model_fields)}
VALID: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "api_keys": ["opens-everything", {"key": "opens-chat", "models": ["chat"]}],
    "cards": {"host:0": "8GiB"},
    "log_dir": "logs",
    "models": {
        "chat": {"engine": "vllm", "model": "m", "card": "host:0", "weights": "1GiB", "floor": "10%", "args": ["--a", 1], "env": {"A": 1}},
        "away": {"engine": "remote", "address": ["http://a:1", "http://b:2"], "aliases": ["far"], "ttl_s": 9},
        "more": {"engine": "sglang", "model": "m", "sleep": "stop", "group": "g", "replicas": 2, "pin": False, "concurrency": 3},
    },
}


def use(config: Config) -> None:
    """All that is done with a file before anything of it is started."""
    Access(config, {})
    for plan in plan_of(config):
        plan.problems()
    fleet = Fleet(specs_of(config).values(), 0.0, card_bytes(config))
    fleet.begin(0.0)
    for name, model in config.models.items():
        if model.engine == "remote":
            continue
        command_of(name, model, 1)
        environment = environment_of(name, model, 0, {"KVCACHED_RUN_DIR": "/tmp/none"})
        assert all(isinstance(value, str) for value in environment.values())
        if model.elastic:
            load_settings(environment)


def mistake(text: str) -> str:
    """Empty where there is none."""
    try:
        use(parse_config(text))
    except SettingError as error:
        return str(error)
    return ""


@given(st.text() | st.text(alphabet="models:{}[]&*!|>-?,'\"#%@` \n\t\\0123abc", max_size=200))
def test_any_text(text: str) -> None:
    assert mistake(text), "no text without models can be run"


@given(st.dictionaries(st.sampled_from(KEYS["top"]) | st.text(max_size=5), VALUES, max_size=5))
def test_any_structure(given_file: dict[str, Any]) -> None:
    text = yaml.dump(given_file, allow_unicode=True)
    assert mistake(text) or "models" in given_file


@st.composite
def one_change(draw: st.DrawFn) -> tuple[str, str]:
    """A file without a mistake, but for one key that may have any value; and that key."""
    file = copy.deepcopy(VALID)
    where = draw(st.sampled_from(["top", "chat", "away", "more", "key"]))
    path, target = {"top": ("", file), "key": ("api_keys.1.", file["api_keys"][1])}.get(where) or (
        f"models.{where}.",
        file["models"][where],
    )
    kind = where if where in KEYS else "model"
    key = draw(st.sampled_from(KEYS[kind]) | st.text("abc_", min_size=1, max_size=5))
    target[key] = draw(VALUES)
    return yaml.dump(file, allow_unicode=True), path + key


@given(one_change())
@example(('{"models": {"chat": {"engine": "vllm", "model": "m", "aliases": ["chat"]}}}', "models.chat.aliases"))
@settings(max_examples=150)
def test_the_key_of_a_mistake_is_named(change: tuple[str, str]) -> None:
    text, key = change
    said = mistake(text)
    assert not said or key in said or said.startswith("this is no YAML") or is_about_another(key, said), said


def is_about_another(key: str, said: str) -> bool:
    """Of two keys that exclude each other the message may begin with either: both are in it, or the model is, and the word."""
    owner, _, word = key.rpartition(".")
    return (owner in said or owner.split(".")[0] in said) and (f"`{word}`" in said or f"`{word}:" in said or word in said)


@pytest.mark.full
@pytest.mark.timeout(1800)
@given(one_change())
@settings(max_examples=2_000)
def test_the_key_of_a_mistake_is_named_at_length(change: tuple[str, str]) -> None:
    test_the_key_of_a_mistake_is_named.hypothesis.inner_test(change)


def test_the_file_that_is_changed_has_no_mistake() -> None:
    assert mistake(json.dumps(VALID)) == ""
