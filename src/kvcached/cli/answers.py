# SPDX-License-Identifier: Apache-2.0
"""What pools answer to a change, in words and as JSON, and whether what was asked for holds now. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.units import format_size

if TYPE_CHECKING:
    from kvcached.runtime.control import BytesAnswer, ChangeAnswer, Explanation, PoolStatus

LIMIT = "limit"
FLOOR = "floor"


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


def explain_json(status: PoolStatus, explanation: Explanation) -> dict[str, Any]:
    values = status.model_dump()
    return {"status": values | {"limit_bytes": _size_json(status.limit_bytes)}, **explanation.model_dump(mode="json")}


def bytes_hold(answer: BytesAnswer, wanted_bytes: int | None) -> bool:
    return wanted_bytes is None or answer.given_bytes >= wanted_bytes


def bytes_text(answer: BytesAnswer, wanted_bytes: int | None) -> str:
    of = "" if wanted_bytes is None else f" of {format_size(wanted_bytes)}"
    return f"{format_size(answer.given_bytes)}{of} given back"


def bytes_json(pool: str, answer: BytesAnswer, wanted_bytes: int | None) -> dict[str, Any]:
    return {"pool": pool, "wanted_bytes": wanted_bytes, **answer.model_dump()}
