# SPDX-License-Identifier: Apache-2.0
"""The live screen. The drawing loop reads small files and memory only; whatever may wait for a pool runs in a thread of its own."""

from __future__ import annotations

import textwrap
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import App
from textual.message import Message
from textual.widgets import Input

from kvcached.cli.answers import LIMIT
from kvcached.cli.live import none_text
from kvcached.cli.top.actions import TRIM, Order, Reply, inquire, perform
from kvcached.cli.top.detail import describe, graph
from kvcached.cli.top.history import LIVE_SAMPLES, History
from kvcached.cli.top.rows import SORTS, Line, State, View, build, find_row
from kvcached.cli.top.screens import AmountScreen, HelpScreen, QuestionScreen
from kvcached.cli.top.widgets import Lines, Table
from kvcached.runtime.control import ControlClient
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvcached.cli.top.rows import Span
    from kvcached.cli.top.sampler import RankRow, Sample, Sampler

DRAWS_PER_S: Final = 2.0
SAMPLES_PER_S: Final = 10.0
THOROUGH_EVERY: Final = 5
"""A file or a process that goes away is seen at most half a second later."""
_INQUIRY_S: Final = 2.0
_KEYS: Final = "q quit  s sort  / filter  p pause  l limit  t trim  +- time  ? help"
_START_SOMETHING: Final = "Start an engine with ENABLE_KVCACHED=true, or look elsewhere with --run-dir. This screen goes on looking."


@dataclass(frozen=True, slots=True)
class Options:
    """`ask_s`: how long to wait for a pool. `inquiries`: ask the chosen pool now and then whether it is well."""

    run_dir: Path
    ask_s: float
    view: View
    samples_per_s: float = SAMPLES_PER_S
    draws_per_s: float = DRAWS_PER_S
    inquiries: bool = True


class Replied(Message):
    """A pool answered, or did not; `order` is None for an inquiry."""

    def __init__(self, reply: Reply, order: Order | None) -> None:
        super().__init__()
        self.reply = reply
        self.order = order


class TopApp(App[None]):
    TITLE = "kvtop"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; overflow: hidden; }
    Lines { height: 1; }
    #table { height: 1fr; }
    #detail { height: 3; }
    #graph { height: 4; }
    #message { height: 2; }
    #filter { display: none; height: 1; border: none; }
    ModalScreen { align: center middle; }
    .box { width: auto; max-width: 100%; height: auto; max-height: 100%; padding: 0 1; }
    .box { border: solid ansi_default; background: ansi_default; }
    .box Static { width: auto; max-width: 100%; }
    .box Input { width: 40; border: none; height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q,ctrl+c", "quit", "quit"),
        ("s", "sort(1)", "sort"),
        ("S", "sort(-1)", "sort back"),
        ("r", "reverse", "reverse"),
        ("g", "group", "group"),
        ("p,space", "pause", "pause"),
        ("slash", "filter", "filter"),
        ("escape", "no_filter", "no filter"),
        ("l", "ask_amount('limit')", "limit"),
        ("t", "ask_amount('trim')", "trim"),
        ("plus,equals_sign", "zoom(2)", "longer"),
        ("minus", "zoom(0.5)", "shorter"),
        ("question_mark,h", "help", "help"),
    ]

    def __init__(self, options: Options, sampler: Sampler) -> None:
        super().__init__(ansi_color=True)
        self._options = options
        self._sampler = sampler
        self.view = options.view
        self.history = History()
        self.paused = False
        self.message: Span = ("", "")
        self.verdicts: dict[str, State] = {}
        self._sample: Sample = sampler.sample()
        self._per_column = 2
        self.asked: set[str] = set()  # an order is under way; an inquiry that waits must not keep one from being sent
        self._inquired: set[str] = set()
        self._turn = 0
        # Kept, not looked for: timers tick on while the screen is taken down.
        self._title, self._table, self._detail = Lines("title"), Table("table"), Lines("detail")
        self._graph, self._message, self._keys = Lines("graph"), Lines("message"), Lines("keys")
        hint = "part of a pool's, model's, card's name or a state; Enter keeps it, Esc drops it"
        self._filter = Input(id="filter", placeholder=hint, compact=True)

    def compose(self) -> ComposeResult:
        yield from (self._title, self._table, self._detail, self._graph, self._message, self._filter, self._keys)

    def on_mount(self) -> None:
        self._table.focus()
        self.look()
        self.set_interval(1 / self._options.samples_per_s, self.look)
        self.set_interval(1 / self._options.draws_per_s, self.draw)
        if self._options.inquiries:
            self.set_interval(_INQUIRY_S, self._inquire)
        self.call_after_refresh(self.draw)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw)

    def on_table_chosen(self) -> None:
        self.draw()

    def look(self) -> None:
        """Take one sample, unless paused."""
        if not self.paused:
            self._sample = self._sampler.sample()
            self.history.add(self._sample)

    def draw(self) -> None:
        """Bring all lines up to date; those that are as before cost nothing."""
        if not self.is_running or not self.screen_stack:
            return
        width = max(20, self.size.width)
        self._table.show_table(self._table_lines(width))
        card, row = find_row(self._sample, self._table.chosen)
        self._detail.show(describe(self._sample, card, row, self.verdicts, width))
        self._draw_graph(width)
        self._title.show([self._title_line(width)])
        self._message.show(self._message_lines(width))
        self._keys.show([Line(((_KEYS, "dim"),))])

    def _message_lines(self, width: int) -> list[Line]:
        text, style = self.message
        return [Line(((part, style),)) for part in textwrap.wrap(text, width, max_lines=2, placeholder=" ...")]

    def _table_lines(self, width: int) -> list[Line]:
        if self._sample.problem:
            return [Line(((self._sample.problem, "bad"),))]
        if not self._sample.cards:
            return [Line(((none_text(self._options.run_dir), "bold"),)), Line(((_START_SOMETHING, ""),))]
        return build(self._sample, replace(self.view, verdicts=self.verdicts), width)

    def _draw_graph(self, width: int) -> None:
        lines, key = self._graph, self._table.chosen
        height = min(3, max(1, self.size.height // 14))
        if lines.size.height != 4 * height:
            lines.styles.height = 4 * height
        points = self.history.points(key) if key else ()
        lines.show(graph(points, self.history.count, width, self._per_column, height, of_card=key is not None and len(key) == 1))

    def _title_line(self, width: int) -> Line:
        pools = len({row.key[:2] for card in self._sample.cards for row in card.rows})
        parts = [
            f"kvtop {time.strftime('%H:%M:%S')}",
            f"cards {len(self._sample.cards)}, pools {pools}",
            f"sort {self.view.sort}{' reversed' if self.view.is_reversed else ''}",
            *([f"filter {self.view.filter_text!r}"] if self.view.filter_text else []),
            f"{self._per_column / self._options.samples_per_s:g} s a column",
        ]
        return Line(((("  ".join(parts))[: width - 8], "bold"), ("  PAUSED" if self.paused else "", "warn")))

    def action_sort(self, by: int) -> None:
        self.view = replace(self.view, sort=SORTS[(SORTS.index(self.view.sort) + by) % len(SORTS)])
        self.draw()

    def action_reverse(self) -> None:
        self.view = replace(self.view, is_reversed=not self.view.is_reversed)
        self.draw()

    def action_group(self) -> None:
        self.view = replace(self.view, by_card=not self.view.by_card)
        self.draw()

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.draw()

    def action_zoom(self, factor: float) -> None:
        self._per_column = int(min(LIVE_SAMPLES // 40, max(1, self._per_column * factor)))
        self.draw()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def action_filter(self) -> None:
        field = self._filter
        field.styles.display = "block"
        field.value = self.view.filter_text
        field.focus()

    def action_no_filter(self) -> None:
        """Escape: the filter's line goes, and the filter with it."""
        self._set_filter("")
        self._close_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self._set_filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            self._close_filter()

    def _set_filter(self, text: str) -> None:
        self.view = replace(self.view, filter_text=text)
        self.draw()

    def _close_filter(self) -> None:
        self._filter.styles.display = "none"
        self._table.focus()

    def _chosen_row(self) -> RankRow | None:
        return find_row(self._sample, self._table.chosen)[1]

    def action_ask_amount(self, kind: str) -> None:
        """The first of two steps: how much. The second is the question."""
        row = self._chosen_row()
        if row is None or not row.alive:
            self._say("choose a pool that lives first", "warn")
            return
        record = row.record
        held = {
            LIMIT: f"now {_limit(record.limit_bytes)}, {format_size(record.mapped_bytes)} mapped",
            TRIM: f"{format_size(record.parked_bytes)} parked",
        }
        self.push_screen(AmountScreen(kind, row.instance, f"{held[kind]} on this card"), self._confirm)

    def _confirm(self, order: Order | None) -> None:
        if order is None:
            self._say("nothing was asked", "")
            return
        self.push_screen(QuestionScreen(order.question), lambda yes: self._send(order) if yes else self._say("nothing was asked", ""))

    def _send(self, order: Order) -> None:
        if order.instance in self.asked:
            self._say(f"{order.instance} has not answered the last call yet", "warn")
            return
        self._say(f"{order.instance}: {order.kind}: asked, waiting for its answer", "")
        self._in_thread(order.instance, order, lambda: perform(self._options.run_dir, self._options.ask_s, order))

    def _inquire(self) -> None:
        """Ask the chosen pool whether it is well, and one of those of which the last word was bad."""
        if self.paused:
            return
        row = self._chosen_row()
        names = [row.instance] if row is not None and row.alive else []
        troubled = sorted(self.verdicts)
        self._turn += 1
        for name in {*names, *troubled[self._turn % len(troubled) :][:1]} if troubled else names:
            self._inquire_of(name)

    def _inquire_of(self, instance: str) -> None:
        row = next((row for card in self._sample.cards for row in card.rows if row.instance == instance and row.alive), None)
        if row is None or row.endpoint is None:
            self.verdicts.pop(instance, None)
        elif instance not in self.asked | self._inquired:
            client = ControlClient(row.endpoint, self._options.ask_s)
            self._in_thread(instance, None, lambda: inquire(client, instance))

    def _under_way(self, order: Order | None) -> set[str]:
        return self._inquired if order is None else self.asked

    def _in_thread(self, instance: str, order: Order | None, call: Callable[[], Reply]) -> None:
        """A thread that ends with the program: leaving must not wait for a pool that does not answer."""
        self._under_way(order).add(instance)
        threading.Thread(target=lambda: self.post_message(Replied(call(), order)), name="kvtop-ask", daemon=True).start()

    def on_replied(self, event: Replied) -> None:
        reply = event.reply
        self._under_way(event.order).discard(reply.instance)
        if reply.verdict is not None:
            self.verdicts[reply.instance] = reply.verdict
        else:
            self.verdicts.pop(reply.instance, None)
        if event.order is not None:
            self._say(reply.text, reply.style)
        else:
            self.draw()

    def _say(self, text: str, style: str) -> None:
        self.message = (text, style)
        self.draw()


def _limit(size_bytes: int) -> str:
    return "no limit" if size_bytes >= 1 << 62 else f"limit {format_size(size_bytes)}"
