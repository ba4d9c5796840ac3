# SPDX-License-Identifier: Apache-2.0
"""Runs cases on one SGLang release: `python -m sglang_harness.runner CASES.json FOLDER`, with the release first on PYTHONPATH.

The engine is imported once; each case runs in a fork of that process, with its own environment, and leaves FOLDER/NAME.json and
FOLDER/NAME.log behind.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from sglang_harness.engine import import_engine


def main(cases_file: str, folder: str) -> None:
    release = import_engine()
    if threading.active_count() > 1:
        print("threads:", [thread.name for thread in threading.enumerate()])
    for case in json.loads(Path(cases_file).read_text()):
        started_s = time.monotonic()
        child = os.fork()
        if child == 0:
            run_and_exit(case, release, Path(folder))
        status = wait_for(child, float(case["timeout_s"]))
        print(f"{case['name']}: {status} after {time.monotonic() - started_s:.1f} s", flush=True)


def run_and_exit(case: dict[str, Any], release: tuple[int, ...], folder: Path) -> NoReturn:
    status = 1
    try:
        run(case, release, folder)
        status = 0
    finally:  # nothing of the parent's may run in the child
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(case: dict[str, Any], release: tuple[int, ...], folder: Path) -> None:
    os.setpgid(0, 0)
    with (folder / f"{case['name']}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(case["environment"])
    module, _, name = case["scenario"].rpartition(":")
    result = getattr(importlib.import_module(f"sglang_harness.{module or 'scenarios'}"), name)(release, case)
    (folder / f"{case['name']}.json").write_text(json.dumps(result))


def wait_for(child: int, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return f"exit {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed: it ran out of time"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
