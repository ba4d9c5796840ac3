# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: every rank has its own scheduler and its own memory, and all of them decide alike."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from sglang_harness.cases import Batch, Case
from sglang_harness.matrix import INTERPRETED, NEWEST
from sglang_harness.server import Server

from kvcached.card.card import Card

if TYPE_CHECKING:
    from pathlib import Path

OLDER = "0.5.17"  # the exchange is ours and the same on each release; what it is called from differs
VERSIONS = (NEWEST, pytest.param(OLDER, marks=pytest.mark.full))
WAIT_S = 120.0
BIND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
# A rank's page is 64 KiB here: 4 of SGLang's pages, with one of the two heads of both layers.
PAGE_BLOCKS = 4
LOW_PAGES = 8
HOPEFUL = {"tp_size": 2, "schedule_conservativeness": 0.1}  # lets more in than fits to the end
CARDS = {"KVCACHED_CARD": "host:0,host:1", "KVCACHED_VIRTUAL": "32MiB", "KVCACHED_HOST_CAPACITY": "2MiB", "KVCACHED_FLOOR": "0"}
LESS = {"1": {"KVCACHED_HOST_CAPACITY": "768KiB"}}  # on rank 1


def ranked(name: str, *, elastic: bool = True, environment: dict[str, str] | None = None, part: str = "rounds", **also: Any) -> Case:
    return Case(
        name,
        "ranked:ranks",
        elastic=elastic,
        arguments=HOPEFUL,
        environment=BIND | (environment or {}),
        also=PROMPTS | also | {"part": part},
        timeout_s=1_200,
    )


PROMPTS = {"step": 20}
ALONE = Case("alone", elastic=False, also=PROMPTS)
STATIC = ranked("tp-static", elastic=False)
EVEN = ranked("tp-even")
UNEVEN = ranked("tp-uneven", environment=CARDS, environments=LESS, new_tokens=56, may_end=True)
LIMITED = ranked("tp-limited", limits=[[24, LOW_PAGES], [60, 60]], on=1, new_tokens=56)
KILLED = ranked("tp-killed", part="killed", step=12)
CASES = {NEWEST: [ALONE, STATIC, EVEN, UNEVEN, LIMITED, KILLED], OLDER: [ALONE, STATIC, UNEVEN, LIMITED, KILLED]}
ELASTIC = [
    pytest.param(version, case, marks=pytest.mark.full if version == OLDER else ())
    for version, cases in CASES.items()
    for case in cases
    if case in (EVEN, UNEVEN, LIMITED)
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Batch]:
    return {version: Batch(version, cases, tmp_path_factory.mktemp("ranks"), INTERPRETED) for version, cases in CASES.items()}


def ranks(ran: dict[str, Batch], version: str, case: Case) -> list[dict[str, Any]]:
    both: list[dict[str, Any]] = ran[version][case.name]["ranks"]
    assert len(both) == 2
    return both


def stock(ran: dict[str, Batch], version: str) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = ran[version]["alone"]["tokens"]
    return tokens


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_ranks_give_the_tokens_of_one(ran: dict[str, Batch], version: str) -> None:
    assert [rank["tokens"] for rank in ranks(ran, version, STATIC)] == [stock(ran, version)] * 2


@pytest.mark.parametrize(("version", "case"), ELASTIC, ids=lambda part: getattr(part, "name", part))
def test_tokens_are_those_of_the_stock_engine(ran: dict[str, Batch], version: str, case: Case) -> None:
    first, second = ranks(ran, version, case)
    assert first["tokens"] == second["tokens"]
    expected = {name: answer[: len(first["tokens"][name])] for name, answer in stock(ran, version).items()}
    assert {name: answer[:24] for name, answer in first["tokens"].items()} == expected
    assert all("length" in reason or "stop" in reason for reason in first["reasons"].values())
    if case is not UNEVEN:
        assert {len(answer) for answer in first["tokens"].values()} == {case.also.get("new_tokens", 24)}


@pytest.mark.parametrize(("version", "case"), ELASTIC, ids=lambda part: getattr(part, "name", part))
def test_ranks_own_the_same_at_every_step_and_nothing_after_a_flush(ran: dict[str, Batch], version: str, case: Case) -> None:
    first, second = ranks(ran, version, case)
    owned = [[blocks for *_, blocks in rank["steps"]] for rank in (first, second)]
    assert owned[0] == owned[1]
    assert max(owned[0]) > 30
    for rank in (first, second):
        assert max(held for _, _, held, _ in rank["steps"]) > 8
        assert (rank["flushed"], rank["held_pages"], rank["leased"], rank["problems"], rank["exit"]) == (True, [1], [1], [], 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_with_less_memory_makes_all_smaller(ran: dict[str, Batch], version: str) -> None:
    first, second = ranks(ran, version, UNEVEN)
    limits = [{limit for _, limit, *_ in rank["steps"]} for rank in (first, second)]
    assert max(limits[1]) < min(limits[0])
    assert max(owned for *_, owned in first["steps"]) <= max(limits[1]) * PAGE_BLOCKS
    assert first["retracted"] == second["retracted"] == first["counted"] == second["counted"] > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_a_limit_that_falls_on_one_rank_makes_all_smaller_until_it_rises(ran: dict[str, Batch], version: str) -> None:
    first, second = ranks(ran, version, LIMITED)
    low = {step for step, limit, *_ in second["steps"] if limit == LOW_PAGES}
    assert {limit for step, limit, *_ in first["steps"] if step in low}.isdisjoint({LOW_PAGES})
    owned = {step: blocks for step, *_, blocks in first["steps"]}
    assert owned[min(low)] > LOW_PAGES * PAGE_BLOCKS >= owned[max(low)]
    assert max(blocks for step, blocks in owned.items() if step > max(low)) > LOW_PAGES * PAGE_BLOCKS
    assert first["retracted"] == second["retracted"] == first["counted"] == second["counted"] > 0


@pytest.mark.parametrize(("version", "case"), ELASTIC, ids=lambda part: getattr(part, "name", part))
def test_about_one_exchange_a_turn_is_enough(ran: dict[str, Batch], version: str, case: Case) -> None:
    for rank in ranks(ran, version, case):
        assert rank["exchanges"] < 1.5 * len(rank["steps"])


@pytest.mark.parametrize("version", VERSIONS)
def test_ranks_that_do_not_ask_the_same_are_told_so_on_all_of_them(ran: dict[str, Batch], version: str) -> None:
    first = ranks(ran, version, KILLED)[0]
    assert "do not decide alike" in first["different"]
    assert "between [4, 4, 0] and [4, 4, 1]" in first["different"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rank_that_is_killed_is_named_in_the_error_of_the_other(ran: dict[str, Batch], version: str) -> None:
    first, second = ranks(ran, version, KILLED)
    assert second == {"exit": -signal.SIGKILL}
    assert first["error"].startswith("rank 1 of tp-killed (process ")
    assert "rank 1 of tp-killed" in ran[version].log(KILLED.name)


def test_a_server_of_two_ranks_serves_is_seen_and_ends_with_either_of_them(tmp_path: Path) -> None:
    settings = {"KVCACHED_IPC_NAME": "tiny", "KVCACHED_HOST_GRANULARITY": "256KiB", "KVCACHED_HOST_CAPACITY": "128MiB", **BIND}
    server = Server(NEWEST, tmp_path, "--tp-size", "2", **settings)
    try:
        server.wait_until_ready()
        alone = server.complete("one bottle of beer on the wall")
        assert alone[0] == 200
        pids = {entry.instance: entry.record.pid for card in Card.list_cards(server.run_dir) for entry in card.live}
        assert set(pids) == {"tiny", "tiny-tp1"}
        os.kill(server.process.pid, signal.SIGSTOP)  # it looks once a second for a rank that has ended, and may be the first to see it
        os.kill(pids["tiny-tp1"], signal.SIGKILL)
        named = f"rank 1 of tiny (process {pids['tiny-tp1']}) has ended"
        deadline = time.monotonic() + WAIT_S
        while named not in server.log and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(server.process.pid, signal.SIGCONT)
        while server.processes() and time.monotonic() < deadline:
            server.process.poll()
            time.sleep(0.1)
        assert server.processes() == []
        assert named in server.log
        assert sum(card.leased_bytes for card in Card.list_cards(server.run_dir)) == 0
    finally:
        server.kill()
