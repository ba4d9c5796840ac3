# SPDX-License-Identifier: Apache-2.0
"""A prompt that can never fit is turned away in the front end; a pool that cannot be asked refuses nothing."""

from pathlib import Path

import pytest

from kvcached.engines.vllm import prompt_check
from kvcached.engines.vllm.prompt_check import PromptCheck
from kvcached.runtime.control import ControlServer, PoolStatus
from kvcached.runtime.endpoint import endpoint_path


class OnePool:
    """Answers status; nothing else is asked."""

    def __init__(self):
        self.longest_tokens = 500
        self.asked = 0

    def status(self):
        self.asked += 1
        return PoolStatus(instance="one", longest_request_tokens=self.longest_tokens)


@pytest.fixture
def pool(tmp_path: Path):
    pool = OnePool()
    (tmp_path / "pools").mkdir(mode=0o700)
    server = ControlServer(endpoint_path(tmp_path, "one"), pool)
    server.start()
    yield pool
    server.stop()


@pytest.fixture
def check(tmp_path: Path, pool: OnePool, monkeypatch: pytest.MonkeyPatch) -> PromptCheck:
    monkeypatch.setattr(prompt_check, "_TIMEOUT_S", 10.0)
    return PromptCheck(tmp_path, ["one"])


def prompt(tokens):
    return {"type": "token", "prompt_token_ids": [1] * tokens}


def test_the_longest_prompt_passes_and_one_more_token_does_not(check: PromptCheck):
    check.require_room(prompt(500))
    with pytest.raises(ValueError, match=r"the prompt has 501 tokens .* can hold 500 .*kvctl limit"):
        check.require_room(prompt(501))


def test_the_pool_is_asked_once_a_second_and_for_long_prompts_only(check: PromptCheck, pool: OnePool):
    check.require_room(prompt(256))
    assert pool.asked == 0
    for _ in range(20):
        check.require_room(prompt(400))
    assert pool.asked == 1


@pytest.mark.parametrize("inputs", [{"type": "embeds", "prompt_embeds": [1] * 900}, ["no", "dict"], {"prompt_token_ids": None}])
def test_inputs_without_token_ids_are_left_to_the_scheduler(check: PromptCheck, pool: OnePool, inputs):
    check.require_room(inputs)
    assert pool.asked == 0


def test_a_pool_that_does_not_know_or_does_not_answer_refuses_nothing(check: PromptCheck, pool: OnePool, tmp_path: Path):
    pool.longest_tokens = 0
    check.require_room(prompt(9_000))
    PromptCheck(tmp_path, "gone").require_room(prompt(9_000))


def test_what_one_of_several_cores_can_hold_passes(tmp_path: Path, pool: OnePool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_check, "_TIMEOUT_S", 10.0)
    other = OnePool()
    other.longest_tokens = 900
    server = ControlServer(endpoint_path(tmp_path, "two"), other)
    server.start()
    try:
        check = PromptCheck(tmp_path, ["one", "two"])
        check.require_room(prompt(900))
        with pytest.raises(ValueError, match="can hold 900"):
            check.require_room(prompt(901))
    finally:
        server.stop()


def test_a_core_that_does_not_answer_might_hold_anything(tmp_path: Path, pool: OnePool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_check, "_TIMEOUT_S", 10.0)
    PromptCheck(tmp_path, ["one", "nobody"]).require_room(prompt(9_000))
