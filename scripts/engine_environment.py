# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201, TID251  # a script talks to people and hands its environment on
"""What the environments of all engines have in common: a virtual environment with this package in it, and small models."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
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
# Installs in seconds what takes pip minutes. What several environments need is unpacked once, in UV_FOLDER, and linked into each.
UV = "uv==0.13.9"
UV_FOLDER = ROOT / ".cache" / "uv"
UV_NAMES = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}  # by pip's names
PIP = (str(ROOT / ".venv" / "bin" / "python"), "-m", "pip")  # that of the development environment: a system's Python may have none


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


@functools.cache
def uv() -> Path:
    """The program, of the pinned version; fetched with pip where it is missing."""
    name, _, number = UV.partition("==")
    if not ((UV_FOLDER / f"{name}-{number}.dist-info").exists() and (UV_FOLDER / "bin" / name).exists()):
        shutil.rmtree(UV_FOLDER, ignore_errors=True)
        run(*PIP, "-qq", "install", "--no-compile", "--target", str(UV_FOLDER), UV)
    return UV_FOLDER / "bin" / name


@functools.cache
def uv_settings() -> dict[str, str]:
    """What pip is set to on this machine, as variables for uv, which does not read pip's settings. Those that are set stay."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    found = {"UV_CACHE_DIR": str(UV_FOLDER / "cache"), "UV_HTTP_TIMEOUT": os.environ.get("UV_HTTP_TIMEOUT", "300")}  # its own is 30 s
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        known = UV_NAMES.get(name.rpartition(".")[2])
        if known and known not in os.environ:
            found.setdefault(known, value.strip("'\""))  # pip lists what counts more first
    return found


def install(python: Path, *arguments: str, **variables: str) -> None:
    """`pip install` into the environment of this interpreter, or for it."""
    run(str(uv()), "pip", "install", "-q", "--python", str(python), *arguments, **uv_settings(), **variables)


def run(*command: str, **variables: str) -> None:
    """Raises `CalledProcessError` when it fails. Python writes compiled files there: whoever comes next starts in half the time."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**kept, **variables})


class Environment:
    """A virtual environment in this source tree."""

    def __init__(self, folder: str) -> None:
        self.folder = ROOT / folder
        self.python = self.folder / "bin" / "python"

    def make(self, stamp_name: str, *installs: Sequence[str]) -> bool:
        """Install with each list of arguments. Returns False when the stamp says that it was done."""
        digest = hashlib.sha256(json.dumps([installs, sys.version]).encode()).hexdigest()
        stamp = self.folder / stamp_name
        if stamp.exists() and stamp.read_text() == digest:
            return False
        if not self.python.exists():
            run(sys.executable, "-m", "venv", str(self.folder))
        for arguments in installs:
            self.install(*arguments)
        stamp.write_text(digest)
        return True

    def install_package(self) -> bool:
        """Install this package, editable, whose native library lies beside its source. Returns False when that was done."""
        digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
        stamp, library = self.folder / "kvcached-package.stamp", ROOT / "src" / "kvcached" / "vmm" / "libkvcached.so"
        if stamp.exists() and stamp.read_text() == digest and library.exists():
            return False
        if not library.exists():
            self.run("sh", str(ROOT / "native" / "build.sh"))
        apart = ("-C", f"build-dir=build/{self.folder.name}", "-C", "build.targets=help")  # builds nothing: the library may be in use
        self.install("--no-deps", "--no-build-isolation", *apart, "--editable", str(ROOT))
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
        install(self.python, *arguments, PATH=self._path)

    def run(self, *command: str) -> None:
        run(*command, PATH=self._path)

    @property
    def _path(self) -> str:
        return f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"  # the environment has cmake and ninja
