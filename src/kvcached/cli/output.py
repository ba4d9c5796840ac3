# SPDX-License-Identifier: Apache-2.0
"""How both commands speak: tables of at most 80 columns, JSON, errors on standard error, documented exit codes."""

from __future__ import annotations

import contextlib
import json
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcached.config import Amount
from kvcached.core.limits import NO_LIMIT_BYTES
from kvcached.errors import HandshakeMismatch, KVCachedError, PeerLost, PeerTimeout, SettingError
from kvcached.units import GIB, KIB, MIB, TIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType


class ExitCode(IntEnum):
    OK = 0
    REFUSED = 1
    USAGE = 2
    NO_SUCH_POOL = 3
    UNREACHABLE = 4


class NoSuchPool(KVCachedError):
    """No pool of that name; the message lists the names there are."""


def exit_code_of(error: KVCachedError) -> ExitCode:
    match error:
        case NoSuchPool():
            return ExitCode.NO_SUCH_POOL
        case SettingError():
            return ExitCode.USAGE
        case PeerLost() | PeerTimeout() | HandshakeMismatch():
            return ExitCode.UNREACHABLE
        case _:
            return ExitCode.REFUSED


@contextlib.contextmanager
def reporting(as_json: bool) -> Iterator[None]:
    """Turn our errors, and a file that this user may not open, into one sentence and an exit code."""
    try:
        yield
    except KVCachedError as error:
        _report(type(error).__name__, str(error), exit_code_of(error), as_json)
    except OSError as error:
        _report(type(error).__name__, str(error), ExitCode.UNREACHABLE, as_json)


def _report(kind: str, message: str, code: ExitCode, as_json: bool) -> None:
    if as_json:
        say_json(error_json(kind, message, code))
    else:
        warn(message)
    raise typer.Exit(int(code))


def error_json(kind: str, message: str, code: ExitCode) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "exit_code": int(code)}}


def say(text: RenderableType) -> None:
    """Print to standard output. Plain text is not marked up: names come from other processes."""
    Console(highlight=False, soft_wrap=isinstance(text, str)).print(Text(text) if isinstance(text, str) else text)


def warn(text: str) -> None:
    Console(file=sys.stderr, highlight=False, soft_wrap=True).print(Text(text))


def say_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, whole: int = 0) -> Table:
    """The first `left` columns are words, the others numbers; the first `whole` columns are never folded."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        words = number < left
        made.add_column(
            column, justify="left" if words else "right", overflow="fold" if words else "ellipsis", no_wrap=not words or number < whole
        )
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def short_size(size_bytes: int) -> str:
    """At most six characters: `1.5G`, in powers of 1024; `-` for no limit."""
    if size_bytes >= NO_LIMIT_BYTES:
        return "-"
    for factor, unit in ((TIB, "T"), (GIB, "G"), (MIB, "M"), (KIB, "K")):
        if size_bytes >= factor:
            value = size_bytes / factor
            return f"{value:.0f}{unit}" if value >= 100 or value == int(value) else f"{value:.1f}{unit}"
    return f"{size_bytes}B" if size_bytes else "0"


def parse_amount(text: str) -> Amount:
    """For arguments: a size or a share."""
    try:
        return Amount.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_limit(text: str) -> Amount:
    """For arguments: a size, a share, or `none`."""
    return Amount(NO_LIMIT_BYTES) if text.strip().lower() == "none" else parse_amount(text)


def parse_percent(text: str) -> Amount:
    """For arguments: `40` and `40%` are the same."""
    return parse_amount(text if text.rstrip().endswith("%") else f"{text}%")
