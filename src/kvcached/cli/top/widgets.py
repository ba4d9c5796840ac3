# SPDX-License-Identifier: Apache-2.0
"""One widget: lines of text, of which only those are drawn again that changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events

    from kvcached.cli.top.history import CardKey
    from kvcached.cli.top.rows import Line
    from kvcached.cli.top.sampler import PoolKey

STYLES: Final = {
    "": Style(),
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
    "blue": Style(color="blue"),
    "cyan": Style(color="cyan"),
}
_CHOSEN: Final = Style(reverse=True)


class Lines(Widget):
    """Shows lines from its top; what does not fit is cut."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line]) -> None:
        """Draw these lines from now on."""
        before, self.lines = self.lines, tuple(lines)
        width = self.size.width
        longest = max(len(before), len(self.lines))
        changed = [at for at in range(longest) if _at(before, at) != _at(self.lines, at)]
        if width and changed:
            self.refresh(*(Region(0, at, width, 1) for at in changed))

    def render_line(self, y: int) -> Strip:
        line = _at(self.lines, y)
        return self._strip(line, chosen=False)

    def _strip(self, line: Line | None, *, chosen: bool) -> Strip:
        base = self.rich_style
        segments = [Segment(text, base + STYLES[style]) for text, style in line.spans] if line else []
        strip = Strip(segments).adjust_cell_length(self.size.width, base)
        return strip.apply_style(_CHOSEN) if chosen else strip


def _at(lines: Sequence[Line], at: int) -> Line | None:
    return lines[at] if at < len(lines) else None


class Table(Lines, can_focus=True):
    """Lines below a heading that stays; one of those with a key is chosen, and keeps being chosen wherever it moves."""

    class Chosen(Message):
        """Another line is the chosen one."""

    STEPS: ClassVar = {"up": -1, "k": -1, "down": 1, "j": 1}

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.all_lines: Sequence[Line] = ()
        self.chosen: PoolKey | CardKey | None = None
        self._first = 1

    def show_table(self, lines: Sequence[Line]) -> None:
        """A heading and what stands below it. When the chosen line is gone, its neighbour is chosen."""
        place = self._place()
        self.all_lines = tuple(lines)
        if self._place() is None:
            self._choose(place if place is not None else 1, prefer_rank=place is None)
        self._draw()

    def _place(self) -> int | None:
        return next((at for at, line in enumerate(self.all_lines) if line.key is not None and line.key == self.chosen), None)

    def _choose(self, place: int, *, prefer_rank: bool = False) -> None:
        keyed = [at for at, line in enumerate(self.all_lines) if line.key is not None]
        if prefer_rank:
            keyed = [at for at in keyed if len(self.all_lines[at].key or ()) == 3] or keyed
        nearest = min(keyed, key=lambda at: abs(at - place), default=None)
        self.chosen = None if nearest is None else self.all_lines[nearest].key

    def _draw(self) -> None:
        """Scroll as little as is needed to have the chosen line, and the card's line above the first rank, in sight."""
        room = max(1, self.size.height - 1)
        place = self._place() or 1
        lowest = 1 if place <= 2 else place
        self._first = max(1, min(self._first, lowest), place - room + 1)
        self._first = max(1, min(self._first, len(self.all_lines) - room))
        self.show([*self.all_lines[:1], *self.all_lines[self._first : self._first + room]])

    def render_line(self, y: int) -> Strip:
        line = _at(self.lines, y)
        return self._strip(line, chosen=line is not None and line.key is not None and line.key == self.chosen)

    def move(self, by: int) -> None:
        self._go((self._place() or 0) + by)

    def _go(self, place: int) -> None:
        before = self.chosen
        self._choose(max(0, min(place, len(self.all_lines))))
        if self.chosen != before:
            self._draw()
            self.refresh()
            self.post_message(self.Chosen())

    def on_resize(self) -> None:
        self._draw()
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        if event.y > 0:
            self._go(self._first + event.y - 1)

    def on_mouse_scroll_down(self) -> None:
        self.move(3)

    def on_mouse_scroll_up(self) -> None:
        self.move(-3)

    def on_key(self, event: events.Key) -> None:
        page = max(1, self.size.height - 2)
        steps = {**self.STEPS, "pageup": -page, "pagedown": page, "home": -len(self.all_lines), "end": len(self.all_lines)}
        if event.key in steps:
            event.stop()
            self.move(steps[event.key])
