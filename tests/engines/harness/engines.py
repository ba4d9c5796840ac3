# SPDX-License-Identifier: Apache-2.0
"""Real engines in processes of their own, chosen by version: one environment, one folder for each release."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.cases import Case

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
RELEASES = ROOT / ".cache" / "engines"
RAY = ROOT / ".cache" / "ray"  # put on the path by whom it is for: vLLM looks whether it is there
MODELS = ROOT / ".cache" / "models"
UNWANTED = ("KVCACHED_", "ENABLE_KVCACHED", "VLLM_", "PYTHONDONTWRITEBYTECODE")  # a start without compiled files takes twice as long
TIMEOUT_S = 6_600


def versions() -> list[str]:
    """The releases that are set up, oldest first."""
    found = [path.name.removeprefix("vllm-") for path in RELEASES.glob("vllm-*")] if PYTHON.exists() else []
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def environment(version: str, **extra: str) -> dict[str, str]:
    """Variables for a process that runs this release on one thread, without settings of ours from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(UNWANTED)}
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return {
        **kept,
        "PYTHONPATH": f"{RELEASES / f'vllm-{version}'}:{ROOT / 'src'}:{ROOT / 'tests' / 'engines'}",
        "VLLM_CACHE_ROOT": str(RELEASES / f".cache-{version}{worker}"),  # who shares one looks at every model class again and again
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


class Batch:
    """Cases for one release, run in one process when the first result is asked for."""

    def __init__(self, version: str, cases: list[Case], folder: Path, *, elastic: bool) -> None:
        self.version = version
        self.elastic = elastic
        self._cases = cases
        self._folder = folder

    def __getitem__(self, name: str) -> dict[str, Any]:
        """The result of one case. Fails the test with the engine's own words when there is none."""
        result = self._results.get(name)
        if result is None or "error" in result:
            raise AssertionError(f"vLLM {self.version}, case {name}: {result['error'] if result else self._log_tail()}")
        return result

    @property
    def log(self) -> str:
        self._results  # noqa: B018  # runs it
        return self._log_path.read_text(errors="replace")

    @property
    def _log_path(self) -> Path:
        return self._folder / "engine.log"

    def _log_tail(self) -> str:
        return f"the engine's process ended early with {self._exit_code}:\n{self._log_path.read_text(errors='replace')[-6000:]}"

    @cached_property
    def _results(self) -> dict[str, dict[str, Any]]:
        self._folder.mkdir(parents=True, exist_ok=True)
        cases, results = self._folder / "cases.json", self._folder / "results.jsonl"
        cases.write_text(json.dumps([asdict(case) for case in self._cases]))
        results.touch()
        command = [str(PYTHON), "-m", "harness.runner", str(cases), str(results), str(MODELS)]
        self._exit_code = self._run(command)
        return {record["name"]: record for record in map(json.loads, results.read_text().splitlines())}

    def _run(self, command: list[str]) -> int:
        extra = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if self.elastic:
            extra |= {"ENABLE_KVCACHED": "true", "KVCACHED_IDLE_TRIM_S": "0.3"}
        with self._log_path.open("wb") as log:
            process = subprocess.Popen(command, env=environment(self.version, **extra), cwd=self._folder, stdout=log, stderr=log)
            try:
                return process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(
                    f"vLLM {self.version} did not end within {TIMEOUT_S} s:\n{self._log_path.read_text()[-6000:]}"
                ) from None
