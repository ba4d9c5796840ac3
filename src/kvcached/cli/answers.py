# SPDX-License-Identifier: Apache-2.0
"""What pools answer to a change, in words and as JSON, and whether what was asked for holds now. Pure."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.units import format_size

if TYPE_CHECKING:
    from kvcached.cli.session import Explained
    from kvcached.runtime.control import BytesAnswer, ChangeAnswer, PoolStatus

LIMIT = "limit"
FLOOR = "floor"
_LINE_CHARS: Final = 80


def change_holds(setting: str, answer: ChangeAnswer) -> bool:
    """A limit holds when the pool may not, and does not, hold more than was asked; a floor when the others leave no less."""
    if answer.outcome in ("stale", "rejected"):
        return False
    if setting == FLOOR:
        return answer.in_force_bytes >= answer.asked_bytes
    return answer.in_force_bytes <= answer.asked_bytes and not answer.overage_bytes


def change_text(pool: str, setting: str, answer: ChangeAnswer) -> str:
    than = ""
    if answer.outcome == "clamped":
        more = "more" if answer.in_force_bytes > answer.asked_bytes else "less"
        than = f", {more} than the {format_size(answer.asked_bytes)} asked"
    above = f", {format_size(answer.overage_bytes)} above it still held" if setting == LIMIT and answer.overage_bytes else ""
    why = f" ({answer.reason})" if answer.reason else ""
    in_force = "none" if answer.in_force_bytes >= NO_LIMIT_BYTES else format_size(answer.in_force_bytes)
    return f"{pool}: {setting} {answer.outcome}: {in_force} in force{than}{above}{why}"


def change_json(pool: str, setting: str, answer: ChangeAnswer) -> dict[str, Any]:
    """Sizes are in bytes; no limit is None."""
    values = answer.model_dump()
    sizes = {name: _size_json(values[name]) for name in ("asked_bytes", "in_force_bytes")}
    return {"pool": pool, "setting": setting, "holds": change_holds(setting, answer), **values, **sizes}


def _size_json(size_bytes: int) -> int | None:
    return None if size_bytes >= NO_LIMIT_BYTES else size_bytes


def explain_json(explained: Explained) -> dict[str, Any]:
    values = explained.status.model_dump()
    status = values | {"limit_bytes": _size_json(explained.status.limit_bytes)}
    return {"status": status, **explained.held.model_dump(mode="json"), "other_bytes": explained.other_bytes}


def explain_head(pool: str, status: PoolStatus) -> str:
    why = f" ({status.reason})" if status.reason else ""
    model = f", model {status.name}" if status.name else ""
    return f"{pool}{model}: {status.state}{why}, {format_size(status.held_bytes)} held of a lease of {format_size(status.lease_bytes)}"


def explain_notes(explained: Explained) -> list[str]:
    """Lines below the table of reasons: the pages that are known by number, and what is no KV cache."""
    notes = [f"{row.reason.partition(':')[0]}: {row.detail}" for row in explained.held.rows if row.detail]
    if explained.other_bytes:
        notes.append(f"not KV: {format_size(explained.other_bytes)} of weights, activations and graphs beside it, until the engine ends")
    return [line for note in notes for line in wrap(note, _LINE_CHARS, subsequent_indent="  ")]


def bytes_hold(answer: BytesAnswer, wanted_bytes: int | None) -> bool:
    return wanted_bytes is None or answer.given_bytes >= wanted_bytes


def bytes_text(answer: BytesAnswer, wanted_bytes: int | None) -> str:
    of = "" if wanted_bytes is None else f" of {format_size(wanted_bytes)}"
    return f"{format_size(answer.given_bytes)}{of} given back"


def bytes_json(pool: str, answer: BytesAnswer, wanted_bytes: int | None) -> dict[str, Any]:
    return {"pool": pool, "wanted_bytes": wanted_bytes, **answer.model_dump()}
