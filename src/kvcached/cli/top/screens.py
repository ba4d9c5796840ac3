# SPDX-License-Identifier: Apache-2.0
"""What lies over the table for a while: a size to type, a question, the help."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from kvcached.cli.answers import LIMIT
from kvcached.cli.top.actions import Order, parse_order

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

HELP = """\
Keys
  up down PgUp PgDn Home End  choose a row; also k, j and the mouse
  s S  sort by the next, the former column    r  reverse the order
  g    group by card, or one list             /  filter by text
  p    pause and go on; also space            Esc  filter away
  l    limit the chosen pool                  t  trim it
  + -  graph of a longer, a shorter time      q  quit

Columns, in powers of 1024
  MAPPED  memory in the pool's range   USED    blocks of running requests
  CACHED  prefixes kept for later      PARKED  mapped, empty, kept ready
  LIMIT   the most it may hold         FLOOR   what the others leave to it
  WANTED  what it waits for            RANK    of the engine's workers

States
  ok       all is well                 waits   for memory of the card
  over     above its limit for now     short   its floor is not covered
  no kv    has weights here, no cache  silent  does not answer
  dead     its process has ended       failed  the line below says why
  version  of another KVCacheD         unread  its entry is damaged

Answers to a limit: applied; deferred, requests hold the rest; clamped,
cut to what is possible; stale, a later revision counts; rejected."""


class HelpScreen(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark,enter", "dismiss", "close")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box"):
            yield Static(Text(HELP))
            yield Static(Text("Esc closes", style="bold"))


class AmountScreen(ModalScreen[Order | None]):
    """Asks for a size; gives an order that is not confirmed yet, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss", "cancel")]

    def __init__(self, kind: str, instance: str, facts: str) -> None:
        super().__init__()
        self._kind = kind
        self._instance = instance
        self._facts = facts

    def compose(self) -> ComposeResult:
        what = "Limit" if self._kind == LIMIT else "Trim"
        how = "a size (3G, 512MiB), a share of the card's budget (40%)" + (
            ", or none" if self._kind == LIMIT else "; nothing: all that is parked"
        )
        with Vertical(classes="box"):
            yield Static(Text(f"{what} {self._instance}", style="bold"))
            yield Static(Text(f"{self._facts}\n{how}"))
            yield Input(id="amount", compact=True)
            yield Static(Text("Enter goes on to the question, Esc cancels"), id="said")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            order = parse_order(self._kind, self._instance, event.value)
        except ValueError as error:
            self.query_one("#said", Static).update(Text(str(error)))
            return
        self.dismiss(order)


class QuestionScreen(ModalScreen[bool]):
    """True for `y` only."""

    BINDINGS: ClassVar[list[BindingType]] = [("y", "answer(True)", "yes"), ("n,escape,enter,q", "answer(False)", "no")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(Text(self._question, style="bold"), id="question")
            yield Static(Text("y: do it    n, Enter or Esc: leave it"))

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
