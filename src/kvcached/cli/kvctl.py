# SPDX-License-Identifier: Apache-2.0
"""`kvctl`: look at the pools of this machine and change what they may hold, while they run.

Exit codes: 0 done, 1 refused or only partly done, 2 usage or a bad setting, 3 no such pool, 4 no answer in time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcached.cli import live
from kvcached.cli.answers import (
    FLOOR,
    LIMIT,
    bytes_hold,
    bytes_json,
    bytes_text,
    change_holds,
    change_json,
    change_text,
    explain_head,
    explain_json,
    explain_notes,
)
from kvcached.cli.machine import read_cards
from kvcached.cli.output import ExitCode, parse_amount, parse_limit, parse_percent, reporting, say, say_json, short_size, table, warn
from kvcached.cli.session import Session
from kvcached.cli.settings_view import show_settings
from kvcached.config import Amount, load_settings
from kvcached.runtime.control import BytesAnswer, ChangeAnswer

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Pool = Annotated[str, typer.Argument(metavar="POOL", help="Instance name, as `kvctl list` shows it.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on standard output.")]
SizeOrShare = Annotated[
    Amount, typer.Argument(parser=parse_amount, metavar="SIZE", help="`3G`, `512MiB`, or a share of the card's budget: `40%`.")
]
SizeOrNone = Annotated[
    Amount, typer.Argument(parser=parse_limit, metavar="SIZE", help="`3G`, `512MiB`, `40%` of the card's budget, or `none`.")
]
Percent = Annotated[Amount, typer.Argument(parser=parse_percent, metavar="PERCENT", help="Of the card's budget: `40` or `40%`.")]
Revision = Annotated[int | None, typer.Option(min=0, help="Has no effect if a later revision is in force.")]
Timeout = Annotated[float | None, typer.Option(min=0.01, help="Seconds to wait for a pool; default: the setting KVCACHED_IPC_TIMEOUT.")]


@dataclass(frozen=True, slots=True)
class Options:
    """What stands before the command. None: as the settings say."""

    run_dir: Path | None
    timeout_s: float | None


@app.callback()
def options(
    context: typer.Context,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: the setting KVCACHED_RUN_DIR.")] = None,
    timeout: Timeout = None,
) -> None:
    context.obj = Options(run_dir, timeout)


@contextmanager
def _session(context: typer.Context, as_json: bool) -> Iterator[Session]:
    with reporting(as_json):
        settings = load_settings()
        for warning in settings.warnings:
            warn(f"kvctl: {warning}")
        chosen: Options = context.obj
        yield Session((chosen.run_dir or settings.run_dir).absolute(), chosen.timeout_s or settings.ipc_timeout_s)


@app.command("list")
def list_pools(context: typer.Context, as_json: AsJson = False) -> None:
    """Show every card and what its pools hold. Sizes are in powers of 1024."""
    with _session(context, as_json) as session:
        cards = read_cards(session.run_dir)
        if as_json:
            say_json(live.cards_json(session.run_dir, cards))
        else:
            say(live.cards_view(session.run_dir, cards))


@app.command()
def watch(
    context: typer.Context,
    interval: Annotated[float, typer.Option("--interval", "-n", min=0.05, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option("--count", "-c", min=0, help="Number of looks; 0: until interrupted.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the table again and again. Without a terminal: one line for each pool and look; with --json: one value for each look."""
    with _session(context, as_json) as session:
        live.watch(session.run_dir, interval_s=interval, count=count, as_json=as_json)


@app.command()
def limit(context: typer.Context, pool: Pool, size: SizeOrNone, revision: Revision = None, as_json: AsJson = False) -> None:
    """Let a pool hold at most SIZE from now on. What running requests own stays until they end."""
    with _session(context, as_json) as session:
        _set_limit(session, pool, size, revision, as_json)


@app.command("limit-percent")
def limit_percent(context: typer.Context, pool: Pool, percent: Percent, revision: Revision = None, as_json: AsJson = False) -> None:
    """Let a pool hold at most PERCENT of the card's budget from now on."""
    with _session(context, as_json) as session:
        _set_limit(session, pool, percent, revision, as_json)


def _set_limit(session: Session, pool: str, amount: Amount, revision: int | None, as_json: bool) -> None:
    _tell_change(pool, LIMIT, session.limit(pool, amount, revision), as_json)


@app.command()
def floor(context: typer.Context, pool: Pool, size: SizeOrShare, as_json: AsJson = False) -> None:
    """Make the other pools leave SIZE to this one."""
    with _session(context, as_json) as session:
        _tell_change(pool, FLOOR, session.floor(pool, size), as_json)


@app.command()
def weight(
    context: typer.Context,
    pool: Pool,
    value: Annotated[float, typer.Argument(min=0.001, max=1000, metavar="WEIGHT", help="0.001 to 1000; pools start with 1.")],
    as_json: AsJson = False,
) -> None:
    """Set a pool's part of contended memory, against the weights of the others."""
    with _session(context, as_json) as session:
        answer = session.weight(pool, value)
        if as_json:
            say_json({"pool": pool, **answer.model_dump()})
        else:
            say(f"{pool}: weight {answer.weight:g}")


@app.command()
def trim(
    context: typer.Context,
    pool: Pool,
    size: Annotated[
        Amount | None, typer.Argument(parser=parse_amount, metavar="[SIZE]", help="At most this much; default: all that is empty.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take back memory that a pool keeps ready but does not use."""
    with _session(context, as_json) as session:
        _tell_bytes(pool, *session.trim(pool, size), as_json)


@app.command()
def evict(context: typer.Context, pool: Pool, size: SizeOrShare, as_json: AsJson = False) -> None:
    """Drop cached prefixes of a pool, cheapest first, and take their memory back."""
    with _session(context, as_json) as session:
        _tell_bytes(pool, *session.evict(pool, size), as_json)


@app.command()
def explain(context: typer.Context, pool: Pool, as_json: AsJson = False) -> None:
    """Say for every byte that a pool holds why it holds it, and what would free it."""
    with _session(context, as_json) as session:
        explained = session.explain(pool)
        if as_json:
            say_json(explain_json(explained))
            return
        say(explain_head(pool, explained.status))
        rows = [(short_size(row.size_bytes), row.reason, row.freed_by or "-") for row in explained.held.rows]
        say(table(("SIZE", "REASON", "FREED BY"), rows, left=3))
        for note in explain_notes(explained):
            say(note)


@app.command()
def config(context: typer.Context, as_json: AsJson = False) -> None:
    """Show every setting, its value and where it came from."""
    with reporting(as_json):
        show_settings(load_settings(), as_json)


@app.command()
def delete(
    context: typer.Context,
    pool: Pool,
    force: Annotated[bool, typer.Option("--force", help="End a live pool's process first (SIGTERM).")] = False,
    as_json: AsJson = False,
) -> None:
    """Clear up what a dead pool left behind. A live pool is refused unless forced."""
    with _session(context, as_json) as session:
        cleared = session.delete(pool, force=force)
        if as_json:
            say_json(cleared)
        else:
            say(f"{pool}: deleted")


def _tell_change(pool: str, setting: str, answer: ChangeAnswer, as_json: bool) -> None:
    if as_json:
        say_json(change_json(pool, setting, answer))
    else:
        say(change_text(pool, setting, answer))
    if not change_holds(setting, answer):
        raise typer.Exit(int(ExitCode.REFUSED))


def _tell_bytes(pool: str, answer: BytesAnswer, wanted_bytes: int | None, as_json: bool) -> None:
    if as_json:
        say_json(bytes_json(pool, answer, wanted_bytes))
    else:
        say(f"{pool}: {bytes_text(answer, wanted_bytes)}")
    if not bytes_hold(answer, wanted_bytes):
        raise typer.Exit(int(ExitCode.REFUSED))


def main() -> None:
    """The command `kvctl`."""
    app()


if __name__ == "__main__":
    main()
