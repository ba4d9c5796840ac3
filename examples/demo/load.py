# SPDX-License-Identifier: Apache-2.0
"""The load: bursts that pass from engine to engine, each request in a thread of its own."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from examples.demo.plan import Relay, burst_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from examples.demo.ask import Server
    from examples.demo.series import Answer, Story


@dataclass(frozen=True, slots=True)
class Questioner:
    """An engine and what it is asked."""

    server: Server
    prompts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`bursts` bursts of `size` requests in turn; after `seconds` no further burst starts."""

    bursts: int
    size: int
    seconds: float
    tick_s: float = 0.2


class Load:
    """Runs a `LoadPlan`. `on_tick` is called every `tick_s` in the caller's thread, `on_answer` with each answer."""

    def __init__(
        self,
        questioners: Sequence[Questioner],
        plan: LoadPlan,
        story: Story,
        ask: Callable[[Server, str], Answer],
        on_tick: Callable[[], None],
        on_answer: Callable[[Answer], None],
    ) -> None:
        self._questioners = questioners
        self._plan = plan
        self._story = story
        self._ask = ask
        self._on_tick = on_tick
        self._on_answer = on_answer
        self._relay = Relay(plan.bursts, plan.size)
        self._burst_of: dict[Future[Answer], int] = {}

    def run(self) -> None:
        """Until every burst has been answered."""
        end_s = time.monotonic() + self._plan.seconds
        with ThreadPoolExecutor(self._plan.size * len(self._questioners) * 2, thread_name_prefix="ask") as threads:
            try:
                while self._start_due(threads) or self._burst_of:
                    self._collect()
                    self._on_tick()
                    if time.monotonic() > end_s:
                        self._relay.stop()
            finally:
                for future in self._burst_of:
                    future.cancel()

    def _start_due(self, threads: ThreadPoolExecutor) -> bool:
        burst = self._relay.due()
        if burst is None:
            return False
        turn, number = burst % len(self._questioners), burst // len(self._questioners)
        questioner = self._questioners[turn]
        prompts = burst_prompts(questioner.prompts, number, self._plan.size)
        self._story.asked[questioner.server.name] = self._story.asked.get(questioner.server.name, 0) + len(prompts)
        for prompt in prompts:
            self._burst_of[threads.submit(self._ask, questioner.server, prompt)] = burst
        return True

    def _collect(self) -> None:
        """Take the answers that have come, after waiting for one tick at most."""
        end_s = time.monotonic() + self._plan.tick_s
        done, _ = wait(self._burst_of, timeout=self._plan.tick_s, return_when=FIRST_COMPLETED)
        for future in done:
            self._relay.answered(self._burst_of.pop(future))
            answer = future.result()
            self._story.answers.append(answer)
            self._on_answer(answer)
        time.sleep(max(0.0, min(self._plan.tick_s, end_s - time.monotonic())))
