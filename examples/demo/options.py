# SPDX-License-Identifier: Apache-2.0
"""What can be asked of the demo, and where its things lie."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / ".cache" / "engines"
MODEL = ROOT / ".cache" / "models" / "smollm2"


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    requests: int
    tokens: int
    seconds: float
    live: bool
    keep: bool
    output: Path
    start_timeout_s: float


def parse(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog=".venv-engines/bin/python -m examples.demo",
        description="Two real vLLM servers on one host-memory card that is too small for both: answers, a live table, a picture.",
    )
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="bursts for each engine (default %(default)s)")
    parser.add_argument("--requests", type=positive, default=12, metavar="N", help="requests in a burst, all at once (default %(default)s)")
    parser.add_argument("--tokens", type=positive, default=96, metavar="N", help="longest answer, in tokens (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=240.0, metavar="S", help="start no burst after this time (default %(default).0f)")
    parser.add_argument("--no-live", action="store_true", help="print lines instead of a table that is rewritten in place")
    parser.add_argument("--keep", action="store_true", help="leave the engines running at the end, until Ctrl-C, to try kvctl on them")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", metavar="DIR", help="picture, answers and logs (demo-output)")
    parser.add_argument("--start-timeout", type=float, default=420.0, metavar="S", help="longest start (default %(default).0f)")
    asked = parser.parse_args(arguments)
    return Options(
        rounds=asked.rounds,
        requests=asked.requests,
        tokens=asked.tokens,
        seconds=asked.seconds,
        live=not asked.no_live,
        keep=asked.keep,
        output=asked.output.resolve(),
        start_timeout_s=asked.start_timeout,
    )


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def newest_engine(engines: Path = ENGINES) -> Path:
    """The folder of the newest vLLM release that is unpacked. Raises `SystemExit` with what to do when there is none."""
    found = [folder for folder in engines.glob("vllm-*") if (folder / "vllm" / "__init__.py").exists()]
    if not found:
        raise SystemExit("demo: no vLLM in .cache/engines; run `make demo`, or `make engines` first")
    return max(found, key=lambda folder: [int(part) for part in folder.name.removeprefix("vllm-").split(".") if part.isdecimal()])
