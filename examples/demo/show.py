# SPDX-License-Identifier: Apache-2.0
"""What a person sees: stages, a live table where there is a terminal, plain lines where there is none, answers, the verdict."""

from __future__ import annotations

import contextlib
import textwrap
import time
from typing import TYPE_CHECKING

from examples.demo.series import plain_line, rows
from rich import box
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.demo.series import Answer, Check, Story
    from rich.console import Console

PLAIN_EVERY_S = 2.0
COLUMNS = ("engine", "running", "answered", "leased", "owned", "cached", "parked", "rest")
TABLE_WIDTH = 68  # of all columns but the bar, so that the table fits a terminal of 80
STYLES = ("blue", "dark_orange", "bold")


class PlainScreen:
    """Where a run is shown: lines only; nothing is ever rewritten."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = 0.0

    def stage(self, text: str) -> None:
        """A step of the run begins."""
        self._next_s = 0.0
        self.say(f"== {text}")

    def waiting(self, lines: Sequence[str]) -> None:
        """How the step is going, a line for each engine."""
        if self._due(5 * PLAIN_EVERY_S):
            for line in lines:
                self.say(f"   {shorten(line, 130)}")

    def update(self, story: Story) -> None:
        """The card as it is now."""
        if self._due(PLAIN_EVERY_S):
            self.say(plain_line(story))

    def answer(self, answer: Answer) -> None:
        self.say(answer_line(answer, 150))

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def checks(self, checks: Sequence[Check]) -> None:
        for check in checks:
            self.say(f"  {check.mark:8}  {check.title}: {check.detail}")

    def _due(self, every_s: float) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + every_s
        return True


class LiveScreen(PlainScreen):
    """The same, with a table at the bottom that is rewritten in place. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(Text(""), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.update(Text(""), refresh=True)
        self._live.stop()

    def waiting(self, lines: Sequence[str]) -> None:
        width = self._console.width - 4
        self._live.update(Text("\n".join("   " + shorten(line, width) for line in lines), style="dim"), refresh=True)

    def update(self, story: Story) -> None:
        self._live.update(table(story, bar_width=max(8, self._console.width - TABLE_WIDTH)), refresh=True)

    def answer(self, answer: Answer) -> None:
        self.say(answer_line(answer, self._console.width - 1))

    def checks(self, checks: Sequence[Check]) -> None:
        for check in checks:
            mark = (f"{check.mark:8}", "bold green" if check.passed else "bold red" if check.required else "yellow")
            self._console.print(Text.assemble("  ", mark, f"  {check.title}: ", (check.detail, "dim")))


def table(story: Story, bar_width: int) -> Table:
    """The live table: a row for each engine, one for the card, and what static engines would hold."""
    title = f"the card: {story.budget_bytes >> 20} MiB for all engines together; sizes in MiB"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    shown.add_column("of the card", no_wrap=True)
    lines = rows(story, bar_width)
    for number, row in enumerate(lines):
        style = STYLES[min(number, len(STYLES) - 1)] if row.name != "card" else "bold"
        cells = (row.name, row.running, row.answered, row.lease, row.owned, row.cached, row.parked, row.rest, row.bar)
        shown.add_row(*cells, style=style, end_section=number == len(lines) - 2)
    shown.caption = f"{len(story.names)} static engines, for what was seen so far: {story.all_static_bytes() >> 20} MiB, all the time"
    shown.caption_justify = "left"
    return shown


def answer_line(answer: Answer, width: int) -> str:
    said = f"FAILED: {answer.error}" if answer.error else answer.text or "FAILED: no text"
    head = f"{answer.engine:>8} {answer.took_s:5.1f} s | "
    return head + shorten(f"{answer.prompt} -> {said}", width - len(head))


def shorten(text: str, width: int) -> str:
    """One line of at most `width` characters."""
    return textwrap.shorten(text, max(10, width), placeholder=" ...")


def open_screen(console: Console, live: bool) -> contextlib.AbstractContextManager[PlainScreen]:
    """A live screen on a terminal unless it is not wanted; else a plain one."""
    return LiveScreen(console) if live and console.is_terminal else contextlib.nullcontext(PlainScreen(console))
