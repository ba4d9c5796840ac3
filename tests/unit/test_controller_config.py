# SPDX-License-Identifier: Apache-2.0
"""`models.yaml`: what is allowed, and that a mistake is told by its key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.controller.config import ApiKey, Model, ServeConfig, json_schema, load_config, parse_config, secret
from kvcached.controller.reload import needs_new_server
from kvcached.errors import SettingError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "models.example.yaml"
TWO = """
models:
  chat:
    engine: vllm
    model: some/chat
  draft:
    engine: sglang
    model: some/draft
    ttl_s: 60
"""


def one(**keys: object) -> str:
    return json.dumps({"models": {"chat": {"engine": "vllm", "model": "m", **keys}}})


class TestWhatIsAllowed:
    def test_two_models_in_few_lines(self) -> None:
        config = parse_config(TWO)
        assert len(TWO.strip().splitlines()) < 20
        assert (config.models["draft"].ttl_s, config.models["chat"].sleeps, config.host_and_port) == (60, "host", ("127.0.0.1", 8080))

    def test_numbers_become_text_where_text_is_wanted(self) -> None:
        model = parse_config(one(args=["--port", 1, 0.5], env={"A": 1})).models["chat"]
        assert (model.args, model.env) == (("--port", "1", "0.5"), {"A": "1"})

    def test_sizes_and_shares(self) -> None:
        model = parse_config(one(weights="2GiB", floor="1GiB", limit="40%")).models["chat"]
        assert model.weights == 2 << 30
        assert str(model.floor) == "1 GiB"
        assert model.limit is not None
        assert model.limit.of(100) == 40

    def test_a_remote(self) -> None:
        config = parse_config("models: {a/b: {engine: remote, address: 'http://h:1/'}}")
        model = config.models["a/b"]
        assert (model.address, model.sleeps, model.upstream_name("a/b"), model.servers) == (("http://h:1",), "never", "a/b", 1)

    def test_keys_are_text_or_more(self) -> None:
        config = parse_config(TWO + "api_keys: [long-enough, {key: env:KEY_OF_IT, models: [chat]}]")
        assert [key.models for key in config.api_keys] == [(), ("chat",)]

    @pytest.mark.parametrize(
        ("keys", "sleep"),
        [
            ({}, "host"),
            ({"card": "cuda:0"}, "host"),
            ({"card": "host:0"}, "kv"),
            ({"card": "host:0", "elastic": False}, "stop"),
            ({"engine": "sglang"}, "kv"),
            ({"engine": "sglang", "elastic": False}, "host"),
            ({"card": "host:0", "sleep": "never"}, "never"),
        ],
    )
    def test_what_sleep_is_where_nothing_is_said(self, keys: dict[str, object], sleep: str) -> None:
        assert parse_config(one(**keys)).models["chat"].sleeps == sleep

    def test_names_and_aliases(self) -> None:
        assert parse_config(one(aliases=["x", "y"])).names() == {"chat": "chat", "x": "chat", "y": "chat"}

    def test_a_secret_may_be_a_variable(self) -> None:
        assert secret("plain", {}, "k") == "plain"
        assert secret("env:A", {"A": "b"}, "k") == "b"
        with pytest.raises(SettingError, match=r"^k: the variable A is not set"):
            secret("env:A", {}, "k")


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (one(engine="llama"), "models.chat.engine: input should be 'vllm', 'sglang' or 'remote'"),
        (one(engin="vllm"), "models.chat.engin: there is no such key; allowed: engine, model"),
        ("modles: {}", "models: field required"),
        ("models: {}", "models: "),
        ("models: {chat: {model: m}}", "models.chat.engine: field required"),
        ("models: {chat: {engine: vllm}}", "models.chat: `model` is missing"),
        ("models: {chat: {engine: remote}}", "models.chat: `address` is missing"),
        ("models: {chat: {engine: remote, address: h}}", "models.chat.address.0: write the address of a server"),
        ("models: {chat: {engine: remote, address: 'http://h', args: [a]}}", "models.chat: `args` is for engines"),
        ("models: {chat: {engine: remote, address: 'http://h', sleep: stop}}", "models.chat: `sleep` of a remote"),
        (one(address="http://h"), "models.chat: `address` is for remote"),
        (one(venv="/a", python="/b"), "models.chat: `venv` and `python` exclude"),
        (one(sleep="kv", elastic=False), "models.chat: `sleep: kv` gives an elastic"),
        (one(sleep="host", card="host:0"), "models.chat: `sleep: host` cannot be: vLLM's sleep mode needs a GPU; write `kv` or `stop`"),
        (
            one(sleep="discard", card="host:0", elastic=False),
            "models.chat: `sleep: discard` cannot be: vLLM's sleep mode needs a GPU; write `stop`",
        ),
        (one(sleep="discard", engine="sglang"), "models.chat: `sleep: discard` cannot be: SGLang's memory saver"),
        (one(ttl_s=0), "models.chat.ttl_s: input should be greater than 0"),
        (one(ttl_s="soon"), "models.chat.ttl_s: "),
        (one(pin="yes"), "models.chat.pin: input should be a valid boolean"),
        (one(replicas=0), "models.chat.replicas: "),
        (one(replicas="2"), "models.chat.replicas: "),
        (one(floor="much"), "models.chat.floor: 'much' is not a size"),
        (one(weights=-1), "models.chat.weights: "),
        (one(env={"A": [1]}), "models.chat.env.A: "),
        (one(args="--x"), "models.chat.args: "),
        (one(aliases=["chat"]), "models.chat: the name 'chat' is taken"),
        (
            "models: {chat: {engine: vllm, model: m, replicas: 2}, chat-1: {engine: vllm, model: m}}",
            "models.chat-1: the pool 'chat-1' would be one of models.chat too",
        ),
        (
            "models: {chat: {engine: vllm, model: m, replicas: 2}, chat-0: {engine: vllm, model: m}}",
            "models.chat-0: the log 'chat-0' would be one of models.chat too",
        ),
        ("models: {a b: {engine: vllm, model: m}}", "models.a b: the name becomes a file name"),
        (TWO + "listen: 8080", "listen: write HOST:PORT"),
        (TWO + "listen: 'host:99999'", "listen: write HOST:PORT"),
        (TWO + "api_keys: [short]", "api_keys.0.key: "),
        (TWO + "api_keys: [{key: long-enough, models: [x]}]", "api_keys.0.models: there is no model 'x'"),
        (TWO + "api_keys: [{key: long-enough, modles: []}]", "api_keys.0.modles: there is no such key; allowed: key, models"),
        (TWO + "cards: {gpu: 1G}", "cards.gpu: "),
        (TWO + "    card: cuda:1\ncards: {'cuda:0': 1G}", "models.draft.card: cuda:1 is not among `cards`"),
        (TWO + "    group: g\n  c: {engine: vllm, model: m, group: g, pin: true}", "models.c.pin: it would keep models.draft"),
        (TWO + "    ttl_s: 4", "this is no YAML: the key 'ttl_s' is there twice"),
        ("models: [", "this is no YAML: "),
        ("- a", "the file begins with `models:`"),
        ("", "the file begins with `models:`"),
        ("a: 2024-13-45", "this is no YAML: "),
    ],
)
def test_a_mistake_is_told_by_its_key(text: str, begin: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_config(text)
    assert str(caught.value).startswith(begin)


@pytest.mark.parametrize("text", re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "gateway.md").read_text(), re.MULTILINE | re.DOTALL))
def test_what_the_manual_shows_has_no_mistake(text: str) -> None:
    assert parse_config(text).models


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(SettingError, match=r"models\.chat\.queue: .*; models\.chat\.pin: "):
        parse_config(one(pin=3, queue=-1))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.yaml cannot be read"):
        load_config(tmp_path / "none.yaml")


yamlish = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*Model.model_fields, "models", "x"]), inner, max_size=4),
    max_leaves=12,
)


@given(st.text(max_size=60) | yamlish.map(json.dumps) | yamlish.map(lambda value: json.dumps({"models": {"m": value}})))
def test_whatever_is_in_the_file_it_is_read_or_refused_with_a_sentence(text: str) -> None:
    try:
        parse_config(text)
    except SettingError as error:
        told = str(error)
    else:
        told = "fine"
    assert told


class TestTheExampleIsTheManual:
    def test_it_is_right_and_has_every_key(self) -> None:
        config = load_config(EXAMPLE)
        assert config.model_fields_set == set(ServeConfig.model_fields)
        assert set().union(*(model.model_fields_set for model in config.models.values())) == set(Model.model_fields)
        assert set().union(*(key.model_fields_set for key in config.api_keys)) == set(ApiKey.model_fields)

    def test_it_says_of_every_default_what_it_is(self) -> None:
        chat = load_config(EXAMPLE).models["chat"]
        for name in ("start_timeout_s", "replicas", "concurrency", "queue", "queue_timeout_s", "sleep_mode", "pin", "elastic"):
            assert getattr(chat, name) == Model.model_fields[name].default, name

    def test_every_key_has_its_description_as_the_schema_has_it(self) -> None:
        text = " ".join(re.sub(r"\s*#\s*", " ", line) for line in EXAMPLE.read_text().splitlines())
        text = " ".join(text.split())
        for section in (ServeConfig, Model):
            for name, field in section.model_fields.items():
                first = str(field.description).split(";")[0].split(":")[0].replace("\n", " ")
                assert name in ("engine", "models", "sleep", "upstream_key", "sleep_mode", "model") or " ".join(first.split()) in text, name


def test_the_schema_has_every_key_and_its_meaning() -> None:
    schema = json.loads(json_schema())
    assert set(schema["properties"]) == set(ServeConfig.model_fields)
    properties = schema["$defs"]["Model"]["properties"]
    assert set(properties) == set(Model.model_fields)
    assert all("description" in value for value in properties.values())


@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [("upstream_key", "another", True), ("ttl_s", 9.0, False), ("aliases", ["more"], False), ("weights", 1, True)],
)
def test_what_a_models_servers_have_to_know_makes_new_ones(key: str, value: object, needs: bool) -> None:
    old, new = (parse_config(one(**keys)).models["chat"] for keys in ({}, {key: value}))
    assert needs_new_server(old, new) is needs
    assert not needs_new_server(old, old)
