# SPDX-License-Identifier: Apache-2.0
"""The table: which rows there are, in which order, and what stands in them. Pure; the live screen and the one-shot text share it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.cells import cell_len, set_cell_size

from kvcached.card.record import Kind
from kvcached.cli.output import short_size
from kvcached.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcached.cli.top.history import CardKey
    from kvcached.cli.top.sampler import CardSample, PoolKey, RankRow, Sample

Span = tuple[str, str]
"""Text and the name of its style: ``, `bold`, `dim`, `good`, `warn`, `bad`."""


class Line(NamedTuple):
    """A line of the screen; `key` names the card or the rank that it is about, None for headings."""

    spans: tuple[Span, ...]
    key: PoolKey | CardKey | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.spans)


class State(NamedTuple):
    """`word` is at most 8 characters; `why` is a sentence, empty when all is well."""

    word: str
    why: str = ""
    style: str = "bad"


class Column(NamedTuple):
    """`value` of a row at a moment in nanoseconds."""

    name: str
    value: Callable[[RankRow, int], int]


COLUMNS: Final = (
    Column("mapped", lambda row, _: row.record.mapped_bytes),
    Column("used", lambda row, _: row.record.owned_bytes),
    Column("cached", lambda row, _: row.record.cached_bytes),
    Column("parked", lambda row, _: row.record.parked_bytes),
    Column("limit", lambda row, _: row.record.limit_bytes),
    Column("floor", lambda row, _: row.record.floor_bytes),
    Column("wanted", lambda row, now_ns: row.record.waiting_bytes(now_ns)),
)
SORTS: Final = ("name", *(column.name for column in COLUMNS), "state")
_VALUES: Final = {column.name: column.value for column in COLUMNS}
_OK: Final = State("ok", style="good")
_NUMBER_CELLS, _RANK_CELLS, _STATE_CELLS = 7, 5, 10
_FIXED_CELLS: Final = _NUMBER_CELLS * len(COLUMNS) + _RANK_CELLS + _STATE_CELLS
_MODEL_FROM_CELLS: Final = 110
_TAIL_CELLS: Final = 6


@dataclass(frozen=True, slots=True)
class View:
    """How one wants to see the rows. `verdicts`: what pools answered, or did not, by instance."""

    sort: str = "name"
    is_reversed: bool = False
    filter_text: str = ""
    by_card: bool = True
    verdicts: Mapping[str, State] = field(default_factory=dict)


def state_of(row: RankRow, card: CardSample, now_ns: int, verdicts: Mapping[str, State]) -> State:
    """What is the matter with a rank, the worst first."""
    return _unfit(row) or verdicts.get(row.instance) or _strained(row, card, now_ns) or _OK


def _unfit(row: RankRow) -> State | None:
    record = row.record
    if not row.alive:
        return State("dead", f"its process has ended and its memory is free; clear up with: kvctl delete {row.instance}")
    if record.kind == Kind.UNREADABLE:
        return State("unread", "its entry in the card's record is damaged; the pool writes it again")
    if not row.known_version:
        return State("version", f"written by another version of KVCacheD: only its lease of {format_size(record.lease_bytes)} is known")
    if record.quarantined_bytes:
        lost = format_size(record.quarantined_bytes)
        return State("failed", f"{lost} quarantined: the driver did not confirm that they are free. Restart this engine")
    return None


def _strained(row: RankRow, card: CardSample, now_ns: int) -> State | None:
    record = row.record
    if not row.has_kv:
        return State("no kv", f"it has {format_size(row.other_bytes)} of weights or other memory here, and no KV cache yet", "warn")
    if record.lease_bytes > record.limit_bytes:
        above = format_size(record.lease_bytes - record.limit_bytes)
        return State("over", f"{above} above its limit are owned by running requests and go as they end", "warn")
    if card.short_bytes and record.lease_bytes < record.floor_bytes:
        return State("short", f"its floor cannot be covered now: the card lacks {format_size(card.short_bytes)}", "warn")
    if record.waits(now_ns):
        return State("waits", f"waits for {format_size(record.wanted_bytes)}", "warn")
    return None


def build(sample: Sample, view: View, width: int) -> list[Line]:
    """Heading, cards and rows, each at most `width` cells wide."""
    cards = [(card, chosen(card, view, sample.now_ns)) for card in sample.cards]
    shown = [(card, rows) for card, rows in cards if rows or _card_matches(card, view)]
    lines = [_heading(view, width)]
    if view.by_card:
        for card, rows in shown:
            lines += [_card_line(card, sample.now_ns, width), *_row_lines(rows, view, sample.now_ns, width)]
    else:
        everything = [pair for _, rows in shown for pair in rows]
        lines += _row_lines(everything, view, sample.now_ns, width)
    return lines


def find_row(sample: Sample, key: PoolKey | CardKey | None) -> tuple[CardSample | None, RankRow | None]:
    """The card and, for a pool's key, the row of it."""
    card = next((card for card in sample.cards if key and card.uuid == key[0]), None)
    row = next((row for row in card.rows if row.key == key), None) if card else None
    return card, row


def chosen(card: CardSample, view: View, now_ns: int) -> list[tuple[RankRow, State]]:
    """The rows of a card that pass the filter."""
    rows = [(row, state_of(row, card, now_ns, view.verdicts)) for row in card.rows]
    wanted = view.filter_text.lower()
    return [pair for pair in rows if wanted in _searched(card, *pair)] if wanted else rows


def _searched(card: CardSample, row: RankRow, state: State) -> str:
    return " ".join((card.uuid, card.name, row.instance, row.name, state.word)).lower()


def _card_matches(card: CardSample, view: View) -> bool:
    return view.filter_text.lower() in f"{card.uuid} {card.name}".lower()


def _row_lines(rows: list[tuple[RankRow, State]], view: View, now_ns: int, width: int) -> list[Line]:
    return [_row_line(row, state, now_ns, width) for row, state in _sorted(rows, view, now_ns)]


def _sorted(rows: list[tuple[RankRow, State]], view: View, now_ns: int) -> list[tuple[RankRow, State]]:
    """Names from A to Z, numbers from large to small, troubled ones first; equal ones stay in the order of their names."""
    by_name = sorted(
        rows, key=lambda pair: (pair[0].instance, pair[0].rank, pair[0].key[0]), reverse=view.is_reversed and view.sort == "name"
    )
    if view.sort == "name":
        return by_name
    if view.sort == "state":
        return sorted(by_name, key=lambda pair: (pair[1].style == "good", pair[1].style == "warn", pair[1].word), reverse=view.is_reversed)
    value = _VALUES[view.sort]
    return sorted(by_name, key=lambda pair: value(pair[0], now_ns), reverse=not view.is_reversed)


def _name_cells(width: int) -> tuple[int, int]:
    """Cells for the pool's name and for the model's; the latter only where there is room."""
    room = max(8, width - _FIXED_CELLS)
    if width < _MODEL_FROM_CELLS:
        return room, 0
    pool = min(41, room // 2)
    return pool, room - pool


def _heading(view: View, width: int) -> Line:
    pool, model = _name_cells(width)
    arrow = "^" if view.is_reversed else "v"

    def title(name: str, sort: str) -> str:
        return f"{name.upper()}{arrow}" if view.sort == sort else name.upper()

    text = set_cell_size(title("pool", "name"), pool) + (set_cell_size("MODEL", model) if model else "") + " RANK"
    text += "".join(f"{title(column.name, column.name):>{_NUMBER_CELLS}}" for column in COLUMNS)
    return Line((((text + f"  {title('state', 'state')}"), "bold"),))


def _row_line(row: RankRow, state: State, now_ns: int, width: int) -> Line:
    pool, model = _name_cells(width)
    words = fit(row.instance, pool - 1) + " " + (fit(row.name, model - 1) + " " if model else "")
    numbers = "".join(f"{short_size(column.value(row, now_ns)):>{_NUMBER_CELLS}}" for column in COLUMNS)
    style = "" if row.alive else "dim"
    return Line(((f"{words}{row.rank:>{_RANK_CELLS}}{numbers}", style), (f"  {state.word}", state.style)), row.key)


def _card_line(card: CardSample, now_ns: int, width: int) -> Line:
    if card.problem:
        return Line(((set_cell_size(f"card {card.uuid}: cannot be read: {card.problem}", width).rstrip(), "bad"),), (card.uuid,))
    sizes = [("budget", card.budget_bytes), ("leased", card.leased_bytes), ("free", card.free_bytes), ("not KV", card.other_bytes)]
    right = "".join(f"  {name} {short_size(size)}" for name, size in sizes)
    trouble = f"  {_trouble(card, now_ns)}".rstrip()
    left = fit(f"{card.uuid} {card.name}".rstrip(), max(8, width - cell_len(right) - cell_len(trouble)))
    return Line(((left + right, "bold"), (trouble, "bad")), (card.uuid,))


def _trouble(card: CardSample, now_ns: int) -> str:
    """The card's trouble in at most 12 characters."""
    if card.over_bytes:
        return f"over {short_size(card.over_bytes)}"
    if card.short_bytes:
        return f"short {short_size(card.short_bytes)}"
    return "new" if now_ns < card.settled_at_ns <= now_ns + 10 * 10**9 else ""


def fit(text: str, cells: int) -> str:
    """`text` padded to `cells`, or cut in its middle: the end of a pool's name tells it from its twin."""
    if cell_len(text) <= cells:
        return set_cell_size(text, cells)
    tail = text[-_TAIL_CELLS:] if cells > 2 * _TAIL_CELLS else ""
    return set_cell_size(text, cells - 1 - cell_len(tail)) + "~" + tail
