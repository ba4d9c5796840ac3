# SPDX-License-Identifier: Apache-2.0
"""What the keys for limit and trim ask of a pool, and its answer in words. Every call may wait: never for the drawing loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvcached.cli.answers import LIMIT, bytes_hold, bytes_text, change_text
from kvcached.cli.machine import find
from kvcached.cli.top.rows import State
from kvcached.config import Amount
from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.errors import KVCachedError, PeerLost, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvcached.runtime.control import BytesAnswer, ChangeAnswer, ControlClient

TRIM: Final = "trim"
ALL: Final = Amount(NO_LIMIT_BYTES)


@dataclass(frozen=True, slots=True)
class Order:
    """`kind` is `limit` or `trim`; `amount` is `ALL` for no limit, or for all that is parked."""

    kind: str
    instance: str
    amount: Amount

    @property
    def question(self) -> str:
        if self.kind == LIMIT:
            return (
                f"Lift the limit of {self.instance}?"
                if self.amount == ALL
                else f"Limit {self.instance} to {self.amount}{_of(self.amount)}?"
            )
        what = "all that is parked" if self.amount == ALL else f"up to {self.amount}{_of(self.amount)} of what is parked"
        return f"Trim {self.instance}: take back {what}?"


def _of(amount: Amount) -> str:
    return " of the card's budget" if amount.is_percent else ""


@dataclass(frozen=True, slots=True)
class Reply:
    """`text` for people; `style` as in a `rows.Span`; `verdict` is what it says about the pool, None: that it answers."""

    instance: str
    text: str
    style: str
    verdict: State | None = None


def parse_order(kind: str, instance: str, text: str) -> Order:
    """`3G`, `512MiB`, `40%`; `none` for a limit, nothing or `all` for a trim. Raises `ValueError` with what is allowed."""
    word = text.strip().lower()
    if word in (("none",) if kind == LIMIT else ("", "all")):
        return Order(kind, instance, ALL)
    return Order(kind, instance, Amount.parse(word if kind == LIMIT and not text.strip() else text))


def perform(run_dir: Path, timeout_s: float, order: Order) -> Reply:
    """Waits for the pool up to `timeout_s`; every failure is a reply."""
    return _guarded(order.instance, order.kind, lambda: _perform(run_dir, timeout_s, order))


def _perform(run_dir: Path, timeout_s: float, order: Order) -> Reply:
    target = find(run_dir, order.instance)
    if not target.is_alive and target.rows:
        raise PeerLost(f"its process has ended; clear up with: kvctl delete {order.instance}")
    client = target.client(timeout_s)
    size_bytes = target.bytes_of(order.amount, client)
    if order.kind == LIMIT:
        return _limit_reply(order.instance, client.limit(size_bytes))
    wanted_bytes = None if order.amount == ALL else size_bytes
    return _trim_reply(order.instance, client.trim(wanted_bytes), wanted_bytes)


def _limit_reply(instance: str, answer: ChangeAnswer) -> Reply:
    style = {"applied": "good", "deferred": "warn", "clamped": "warn"}.get(answer.outcome, "bad")
    return Reply(instance, change_text(instance, LIMIT, answer), style)


def _trim_reply(instance: str, answer: BytesAnswer, wanted_bytes: int | None) -> Reply:
    return Reply(instance, f"{instance}: trim: {bytes_text(answer, wanted_bytes)}", "good" if bytes_hold(answer, wanted_bytes) else "warn")


def inquire(client: ControlClient, instance: str) -> Reply:
    """Whether a pool answers, and whether it says that something is wrong with it."""

    def ask() -> Reply:
        status = client.status()
        verdict = State("failed", f"the pool refuses work: {status.reason}") if status.state == "refusing" else None
        return Reply(instance, "", "good", verdict)

    return _guarded(instance, "status", ask)


def _guarded(instance: str, what: str, call: Callable[[], Reply]) -> Reply:
    try:
        return call()
    except PeerTimeout as error:
        return Reply(instance, f"{instance}: {what}: no answer in time: {error}", "bad", State("silent", f"does not answer: {error}"))
    except (KVCachedError, OSError) as error:
        return Reply(instance, f"{instance}: {what}: {error}", "bad")
