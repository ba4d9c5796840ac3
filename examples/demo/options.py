# SPDX-License-Identifier: Apache-2.0
"""What can be asked of the demo, and where its things lie."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvcached.testing.kinds import SGLANG, VLLM, EngineKind

ENGINES = {"vllm": (VLLM, VLLM), "sglang": (SGLANG, SGLANG), "both": (VLLM, SGLANG)}
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / ".cache" / "models" / "smollm2"


@dataclass(frozen=True, slots=True)
class Options:
    kinds: tuple[EngineKind, ...]
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
        prog=".venv/bin/python -m examples.demo",
        description="Two real engines on one host-memory card that is too small for both: answers, a live table, a picture.",
    )
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="two of them, or one of each (default %(default)s)")
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="bursts for each engine (default %(default)s)")
    parser.add_argument("--requests", type=positive, default=12, metavar="N", help="requests in a burst, all at once (default %(default)s)")
    parser.add_argument("--tokens", type=positive, default=96, metavar="N", help="longest answer, in tokens (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=240.0, metavar="S", help="start no burst after this time (default %(default).0f)")
    parser.add_argument("--no-live", action="store_true", help="print lines instead of a table that is rewritten in place")
    parser.add_argument("--keep", action="store_true", help="leave the engines running at the end, until Ctrl-C, to try kvctl on them")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output", metavar="DIR", help="picture, answers and logs (demo-output)")
    parser.add_argument("--start-timeout", type=float, default=900.0, metavar="S", help="longest start (default %(default).0f)")
    asked = parser.parse_args(arguments)
    return Options(
        kinds=ENGINES[asked.engine],
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


def newest_release(kind: EngineKind, root: Path = ROOT) -> Path:
    """The folder of the newest release that is set up. Raises `SystemExit` with what to do when there is none."""
    if not (found := kind.releases(root)):
        raise SystemExit(f"demo: no {kind.title} in .cache/engines; run `make demo` with the same ARGS, or `{kind.make_target}` first")
    return found[-1]
