# SPDX-License-Identifier: Apache-2.0
"""`kvcached`: can this machine do it, does this engine version fit, what is set, its metrics, and control over HTTP.

Exit codes: 0 fine, 1 a problem was found, 2 usage or a bad setting.
"""

import contextlib
import importlib
import platform
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcached.cli.control.command import control
from kvcached.cli.doctor import examine
from kvcached.cli.findings import Verdict
from kvcached.cli.metrics.command import metrics
from kvcached.cli.output import ExitCode, reporting, say, say_json, table
from kvcached.cli.settings_view import show_settings
from kvcached.config import load_settings, package_version
from kvcached.errors import SettingError

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on standard output.")]
Deadline = Annotated[float, typer.Option("--deadline", min=0.1, help="Seconds that the try of one card may take.")]


@app.command()
def doctor(deadline: Deadline = 20.0, as_json: AsJson = False) -> None:
    """Say in plain words whether this machine can do what is asked, and what to do where it cannot."""
    rows = examine(deadline)
    problems = sum(row.verdict is Verdict.PROBLEM for row in rows)
    if as_json:
        say_json({"ok": not problems, "rows": [row.to_json() for row in rows]})
    else:
        for row in rows:
            say(f"{row.verdict.value:<8} {row.subject}: {row.finding}")
            if row.advice:
                say(f"{'':<8} -> {row.advice}")
        say(f"{problems} problem{'' if problems == 1 else 's'}" if problems else "no problems")
    if problems:
        raise typer.Exit(int(ExitCode.REFUSED))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}, add_help_option=False)
def verify(context: typer.Context) -> None:
    """Check an engine version: signatures, doors, runner. Options: `kvcached verify --help`."""
    from kvcached.cli import verify as engine_check  # loads what the check needs only when it is asked for

    raise typer.Exit(engine_check.main(list(context.args)))


@app.command()
def config(as_json: AsJson = False) -> None:
    """Show every setting, its value and where it came from."""
    with reporting(as_json):
        show_settings(load_settings(), as_json)


@app.command()
def serve(
    file: Annotated[Path | None, typer.Argument(help="The models, such as models.yaml.", show_default=False)] = None,
    check: Annotated[bool, typer.Option("--check", help="Only read the file, and name the key of a mistake.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what each card will hold.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Only print the JSON schema of the file.")] = False,
) -> None:
    """Serve many models at one OpenAI-compatible address."""
    with _held_back(signal.SIGHUP, signal.SIGUSR1), reporting(as_json=False):
        controller = _controller()
        if schema:
            controller.show_schema()
        elif file is None:
            raise SettingError("name the file with the models, such as models.yaml")
        elif check:
            controller.check(file)
        elif dry_run:
            controller.dry_run(file)
        else:
            controller.run(file)


@contextlib.contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Until somebody unblocks them: they would end a program that cannot heed them yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        while signal.sigtimedwait(numbers, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _controller() -> Any:
    """Loaded by name: nothing below it needs its packages."""
    try:
        return importlib.import_module("kvcached.controller.command")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("kvcached"):
            raise
        raise SettingError(f"{error.name} is missing: pip install 'kvcached-elastic[controller]'") from None


@app.command()
def version(as_json: AsJson = False) -> None:
    """Show the versions of this package, of Python and of the system."""
    facts = {"kvcached-elastic": package_version(), "python": platform.python_version(), "system": platform.platform()}
    if as_json:
        say_json(facts)
    else:
        say(table(("WHAT", "VERSION"), list(facts.items()), left=2))


app.command()(metrics)
app.command()(control)


def main() -> None:
    """The command `kvcached`."""
    app()


if __name__ == "__main__":
    main()
