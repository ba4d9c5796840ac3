# SPDX-License-Identifier: Apache-2.0
"""What was seen over time, and what follows from it. Nothing here reads a clock, a file or a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

FELL_BACK_FRACTION = 1 / 3
"""At the end an engine may still hold this part of its own peak, or what it held idle at the start and as much again: pages of the
null block and of the capped prefix cache."""

NUMBERS = {2: "two", 3: "three", 4: "four"}


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one engine's KV cache. `lease_bytes` covers all it holds, `owned`, `cached` and `parked` say what for; `floor_bytes` is
    what the others must leave to it, `wanted_bytes` what it waits for."""

    lease_bytes: int = 0
    owned_bytes: int = 0
    cached_bytes: int = 0
    parked_bytes: int = 0
    floor_bytes: int = 0
    wanted_bytes: int = 0

    @property
    def rest_bytes(self) -> int:
        """Leased, and neither owned nor cached nor parked: partly used pages, and pages on their way in or out."""
        return max(0, self.lease_bytes - self.owned_bytes - self.cached_bytes - self.parked_bytes)


NOTHING = EngineMemory()


@dataclass(frozen=True, slots=True)
class Sample:
    """The card at one moment, `at_s` seconds after the first sample. An engine that has no entry holds nothing."""

    at_s: float
    engines: dict[str, EngineMemory]

    def of(self, name: str) -> EngineMemory:
        return self.engines.get(name, NOTHING)

    @property
    def lease_bytes(self) -> int:
        return sum(memory.lease_bytes for memory in self.engines.values())


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: what was asked, and the text that came or the error instead."""

    engine: str
    prompt: str
    text: str = ""
    tokens: int = 0
    took_s: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Story:
    """Everything that a run has seen so far. `names` are the engines, in the order in which they are shown, `kinds` what each is."""

    names: tuple[str, ...]
    budget_bytes: int
    kinds: tuple[str, ...] = ("vLLM", "vLLM")
    samples: list[Sample] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)

    @property
    def who(self) -> str:
        """The engines in a sentence."""
        first, *others = self.kinds
        if all(other == first for other in others):
            return f"{NUMBERS.get(len(self.kinds), len(self.kinds))} {first} engines"
        return " and ".join(f"one {kind}" for kind in self.kinds) + " engine"

    def latest(self) -> Sample:
        return self.samples[-1] if self.samples else Sample(0.0, {})

    def answered(self, name: str) -> list[Answer]:
        return [answer for answer in self.answers if answer.engine == name]

    def running(self, name: str) -> int:
        return self.asked.get(name, 0) - len(self.answered(name))

    def peak_lease_bytes(self, name: str) -> int:
        return max((sample.of(name).lease_bytes for sample in self.samples), default=0)

    def may_keep_bytes(self, name: str) -> int:
        idle_bytes = self.samples[0].of(name).lease_bytes if self.samples else 0
        return max(int(FELL_BACK_FRACTION * self.peak_lease_bytes(name)), 2 * idle_bytes)

    def fell_back(self, name: str) -> bool:
        peak_bytes, end_bytes = self.peak_lease_bytes(name), self.latest().of(name).lease_bytes
        return end_bytes < peak_bytes and end_bytes <= self.may_keep_bytes(name)

    def static_bytes(self, name: str) -> int:
        """What a static engine needs for the same requests: the most that this engine's running requests owned at one moment."""
        return max((sample.of(name).owned_bytes for sample in self.samples), default=0)

    def all_static_bytes(self) -> int:
        return sum(self.static_bytes(name) for name in self.names)

    def peak_together_bytes(self) -> int:
        return max((sample.lease_bytes for sample in self.samples), default=0)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the run had to show. What is not `required` depends on how many requests run at once, which a busy machine decides."""

    title: str
    passed: bool
    detail: str
    required: bool = True

    @property
    def mark(self) -> str:
        return "ok" if self.passed else "FAILED" if self.required else "not seen"


def verdict(story: Story, least_samples: int = 20) -> list[Check]:
    """What the run had to show, and whether it did. The first and the last sample must be of idle engines."""
    return [
        _all_answered(story),
        _within_budget(story, least_samples),
        _would_not_fit(story),
        *(_fell_back(story, name) for name in story.names),
    ]


def _all_answered(story: Story) -> Check:
    good = {name: sum(1 for answer in story.answered(name) if answer.text and not answer.error) for name in story.names}
    asked = {name: story.asked.get(name, 0) for name in story.names}
    detail = ", ".join(f"{name} {good[name]} of {asked[name]}" for name in story.names)
    return Check("every request was answered", all(asked.values()) and good == asked, detail)


def _within_budget(story: Story, least_samples: int) -> Check:
    over = [sample for sample in story.samples if sample.lease_bytes > story.budget_bytes]
    worst = f"at most {mib(story.peak_together_bytes())} of {mib(story.budget_bytes)} leased, in {len(story.samples)} samples"
    return Check("leases never passed the budget", not over and len(story.samples) >= least_samples, worst)


def _would_not_fit(story: Story) -> Check:
    each = " + ".join(mib(story.static_bytes(name)) for name in story.names)
    detail = f"{each} = {mib(story.all_static_bytes())}, and the card has {mib(story.budget_bytes)}"
    return Check("static engines would not fit", story.all_static_bytes() > story.budget_bytes, detail, required=False)


def _fell_back(story: Story, name: str) -> Check:
    peak, end = mib(story.peak_lease_bytes(name)), mib(story.latest().of(name).lease_bytes)
    return Check(f"memory of {name} fell back", story.fell_back(name), f"from {peak} to {end}")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the live table, as text; sizes in MiB."""

    name: str
    running: str
    answered: str
    lease: str
    owned: str
    cached: str
    parked: str
    rest: str
    bar: str


def rows(story: Story, bar_width: int = 30) -> list[Row]:
    """A line for each engine and one for the card."""
    sample = story.latest()
    lines = [_engine_row(story, name, sample.of(name), bar_width) for name in story.names]
    return [*lines, _card_row(story, sample, bar_width)]


def _engine_row(story: Story, name: str, memory: EngineMemory, bar_width: int) -> Row:
    sizes = (memory.lease_bytes, memory.owned_bytes, memory.cached_bytes, memory.parked_bytes, memory.rest_bytes)
    return _row(story, name, story.running(name), len(story.answered(name)), sizes, bar_width)


def _card_row(story: Story, sample: Sample, bar_width: int) -> Row:
    engines = list(sample.engines.values())
    sizes = (
        sample.lease_bytes,
        sum(memory.owned_bytes for memory in engines),
        sum(memory.cached_bytes for memory in engines),
        sum(memory.parked_bytes for memory in engines),
        sum(memory.rest_bytes for memory in engines),
    )
    return _row(story, "card", sum(story.running(name) for name in story.names), len(story.answers), sizes, bar_width)


def _row(story: Story, name: str, running: int, answered: int, sizes: tuple[int, int, int, int, int], bar_width: int) -> Row:
    lease, owned, cached, parked, rest = (f"{size / (1 << 20):.0f}" for size in sizes)
    return Row(name, str(running), str(answered), lease, owned, cached, parked, rest, bar(sizes[0], story.budget_bytes, bar_width))


def plain_line(story: Story) -> str:
    """The card in one line, for output that is no terminal."""
    sample = story.latest()
    parts = [f"{name} {mib(sample.of(name).lease_bytes)} ({story.running(name)} running)" for name in story.names]
    return f"{sample.at_s:6.1f} s  " + "   ".join(parts) + f"   card {mib(sample.lease_bytes)} of {mib(story.budget_bytes)}"


def bar(part_bytes: int, whole_bytes: int, width: int) -> str:
    """A bar of `width` characters; anything above nothing shows at least one, more than the whole is marked."""
    filled = round(width * part_bytes / whole_bytes) if whole_bytes else 0
    if part_bytes > 0:
        filled = max(1, filled)
    return "#" * width + "!" if part_bytes > whole_bytes else ("#" * filled).ljust(width, ".")


def mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.0f} MiB"
