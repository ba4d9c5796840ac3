# SPDX-License-Identifier: Apache-2.0
"""The gates of a pipeline's stages, on pools of a host card in one process, with work drawn at random: the engine is left out, and what
the stages tell each other goes from hand to hand."""

from __future__ import annotations

import random
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_harness.scenarios import Case, Release

PAGES = 256


class Wire:
    """What every stage has told, by the number of the exchange."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.told: dict[int, list[tuple[list[int], list[int]]]] = {}


class Told:
    def __init__(self, wire: Wire, number: int) -> None:
        self._wire = wire
        self._number = number

    def answer(self) -> list[int]:
        told = self._wire.told[self._number]
        assert len(told) == self._wire.stages, "a stage would wait for one that waits for it"
        assert all(alike == told[0][1] for _, alike in told)
        return [min(column) for column in zip(*(numbers for numbers, _ in told), strict=True)]


class Stage:
    """One stage: its accord, its gate, and the pages that its engine owns."""

    def __init__(self, wire: Wire, pool: Any) -> None:
        import torch

        from kvcached.engines.sglang.staged import StagedAgreement, StagedGate
        from kvcached.engines.sglang.stock import StockedBank

        self.stages = wire.stages
        self._wire = wire
        self._calls = 0
        pool.grow(1)
        pool.take_ids([0])
        pool.pin_page_of(0)
        self.pool = pool
        self.bank = StockedBank(pool, 1, torch.device("cpu"))
        self.gate = StagedGate(self.bank, self)  # type: ignore[arg-type]
        self.scheduler = SimpleNamespace(running_mbs=[], mbs=[], chunked_req=None, waiting_queue=[], page_size=1, pp_loop_size=wire.stages)
        self.agreement = StagedAgreement(self, [self.gate], self.scheduler, 40)  # type: ignore[arg-type]
        self.gate.start_with(self.gate.offer())
        self.owned: list[int] = []
        self.quota: list[int] = []

    def ask(self, topic: int, numbers: Sequence[int], alike: Sequence[int]) -> Told:
        self._calls += 1
        self._wire.told.setdefault(self._calls, []).append(([*numbers], [*alike]))
        return Told(self._wire, self._calls)

    def turn(self, wanted: int, given: float, clear: bool) -> bool:
        """Whether it could take what it wanted."""
        with self.pool.lock:
            return self._turn(wanted, given, clear)

    def _turn(self, wanted: int, given: float, clear: bool) -> bool:
        if clear:
            self.bank.clear()
            self.owned = []
        self.agreement.begin(0)
        self.quota.append(self.gate._agreed.ready)
        count = int(len(self.owned) * given)
        self.give(count)
        if not self.gate.secure(wanted):
            return False
        self.owned += self.bank.take(wanted).tolist()
        return True

    def give(self, count: int) -> None:
        import torch

        back, self.owned = self.owned[:count], self.owned[count:]
        if back:
            self.bank.give(torch.tensor(back))


def stages(release: Release, case: Case) -> dict[str, Any]:
    """Each stage runs as many turns ahead of the last one as the engine lets it. What one could take, all could."""
    from kvcached.core.limits import Limits
    from kvcached.runtime.api import open_card
    from kvcached.testing.consistency import must_be_consistent

    draw, wire = random.Random(case["seed"]), Wire(case["stages"])
    turns: list[tuple[int, float, bool]] = []
    could: list[dict[int, bool]] = []
    with ExitStack() as undo:
        ranks = []
        for number in range(wire.stages):
            card = undo.enter_context(open_card(f"host:{number}", instance_name=f"stage{number}"))
            elastic = undo.enter_context(card.open_pool("slots", block_bytes=4096 * (number + 1), blocks=PAGES + 1))
            ranks.append(Stage(wire, elastic._pool))
        busy, steps = case["turns"], case["turns"] + 20
        for step in range(steps + wire.stages):
            idle = (0, 1.0, False)
            turns.append((draw.randrange(1, 24), draw.choice((0.0, 0.0, 0.2, 1.0)), draw.random() < 0.02) if step < busy else idle)
            could.append({})
            for place in reversed(range(wire.stages)):
                turn = step - place
                if 0 <= turn < steps:
                    could[turn][place] = ranks[place].turn(*turns[turn])
                    assert ranks[place].bank.problems() == []
            if draw.random() < 0.1:
                rank = draw.choice(ranks)
                rank.pool.set_limits(Limits(draw.randrange(20, PAGES) * rank.pool.geometry.block_stride_bytes))
        quotas = [rank.quota for rank in ranks]
        for rank in ranks:
            must_be_consistent(rank.pool)
        left = [rank.bank.stock_pages for rank in ranks]
    return {
        "left": left,
        "alike": all(len(set(answers.values())) <= 1 for answers in could),
        "quotas": [quota == quotas[0] for quota in quotas],
        "taken": sum(all(answers.values()) for answers in could[:busy]),
        "refused": sum(not any(answers.values()) for answers in could[:busy]),
    }
