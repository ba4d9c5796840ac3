# SPDX-License-Identifier: Apache-2.0
"""Three real vLLM engines on one host card, the load moving on every 20 seconds: who got what, how soon, and at whose cost.

    python benchmarks/three_engines.py --output FOLDER          eight minutes or more on two cores

It runs `tests/e2e/test_three_engines.py`, which has the load and says what must hold, and writes a page with what was measured, the
picture and the samples into FOLDER. Times are those of a machine that three engines and their clients share; shares, counts and bytes are
exact within the 20 ms between two samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEST = "tests/e2e/test_three_engines.py"


def run(folder: Path) -> tuple[bool, Path]:
    """Whether the test passed, and the folder with what it left."""
    command = [sys.executable, "-m", "pytest", TEST, "--full", "-p", "no:cacheprovider", "--basetemp", str(folder / "run")]
    done = subprocess.run(command, cwd=ROOT, check=False)
    found = list(folder.glob("run/**/figures.json"))
    if not found:
        raise SystemExit(f"the run ended with {done.returncode} and left no figures")
    return done.returncode == 0, found[0].parent


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]


def summary(figures: dict[str, Any]) -> list[list[str]]:
    shares, hot, returns = figures["shares"], figures["hot"], figures["returns"]
    put_back = figures["preemptions"]
    avoidable = sum(counters["avoidable_preemptions"] for counters in figures["counters"].values())
    waits = [entry for entry in figures["waiting"] if entry["only_waits"]]
    floors = [entry["floor_s"] for entry in returns]
    late = sum(entry["floor_s"] is None or entry["floor_s"] > entry["victims_step_s"] + 0.1 for entry in returns)
    steps = ", ".join(f"{1000 * entry['victims_step_s']:.0f}" for entry in returns)
    return [
        ["requests, failed", f"{figures['requests']}, {len(figures['failed'])}"],
        ["least room beside leases and floors, bytes", str(figures["least_room_bytes"])],
        [
            "samples in which the loaded engine had waited for a second or more, the others without work; of them at 95 % or more",
            f"{shares['of them alone']}; {shares['alone, at 95 % or more']} (least {percent(shares['alone, least'])})",
        ],
        [
            "the same, the others' last requests still running",
            f"{shares['hungry samples'] - shares['of them alone']}; {shares['all, at 95 % or more'] - shares['alone, at 95 % or more']} "
            f"(least {percent(shares['all, least'])})",
        ],
        ["hot prompts found after two turns of others", percent(sum(e["found_tokens"] for e in hot) / sum(e["asked_tokens"] for e in hot))],
        ["returns with nothing: floor after, s (longest)", f"{', '.join(map(seconds, floors))}"],
        ["of them later than a step of the victim + 100 ms (steps, ms)", f"{late} of {len(returns)} ({steps})"],
        ["requests put back", str(sum(entry["count"] for entry in put_back))],
        ["of them while others had memory to give, as the pools themselves count", str(avoidable)],
        [
            "the same, from the samples: surely, perhaps",
            f"{sum(e['count'] for e in put_back if e['certain_bytes'])}, {sum(e['count'] for e in put_back if e['possible_bytes'])}",
        ],
        ["processor time of a scheduler that only waits, median (most)", share_of_time(waits, "EngineCore")],
        ["of its worker, to which vLLM sends each of its empty steps", share_of_time(waits, "Worker")],
    ]


def share_of_time(waits: list[dict[str, float]], process: str) -> str:
    shares = [entry[process] for entry in waits]
    return f"{percent(statistics.median(shares))} ({percent(max(shares))}) of {len(shares)} seconds" if shares else "not seen"


def percent(fraction: float | None) -> str:
    return "none" if fraction is None else f"{100 * fraction:.1f} %"


def page(figures: dict[str, Any], passed: bool, today: str) -> str:
    turns = [
        [str(number), turn["engine"], f"{1000 * turn['step_s']:.0f}", seconds(turn["takeover_s"])]
        for number, turn in enumerate(figures["turns"])
    ]
    names = sorted({name for counters in figures["counters"].values() for name in counters})
    counted = [[name, *(str(counters.get(name, 0)) for counters in figures["counters"].values())] for name in names]
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f} in the last 15 minutes"
    lines = [
        f"# Three engines on one card, {today}",
        "",
        f"`benchmarks/three_engines.py`; {machine}. What has to hold {'held' if passed else 'did NOT hold'}.",
        "",
        *table(["measured", ""], summary(figures)),
        "",
        *table(["turn", "engine", "mean step, ms", "s from the first refusal to 95 % of what lies above the others' floors"], turns),
        "",
        *table(["counter", *figures["counters"]], counted),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="gets the page, the picture, the samples and all figures")
    parser.add_argument("--from-run", type=Path, help="a folder that a run has left, instead of a new run")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="three-engines-") as folder:
        passed, left = (True, asked.from_run) if asked.from_run else run(Path(folder))
        today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        for name in ("figures.json", "memory.csv", "three-engines.svg", "three-engines.png"):
            shutil.copy(left / name, asked.output / name)
    figures = json.loads((asked.output / "figures.json").read_text())
    text = page(figures, passed, today)
    (asked.output / f"{today}-three-engines.md").write_text(text)
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
