# SPDX-License-Identifier: Apache-2.0
"""Three real vLLM servers on a card with room for one and a half of them; the load moves on every 20 seconds, for five minutes.

Each engine in turn is offered more than lies above the others' floors. The others are idle then, and hold what is in their prefix caches:
at most their floors, as soon as it is needed, and of all prefixes the hot ones. In every second round the engine that comes next has been
emptied, and comes back into the full load of the one before it. Times are recorded, never asserted: `figures.json` beside the servers'
logs has them all, and `benchmarks/three_engines.py` makes a page of it.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from examples.demo.picture import draw
from examples.demo.run import write_samples
from examples.demo.series import Story
from relay import SAMPLE_S, Client, Pressure, Reply, WatchedCard, core_seconds
from serving import ROOT, missing
from shares import Timeline, Turn

from kvcached.testing.kinds import VLLM, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODEL = ROOT / ".cache" / "models" / "llama"
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
NAMES = ("north", "east", "south")
IN_FLIGHT, REQUEST_TOKENS = 8, 1_024
FULL_BYTES = IN_FLIGHT * REQUEST_TOKENS * TOKEN_BYTES  # one engine's full demand
BUDGET_BYTES = int(1.5 * FULL_BYTES)
PAGE_BYTES = BUDGET_BYTES // 64
FLOOR_BYTES = 14 * PAGE_BYTES  # of three: more than two of them and a full demand together do not fit the budget
FLOOR_TOKENS = FLOOR_BYTES // TOKEN_BYTES
HOT_PROMPTS, HOT_TOKENS = 2, 576  # half of a floor: their blocks lie on more pages than they would fill
RETURN_TOKENS = FLOOR_TOKENS - 64  # one request that needs all of a floor in one step: with its answer and the null block, no more
SHAPE = Shape(IN_FLIGHT, RETURN_TOKENS + 128)
OPTIONS = ("--max-num-batched-tokens", str(SHAPE.sequence_tokens), "--enable-prompt-tokens-details")
TURNS, TURN_S, OVERLAP_S, EMPTY_S = 15, 20.0, 3.0, 6.0
WAITING_S, PROCESSES = 12, ("EngineCore", "Worker")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(3_600),
    pytest.mark.xdist_group("three_engines"),
    pytest.mark.skipif(bool(missing(VLLM)) or not MODEL.exists(), reason=missing(VLLM) or "no tiny model; make engines sets it up"),
]


@dataclass(slots=True)
class Seen:
    """What happened when; seconds on the card's clock."""

    turns: list[Turn] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)  # of each turn, while requests only decode
    hot: list[dict[str, Any]] = field(default_factory=list)
    returns: list[dict[str, Any]] = field(default_factory=list)
    idle_from_s: dict[str, float] = field(default_factory=dict)
    replies: list[Reply] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)


class Course:
    """The three engines' clients, and whose turn it is."""

    def __init__(self, card: WatchedCard) -> None:
        self.card = card
        self.seen = Seen()
        engines = [card.start(name, VLLM, SHAPE, OPTIONS, FLOOR=FLOOR_BYTES) for name in NAMES]
        self.clients = [Client(engine.wait_until_ready(), self.seen.replies, seed) for seed, engine in enumerate(engines)]
        self.hot = [[client.prompt(HOT_TOKENS) for _ in range(HOT_PROMPTS)] for client in self.clients]
        self._draining: dict[int, Pressure] = {}

    def load(self, number: int, least_prompt_tokens: int = 640) -> Pressure:
        """Requests of 1,024 tokens each, most of it prompt; their lengths differ, so that they do not end together."""
        client = self.clients[number]
        lengths = itertools.cycle(range(least_prompt_tokens, 961, 64))

        def next_request() -> tuple[str, int]:
            prompt_tokens = next(lengths)
            return client.prompt(prompt_tokens), REQUEST_TOKENS - prompt_tokens

        return Pressure(client, IN_FLIGHT, next_request)

    def turn(self, turn: int) -> None:
        number = turn % len(NAMES)
        client = self.clients[number]
        start_s = self.card.now_s()
        if turn >= len(NAMES) and not self._is_emptied(turn):
            self._ask_for_hot(number, start_s)
        sum_s, count = client.step_times()
        load = self.load(number)
        self._settle_former(number)
        self._sleep_until(start_s + TURN_S - EMPTY_S)
        if self._is_emptied(turn + 1):
            self._empty((number + 1) % len(NAMES))
        self._sleep_until(start_s + TURN_S - OVERLAP_S)
        if self._is_emptied(turn + 1):
            self._return((number + 1) % len(NAMES), turn)
        self._sleep_until(start_s + TURN_S)
        self.seen.turns.append(Turn(client.engine.name, start_s, self.card.now_s()))
        load.stop()
        self._draining[number] = load
        later_s, later_count = client.step_times()
        self.seen.step_s.append((later_s - sum_s) / max(1.0, later_count - count))

    def _is_emptied(self, turn: int) -> bool:
        """Whether the engine of this turn comes back with nothing: in every second round, beginning with the third."""
        return turn < TURNS and (turn // len(NAMES)) % 2 == 0 and turn >= len(NAMES)

    def _sleep_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self.card.now_s()))

    def _settle_former(self, number: int) -> None:
        """The one before has its last requests answered, and its hot prompts asked once more, while the next one has its load already."""
        for former in [former for former in self._draining if former != number]:
            self._draining.pop(former).finish()
            self.clients[former].ask_all(self.hot[former], 8)
            self.seen.idle_from_s[NAMES[former]] = self.card.now_s()

    def _ask_for_hot(self, number: int, at_s: float) -> None:
        """After two turns of others: what of the hot prompts is still in the prefix cache, and what was held at least in between."""
        name = NAMES[number]
        kept_bytes = self.card_line().least_kept_bytes(name, self.seen.idle_from_s[name], at_s)
        replies = self.clients[number].ask_all(self.hot[number], 8)
        found, asked = sum(reply.cached_tokens for reply in replies), sum(reply.prompt_tokens for reply in replies)
        self.seen.hot.append({"engine": name, "found_tokens": found, "asked_tokens": asked, "least_kept_bytes": kept_bytes})

    def _empty(self, number: int) -> None:
        pool = self.card.pool(NAMES[number])
        pool.evict(BUDGET_BYTES)
        pool.trim()

    def _return(self, number: int, turn: int) -> None:
        client = self.clients[number]
        at_s = self.card.now_s()
        client.ask(client.prompt(RETURN_TOKENS), 4)
        self.seen.returns.append({"engine": NAMES[number], "asked_s": at_s, "answered_s": self.card.now_s(), "into_turn": turn})

    def finish(self) -> None:
        for load in self._draining.values():
            load.finish()

    def wait_for_nothing(self, holder: int, other: int, waiter: int) -> None:
        """The other's floor is so large that two long requests of the holder leave less than the waiter's one needs: it only waits."""
        name, engine = NAMES[waiter], self.clients[waiter].engine
        for number in range(len(NAMES)):
            self._empty(number)
        self.card.pool(name).floor(0)
        self.card.pool(NAMES[other]).floor(33 * PAGE_BYTES)
        held = self.clients[holder]
        load = Pressure(held, 2, lambda: (held.prompt(1_740), 1_000))
        self._wait_until(lambda: self.card.seen[-1].of(NAMES[holder]).owned_bytes >= 18 * PAGE_BYTES)
        question = Pressure(self.clients[waiter], 1, lambda: (self.clients[waiter].prompt(RETURN_TOKENS), 8))
        question.stop()
        load.stop()
        self._wait_until(lambda: self.card.seen[-1].of(name).wanted_bytes > 0)
        for _ in range(WAITING_S):
            at_s, before_s = self.card.now_s(), [core_seconds(engine, title) for title in PROCESSES]
            time.sleep(1)
            now_s = self.card.now_s()
            used_s = [core_seconds(engine, title) - used_s for title, used_s in zip(PROCESSES, before_s, strict=True)]
            samples = [sample.of(name) for sample in self.card_line().between(at_s, now_s)]
            waits = any(memory.wanted_bytes for memory in samples) and all(memory.owned_bytes < PAGE_BYTES for memory in samples)
            shares = {title: used_s / (now_s - at_s) for title, used_s in zip(PROCESSES, used_s, strict=True)}
            self.seen.waiting.append({"only_waits": waits, **shares})
        load.finish()
        question.finish()

    def _wait_until(self, holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
        end_s = self.card.now_s() + timeout_s
        while not holds() and self.card.now_s() < end_s:
            time.sleep(SAMPLE_S)

    def card_line(self) -> Timeline:
        return Timeline(BUDGET_BYTES, PAGE_BYTES, self.card.seen)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedCard]:
    card = WatchedCard(tmp_path_factory.mktemp("card"), BUDGET_BYTES, MODEL)
    yield card
    card.close()


def figures_of(course: Course, line: Timeline) -> dict[str, Any]:
    """All that was measured, by name. Times are in seconds."""
    seen, shares = course.seen, list(line.shares(course.seen.turns))
    alone = [share.fraction for share in shares if share.alone]
    preemptions = list(line.preemptions([look for look in course.card.looks if look.answered_s <= line.samples[-1].at_s]))
    last = {look.pool: look.counters for look in course.card.looks}
    for comeback in seen.returns:
        found = line.floor_return_s(comeback["engine"], comeback["asked_s"], comeback["answered_s"])
        comeback["floor_s"], comeback["floor_since_asked_s"] = found or (None, None)
        comeback["victims_step_s"] = seen.step_s[comeback["into_turn"]]
    return {
        "requests": len(seen.replies),
        "failed": [reply.error for reply in seen.replies if reply.error],
        "least_room_bytes": line.least_room_bytes(),
        "samples": len(line.samples),
        "shares": {
            "hungry samples": len(shares),
            "of them alone": len(alone),
            "alone, at 95 % or more": sum(fraction >= 0.95 for fraction in alone),
            "alone, least": min(alone, default=None),
            "all, at 95 % or more": sum(share.fraction >= 0.95 for share in shares),
            "all, least": min((share.fraction for share in shares), default=None),
        },
        "turns": [
            asdict(turn) | {"step_s": step_s, "takeover_s": line.takeover_s(turn)}
            for turn, step_s in zip(seen.turns, seen.step_s, strict=True)
        ],
        "hot": seen.hot,
        "returns": seen.returns,
        "preemptions": [asdict(preemption) for preemption in preemptions],
        "counters": last,
        "waiting": seen.waiting,
    }


def test_memory_follows_the_load_through_three_engines(card: WatchedCard, record_property: Callable[[str, object], None]) -> None:
    course = Course(card)
    begin = len(card.seen)
    for turn in range(TURNS):
        course.turn(turn)
    course.finish()
    line = Timeline(BUDGET_BYTES, PAGE_BYTES, card.seen[begin:])
    course.wait_for_nothing(holder=0, other=1, waiter=2)
    figures = figures_of(course, line)
    keep(card.folder, line, figures)
    for name, figure in figures.items():
        record_property(name, json.dumps(figure))

    assert figures["failed"] == []
    assert card.overcommitted == []
    assert line.least_room_bytes() >= 0, "a floor was lent"
    assert [turn["engine"] for turn in figures["turns"] if turn["takeover_s"] is None] == [], "the load never got what it could have"
    assert [hot for hot in figures["hot"] if hot["least_kept_bytes"] < FLOOR_BYTES - PAGE_BYTES] == [], "a floor did not survive"
    assert [comeback for comeback in figures["returns"] if comeback["floor_s"] is None] == [], "a floor was not to be had"
    must_agree(course.seen.replies)
    missed = goals_missed(figures)
    if missed:
        pytest.xfail(f"not reached yet: {'; '.join(missed)}")


def goals_missed(figures: dict[str, Any]) -> list[str]:
    """What is wanted and not there yet, as the newest page of results says too."""
    found, asked = (sum(hot[tokens] for hot in figures["hot"]) for tokens in ("found_tokens", "asked_tokens"))
    avoidable = sum(counters["avoidable_preemptions"] for counters in figures["counters"].values())
    wanted = (
        (found >= 0.9 * asked, f"{found} of {asked} hot tokens were found, 90 % are wanted"),
        (avoidable == 0, f"{avoidable} requests were put back while others could have given memory, none is wanted"),
    )
    return [goal for holds, goal in wanted if not holds]


def must_agree(replies: list[Reply]) -> None:
    """A prompt has one answer, whether its prefix was cached, evicted or computed anew."""
    said: dict[str, set[str]] = {}
    for reply in replies:
        if not reply.error:
            said.setdefault(reply.prompt, set()).add(reply.text)
    assert [texts for texts in said.values() if len(texts) > 1] == []


def keep(folder: Path, line: Timeline, figures: dict[str, Any]) -> None:
    story = Story(NAMES, BUDGET_BYTES, (VLLM.title,) * len(NAMES), samples=line.samples)
    write_samples(story, folder / "memory.csv")
    begin_s = line.samples[0].at_s
    drawn = replace(story, samples=[replace(sample, at_s=sample.at_s - begin_s) for sample in line.samples])
    draw(drawn, folder, "three-engines")
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
