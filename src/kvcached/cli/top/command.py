# SPDX-License-Identifier: Apache-2.0
"""The command `kvtop`.

Exit codes: 0 shown, 1 the live screen needs textual, 2 usage or a bad setting, 4 the run directory cannot be read.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path  # noqa: TC003  # typer looks at the annotations
from typing import Annotated

import typer
from rich.console import Console

from kvcached.cli.output import ExitCode, reporting, say, say_json, warn
from kvcached.cli.top.plain_view import text_lines, to_json
from kvcached.cli.top.rows import SORTS, View
from kvcached.cli.top.sampler import Sample, Sampler
from kvcached.config import load_settings
from kvcached.errors import PeerLost

_MISSING = "kvtop: the live screen needs textual: pip install 'kvcached-elastic[top]'; without it: kvtop --once, or kvctl watch"
_NARROWEST, _WIDEST = 72, 160

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


def _parse_sort(text: str) -> str:
    if text not in SORTS:
        raise typer.BadParameter(f"{text!r} is no column; there are: {', '.join(SORTS)}")
    return text


@app.command()
def kvtop(
    once: Annotated[bool, typer.Option("--once", help="One look as text, also chosen when standard output is no terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One look as one JSON value.")] = False,
    sort: Annotated[str, typer.Option(parser=_parse_sort, metavar="COLUMN", help=f"Sort by: {', '.join(SORTS)}.")] = "name",
    reverse: Annotated[bool, typer.Option("--reverse", help="The other way round.")] = False,
    filter_text: Annotated[str, typer.Option("--filter", help="Only rows with this text: pool, model, card, state.")] = "",
    flat: Annotated[bool, typer.Option("--flat", help="One list, not grouped by card.")] = False,
    interval: Annotated[float, typer.Option("--interval", "-n", min=0.1, max=60, help="Seconds between two drawings.")] = 0.5,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory; default: the setting KVCACHED_RUN_DIR.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds to wait for a pool; default: the setting KVCACHED_IPC_TIMEOUT.")
    ] = None,
) -> None:
    """Watch the cards and pools of this machine, and limit or trim a pool after a question.

    One line for each card and, below it, for each rank of each pool: MAPPED memory, of it USED by running requests, CACHED prefixes and
    PARKED pages; LIMIT, FLOOR, what it waits for (WANTED), and its STATE. Below them the chosen line in words and its last seconds.

    Keys: arrows choose, s sorts, / filters, g groups, p pauses, l limits, t trims, + and - stretch time, ? explains all, q quits.

    No GPU is needed and no engine is disturbed: the cards' records are read, and only a chosen pool is asked whether it is well.
    NO_COLOR=1 switches colours off. Without a terminal, or with --once or --json, it looks once and ends.

    Exit codes: 0 shown, 1 the live screen needs textual, 2 usage or a bad setting, 4 the run directory cannot be read.
    """
    with reporting(as_json):
        settings = load_settings()
        for warning in settings.warnings:
            warn(f"kvtop: {warning}")
        where = (run_dir or settings.run_dir).absolute()
        view = View(sort=sort, is_reversed=reverse, filter_text=filter_text, by_card=not flat)
        console = Console()
        if once or as_json or not console.is_terminal or console.is_dumb_terminal:
            _show_once(where, view, max(_NARROWEST, min(console.width, _WIDEST)), as_json)
        else:
            _show_live(where, view, timeout or settings.ipc_timeout_s, interval)


def _show_once(run_dir: Path, view: View, width: int, as_json: bool) -> None:
    sample = _readable(Sampler(run_dir).sample())
    if as_json:
        say_json(to_json(sample, view, run_dir))
    else:
        say("\n".join(text_lines(sample, view, run_dir, width)))


def _readable(sample: Sample) -> Sample:
    if sample.problem:
        raise PeerLost(sample.problem)
    return sample


def _show_live(run_dir: Path, view: View, ask_s: float, interval_s: float) -> None:
    if importlib.util.find_spec("textual") is None:
        warn(_MISSING)
        raise typer.Exit(int(ExitCode.REFUSED))
    from kvcached.cli.top.app import THOROUGH_EVERY, Options, TopApp  # textual is loaded only for the live screen

    TopApp(Options(run_dir, ask_s, view, draws_per_s=1 / interval_s), Sampler(run_dir, thorough_every=THOROUGH_EVERY)).run()


def main() -> None:
    """The command `kvtop`."""
    app()


if __name__ == "__main__":
    main()
