# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201, TID251  # a script talks to people and hands its environment on
"""What the environments of all engines have in common: a virtual environment with this package in it, and small models."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ROOT / ".cache" / "engines"
MODELS = ROOT / ".cache" / "models"
TORCH = "torch==2.13.0"


class Step:
    """One line of progress: what is being done, and how long it took."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.done = True

    def __enter__(self) -> Step:
        self.start_s = time.monotonic()
        print(f"{self.title} ...", flush=True)
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is None:
            print(f"{self.title}: {f'done in {time.monotonic() - self.start_s:.0f} s' if self.done else 'already there'}", flush=True)


def take_steps(name: str, steps: Sequence[tuple[str, Callable[[], bool]]]) -> None:
    """Do them in turn. Each returns whether anything had to be done."""
    for number, (title, do) in enumerate(steps, start=1):
        with Step(f"{name} [{number}/{len(steps)}] {title}") as state:
            state.done = do()


class Environment:
    """A virtual environment in this source tree."""

    def __init__(self, folder: str) -> None:
        self.folder = ROOT / folder
        self.python = self.folder / "bin" / "python"

    def make(self, stamp_name: str, *installs: Sequence[str]) -> bool:
        """`pip install` with each list of arguments. Returns False when the stamp says that it was done."""
        digest = hashlib.sha256(json.dumps([installs, sys.version]).encode()).hexdigest()
        stamp = self.folder / stamp_name
        if stamp.exists() and stamp.read_text() == digest:
            return False
        if not self.python.exists():
            self.run(sys.executable, "-m", "venv", str(self.folder))
        for arguments in installs:
            self.install(*arguments)
        stamp.write_text(digest)
        return True

    def install_package(self) -> bool:
        """Install this package, editable, with its native library beside its source. Returns False when that was done."""
        digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
        stamp, library = self.folder / "kvcached-package.stamp", ROOT / "src" / "kvcached" / "vmm" / "libkvcached.so"
        if stamp.exists() and stamp.read_text() == digest and library.exists():
            return False
        if not library.exists():
            self.run("sh", str(ROOT / "native" / "build.sh"))
        self.install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        stamp.write_text(digest)
        return True

    def make_model(self, kind: str) -> bool:
        """Make one of the small models. Returns False when it is there."""
        folder = MODELS / kind
        if (folder / "config.json").exists():
            return False
        self.run(str(self.python), "-m", "kvcached.testing.models", kind, str(folder))
        return True

    def install(self, *arguments: str) -> None:
        self.run(str(self.python), "-m", "pip", "-qq", "install", "--no-compile", *arguments)

    def run(self, *command: str) -> None:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"  # the environment has cmake and ninja
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "PATH": path})
