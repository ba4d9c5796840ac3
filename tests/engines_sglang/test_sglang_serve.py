# SPDX-License-Identifier: Apache-2.0
"""`python -m sglang.launch_server`, unchanged command line, in its usual processes; and starts that must be refused."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sglang_harness.matrix import NEWEST
from sglang_harness.server import Server

from kvcached.card.card import Card
from kvcached.runtime.control import ControlClient
from kvcached.runtime.endpoint import endpoint_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WAIT_S = 120.0
PROMPTS = [f"{number} bottles of beer on the wall, take one down and pass it around; " * (1 + number) for number in range(12)]


def wait_for(condition: Callable[[], Any]) -> Any:
    """The condition's value once it holds, else its last value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"KVCACHED_IPC_NAME": "tiny", "KVCACHED_HOST_GRANULARITY": "256KiB", "KVCACHED_HOST_CAPACITY": "128MiB"}
    server = Server(NEWEST, tmp_path_factory.mktemp("s"), **settings)
    try:
        yield server.wait_until_ready()
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture(scope="module")
def control(server: Server) -> ControlClient:
    return ControlClient(endpoint_path(server.run_dir, "tiny"))


def ask_all(server: Server) -> list[str]:
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        answers = list(clients.map(server.complete, PROMPTS))
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    return [answer["choices"][0]["text"] for _, answer in answers]


def test_it_says_that_it_is_elastic(server: Server) -> None:
    assert "elastic: on, MHATokenToKVPool, page size 16, layout interleaved" in server.log


def test_many_at_once_get_the_answers_of_one_at_a_time(server: Server, control: ControlClient) -> None:
    alone = [server.complete(prompt)[1]["choices"][0]["text"] for prompt in PROMPTS[:3]]
    assert ask_all(server)[:3] == alone
    assert control.status().cached_bytes > 0


def test_a_stream_is_the_same_answer_in_pieces(server: Server) -> None:
    pieces = server.stream(PROMPTS[4], 24)
    assert len(pieces) > 5
    assert "".join(pieces) == server.complete(PROMPTS[4])[1]["choices"][0]["text"]


def test_a_client_that_hangs_up_leaves_nothing_behind(server: Server, control: ControlClient) -> None:
    server.stream("hang up " * 40, 900, pieces=2)
    assert wait_for(lambda: server.call("POST", "/flush_cache")[0] == 200)
    assert wait_for(lambda: (seen := control.status()).owned_bytes + seen.cached_bytes == seen.block_bytes)


def test_control_works_on_an_idle_engine_and_limits_act(server: Server, control: ControlClient) -> None:
    before = ask_all(server)
    step = control.status().page_bytes
    assert control.limit(4 * step).outcome in ("applied", "deferred")
    assert wait_for(lambda: control.status().held_bytes <= 4 * step)
    status, refusal = server.complete("too long for this limit " * 60)
    assert status == 400
    assert "at its present limit" in str(refusal)
    assert ask_all(server) == before
    assert control.limit(1 << 40).outcome == "clamped"
    assert ask_all(server) == before


def test_an_idle_engine_gives_all_but_one_page_back(server: Server, control: ControlClient) -> None:
    ask_all(server)
    assert control.status().held_bytes > control.status().page_bytes
    control.evict(1 << 40)
    control.trim()
    assert wait_for(lambda: (seen := control.status()).held_bytes == seen.lease_bytes == seen.page_bytes)
    assert sum(card.leased_bytes for card in Card.list_cards(server.run_dir)) == control.status().page_bytes


def test_sigterm_ends_it_and_its_lease(server: Server) -> None:
    assert server.stop()
    assert wait_for(lambda: sum(card.leased_bytes for card in Card.list_cards(server.run_dir)) == 0)


def test_a_start_that_cannot_be_elastic_ends_by_name(tmp_path: Path) -> None:
    server = Server(NEWEST, tmp_path, "--enable-hierarchical-cache")
    try:
        server.process.wait(900)
    except subprocess.TimeoutExpired:
        server.kill()
    assert server.process.returncode != 0
    assert "enable_hierarchical_cache=True cannot be elastic" in server.log
