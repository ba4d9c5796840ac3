# SPDX-License-Identifier: Apache-2.0
"""Rounds in which one of several mapper processes is killed while its owner works; what must hold after each."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from typing import TYPE_CHECKING, Final

from kvcached.ranks.api import Outcome, Verdict
from kvcached.ranks.group import RankGroup
from kvcached.runtime.cards import OpenCard, rank_socket
from kvcached.testing.rank_processes import Child, Nursery, Place, hello

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

_WAIT_S: Final = 30.0
_MOST_OPERATIONS: Final = 10
_LONGEST_DELAY_S: Final = 0.005
"""About as long as an operation takes: the kill comes before, during or after the one that is chosen."""


class KillRounds:
    """`play` starts ranks and owner, kills one rank at a random moment, and checks. Raises `AssertionError` for what does not hold.

    `maps` and `killed_at_work` count, so that a run can show that something happened.
    """

    def __init__(self, place: Place, nursery: Nursery, card: OpenCard, chance: random.Random, ranks: int) -> None:
        self._place = place
        self._nursery = nursery
        self._card = card
        self._chance = chance
        self._ranks = ranks
        self.maps = 0
        self.killed_at_work = 0

    def play(self, number: int) -> None:
        instance = f"round{number}"
        children = [self._nursery.rank(instance, rank) for rank in range(self._ranks)]
        sockets = [rank_socket(self._card.settings.run_dir, instance, rank) for rank in range(self._ranks)]
        group = RankGroup(sockets, hello(instance), _WAIT_S)
        told: list[str] = []
        group.when_lost(told.append)
        if number % 2:
            group.begin_steps()
        victim = self._chance.randrange(self._ranks)
        mapped, under_way = self._work(group, children, victim, in_band=bool(number % 2))
        children[victim].kill()
        self._check_reason(told, victim, sockets, children)
        survivors = [child for rank, child in enumerate(children) if rank != victim]
        self._check_survivors(survivors, mapped, under_way)
        group.close()
        for child in survivors:
            if not child.ask("close"):
                raise AssertionError("a survivor did not close")
            child.kill()
        self._check_card_is_empty()

    def _work(self, group: RankGroup, children: list[Child], victim: int, *, in_band: bool) -> tuple[set[int], set[int]]:
        """Random work until the rank is gone. (pages that were mapped for good, pages of which the last word is not known)."""
        mapped: set[int] = set()
        step = 0
        last = self._chance.randrange(_MOST_OPERATIONS)
        for operation in itertools.count():
            if operation == last:
                threading.Timer(self._chance.uniform(0.0, _LONGEST_DELAY_S), children[victim].signal, [signal.SIGKILL]).start()
            pages = self._pick(mapped)
            grows = not pages <= mapped
            runs = [(page, 1) for page in sorted(pages)]
            outcome = _end(group.map(runs, urgent=True) if grows else group.unmap(runs, step))
            if outcome.verdict is Verdict.BROKEN:
                self.killed_at_work += 1
                return mapped - pages, pages
            if outcome.verdict is Verdict.EXHAUSTED:  # the card's lock was not free in time: nothing has changed
                continue
            if outcome.verdict is not Verdict.DONE:
                raise AssertionError(outcome)
            mapped = mapped | pages if grows else mapped - pages
            self.maps += grows
            if in_band:
                step += 1
                if not self._step(group, children, victim, step):
                    return set(), set(range(self._place.pages))  # maps that rode on a step may not have come everywhere
        raise AssertionError("the work has no end")

    def _pick(self, mapped: set[int]) -> set[int]:
        most = self._place.card_pages // self._ranks
        grow = len(mapped) < most and (not mapped or self._chance.random() < 0.6)
        choice = sorted(set(range(self._place.pages)) - mapped if grow else mapped)
        return set(self._chance.sample(choice, min(self._chance.randint(1, 6), len(choice), most - len(mapped) if grow else len(mapped))))

    def _step(self, group: RankGroup, children: list[Child], victim: int, step: int) -> bool:
        """Bring a step to every rank. False when one is dead."""
        ops = group.step_ops()
        answers = [_attempt(child, lambda child: child.begin("step", step, ops)) for child in children]
        answers = [begun and _attempt(child, lambda child: child.end()) for child, begun in zip(children, answers, strict=True)]
        if not all(alive for rank, alive in enumerate(answers) if rank != victim):
            raise AssertionError(f"a rank that was not killed does not step: {answers}")
        return answers[victim]

    def _check_reason(self, told: list[str], victim: int, sockets: list[Path], children: list[Child]) -> None:
        end = time.monotonic() + _WAIT_S
        while not told and time.monotonic() < end:
            time.sleep(0.005)
        if len(told) != 1:
            raise AssertionError(f"the loss was told {len(told)} times")
        for part in (f"rank {victim} ", str(sockets[victim]), f"pid {children[victim].pid}"):
            if part not in told[0]:
                raise AssertionError(f"{part!r} is not in {told[0]!r}")

    def _check_survivors(self, survivors: list[Child], mapped: set[int], unknown: set[int]) -> None:
        """They are the same in all that was settled, and what they lease is what they hold."""
        for child in survivors:
            pages = set(child.ask("mapped"))
            if pages - unknown != mapped:
                raise AssertionError(
                    f"process {child.pid} has mapped {sorted(pages)}, settled was {sorted(mapped)}, open {sorted(unknown)}"
                )
            leased, held = child.ask("status")
            if held > leased:
                raise AssertionError(f"process {child.pid} holds {held} bytes and leases {leased}")
        live = {entry.record.pid for entry in self._card.record.snapshot().live}
        if live != {child.pid for child in survivors}:
            raise AssertionError(f"live entries are those of {live}")

    def _check_card_is_empty(self) -> None:
        free_bytes, total_bytes = self._card.device.memory()
        leased = self._card.record.snapshot().leased_bytes
        if leased or free_bytes != total_bytes:
            raise AssertionError(f"{leased} bytes are leased and {total_bytes - free_bytes} held by nobody")


def _end(future: Future[Outcome]) -> Outcome:
    return future.result(_WAIT_S)


def _attempt(child: Child, call: Callable[[Child], object]) -> bool:
    """False when it is dead."""
    try:
        call(child)
    except OSError:
        return False
    except AssertionError as error:
        if "is dead" in str(error):
            return False
        raise
    return True
