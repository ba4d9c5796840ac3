# SPDX-License-Identifier: Apache-2.0
"""Cases for an engine, and running many of them on one release."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
MODELS = ROOT / ".cache" / "sglang-models"
HERE = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",  # or SGLang binds threads to cores that others use too
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # importing takes three times as long without
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}
ELASTIC = {
    "ENABLE_KVCACHED": "true",
    "KVCACHED_HOST_CAPACITY": "64MiB",
    "KVCACHED_HOST_GRANULARITY": "4096",
    "KVCACHED_ZERO_BACKING": "never",  # a touch of what is not mapped ends the process
}


def environment(version: str, more: dict[str, str]) -> dict[str, str]:
    """For a process that runs this release."""
    path = os.pathsep.join([str(ROOT / ".cache" / "engines" / f"sglang-{version}"), str(HERE)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHED_", "ENABLE_KVCACHED", "SGLANG_"))}
    return {**kept, **ENVIRONMENT, **more, "PYTHONPATH": path}


@dataclass(frozen=True)
class Case:
    """One engine from start to end. `also` is for the scenario, which reads it by its keys."""

    name: str
    scenario: str = "tokens"
    model: str = "llama"
    elastic: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    also: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 1_800.0

    def static(self, name: str | None = None) -> Case:
        """The same with the stock engine, to compare with."""
        return Case(name or f"{self.name}-static", "tokens", self.model, False, self.arguments, {}, self.also, self.timeout_s)

    def to_json(self, run_dir: Path) -> dict[str, Any]:
        own = {"KVCACHED_RUN_DIR": str(run_dir), "KVCACHED_IPC_NAME": self.name}
        return {
            **self.also,
            "name": self.name,
            "scenario": self.scenario,
            "model": str(MODELS / self.model),
            "arguments": self.arguments,
            "environment": {**(ELASTIC | own if self.elastic else {}), **self.environment},
            "timeout_s": self.timeout_s,
        }


class Batch:
    """Cases on one release. The first look at a result runs them all, in one process after the other from one import."""

    def __init__(self, version: str, cases: list[Case], folder: Path, environment: dict[str, str] | None = None) -> None:
        self._version = version
        self._cases = cases
        self._folder = folder
        self._environment = environment or {}

    @cached_property
    def _ran(self) -> str:
        listed = self._folder / "cases.json"
        listed.write_text(json.dumps([case.to_json(self._folder / f"{case.name}.run") for case in self._cases]))
        done = subprocess.run(
            [str(PYTHON), "-m", "sglang_harness.runner", str(listed), str(self._folder)],
            env=environment(self._version, self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    def __getitem__(self, name: str) -> dict[str, Any]:
        """What the case saw. Fails with the end of its log when it did not end well."""
        ran = self._ran
        result = self._folder / f"{name}.json"
        if not result.exists():
            raise AssertionError(f"{self._version} {name} failed:\n{ran[-2000:]}\n{self.log(name)[-6000:]}")
        seen: dict[str, Any] = json.loads(result.read_text())
        return seen

    def log(self, name: str) -> str:
        """What the engine wrote."""
        assert self._ran is not None
        file = self._folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""
