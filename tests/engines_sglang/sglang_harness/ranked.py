# SPDX-License-Identifier: Apache-2.0
"""What is done with an engine of several ranks: each runs a scheduler in a process of its own, and does the same as the others."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from sglang_harness.engine import Rank, ports_of, server_args
from sglang_harness.scenarios import after_flush, count_preemptions, count_retractions, pools_of, send_round, set_limit, start

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_harness.engine import Engine
    from sglang_harness.scenarios import Case, Release

    Part = Callable[[Engine, Case], dict[str, Any]]


def ranks(release: Release, case: Case) -> dict[str, Any]:
    """Start them, and gather what each has seen; of one that has ended without a word, how."""
    arguments = case["arguments"]
    ports = ports_of(server_args(case["model"], arguments))
    children = []
    for number in range(arguments.get("tp_size", 1) * arguments.get("pp_size", 1)):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            run_rank(release, case, Rank(number, ports), writer)
        os.close(writer)
        children.append((child, reader))
    return {"ranks": [word_of(child, reader) for child, reader in children]}


def word_of(child: int, reader: int) -> dict[str, Any]:
    with os.fdopen(reader) as told:
        word = told.read()
    _, status = os.waitpid(child, 0)
    seen: dict[str, Any] = json.loads(word) if word else {}
    return seen | {"exit": os.waitstatus_to_exitcode(status)}


def run_rank(release: Release, case: Case, rank: Rank, writer: int) -> None:
    """In a child, which ends here."""
    status = 1
    try:
        os.environ.update(case.get("environments", {}).get(str(rank.number), {}))
        part: Part = globals()[case["part"]]
        seen = part(start(release, case, rank), case)
        with os.fdopen(writer, "w") as told:
            told.write(json.dumps(seen))
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def rounds(engine: Engine, case: Case) -> dict[str, Any]:
    """Two rounds of the same prompts, the second one with prefixes to find; a limit may fall on one rank, and rise again."""
    retracted = count_retractions(engine)
    limits = dict(case.get("limits", [])) if case.get("on") == engine.rank.number else {}
    steps: list[list[int]] = []
    suffix = name_of(engine).removeprefix(case["name"])

    def watch(_: Engine) -> None:
        for bank in pools_of(engine):
            if engine.step in limits:
                set_limit(bank, limits[engine.step], suffix)
            counts = bank.pool.counts()
            steps.append([engine.step, counts.limit_pages, counts.held_pages, bank.out_pages])

    case = case | {"prompts": case.get("prompts_of", {}).get(str(engine.rank.number), case.get("prompts", 6))}
    send_round(engine, case, "a")
    first = engine.run(watch)
    reasons = engine.reasons()
    send_round(engine, case, "b")
    second = engine.run(watch)
    seen = {"tokens": first | second, "reasons": reasons | engine.reasons(), "retracted": retracted[0], "steps": steps}
    seen["counted"] = count_preemptions(engine)
    seen["evicted"] = {why.value: count for bank in pools_of(engine) for why, count in bank.pool.tally.evicted_blocks.items()}
    if pools_of(engine):
        seen["exchanges"] = 0 if engine.has_own_requests else accord_of(engine)._calls
        seen["block_bytes"] = [bank.pool.geometry.block_bytes for bank in pools_of(engine)]
        seen["suffix"] = suffix
    return seen | after_flush(engine)


def name_of(engine: Engine) -> str:
    """Under which name people find this rank; empty for a stock one."""
    from kvcached.card.card import Card
    from kvcached.config import load_settings

    if not pools_of(engine):
        return ""
    mine = [entry.instance for card in Card.list_cards(load_settings().run_dir) for entry in card.live if entry.record.pid == os.getpid()]
    return min(mine, key=len)


def accord_of(engine: Engine) -> Any:
    return engine.scheduler.token_to_kv_pool_allocator.kvcached_gates.full._accord


def killed(engine: Engine, case: Case) -> dict[str, Any]:
    """The ranks ask different things of each other, which is an error on all of them; then the last one is killed while they work."""
    from kvcached.engines.sglang.ranks import Topic
    from kvcached.errors import InvariantBroken, PeerLost

    seen: dict[str, Any] = {"pid": os.getpid()}
    try:
        accord_of(engine).least(Topic.READY, [1], [engine.rank.number])
    except InvariantBroken as error:
        seen["different"] = str(error)

    def watch(_: Engine) -> None:
        if engine.step == case["step"] and engine.rank.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    send_round(engine, case, "a")
    try:
        engine.run(watch)
    except PeerLost as error:
        seen["error"] = str(error)
    return seen
