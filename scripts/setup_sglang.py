#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251  # a script talks to people and hands its environment on
"""Make the environment in which real SGLang runs on the CPU: one virtual environment, several SGLang releases beside it.

Usage: python3.11 scripts/setup_sglang.py [--versions 0.5.23 0.5.21 0.5.17 0.5.11]

One environment (`.venv-sglang`) holds torch and what every release needs; each release lies with its own transformers in
`.cache/engines/sglang-X` and is chosen by putting that folder first on PYTHONPATH. SGLang has no build for a CPU without kernels: two
small shims (`tests/engines_sglang/shims`) stand in for what it imports and never calls. A second run finds its stamps and does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

from setup_engines import ROOT, Step

if TYPE_CHECKING:
    from collections.abc import Callable

VENV = ROOT / ".venv-sglang"
ENGINES = ROOT / ".cache" / "engines"
MODELS = ROOT / ".cache" / "sglang-models"
PYTHON = VENV / "bin" / "python"
SHIMS = ROOT / "tests" / "engines_sglang" / "shims"

TORCH = "torch==2.13.0"
VERSIONS = ("0.5.23", "0.5.21", "0.5.17", "0.5.11")
TRANSFORMERS = {(0, 5, 11): "5.6.0", (0, 5, 13): "5.8.1", (0, 5, 15): "5.12.1", (0, 5, 22): "5.19.0"}  # from this release on
OLDER = ("tokenizers==0.22.2", "huggingface-hub>=1.5,<2")  # what transformers before 5.19 wants
# SGLang's own list, less its kernels and what only other models than language models need, plus what it imports and does not list.
PACKAGES = (
    *("transformers==5.19.0", "aiohttp", "fastapi", "uvicorn", "uvloop", "pyzmq", "psutil", "orjson", "msgspec", "pydantic"),
    *("python-multipart", "partial_json_parser", "pillow", "prometheus-client", "requests", "regex", "packaging", "scipy", "setproctitle"),
    *("pybase64", "python-dateutil<3", "tqdm", "sentencepiece==0.2.1", "tiktoken", "einops", "interegular", "xxhash", "zstandard"),
    *("IPython", "llguidance", "gguf", "distro", "xgrammar==0.2.7", "openai==2.8.0", "openai-harmony==0.0.4"),
    *("compressed-tensors==0.18.0", "dill", "cffi", "lxml", "pycryptodomex", "jsonschema", "numpy", "ninja>=1.11", "cmake>=3.22"),
    *("scikit-build-core>=0.10,<1", "pytest>=8,<10", "pytest-timeout>=2.3,<3"),
)
WITHOUT_DEPENDENCIES = (
    *("torchvision==0.28.0", "watchfiles", "blobfile==3.0.0", "soundfile==0.13.1", "apache-tvm-ffi==0.1.11", "easydict", "timm==1.0.25"),
)
KINDS = ("llama", "qwen3", "deepseek", "gptoss")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="X.Y.Z", help="SGLang releases to unpack")
    versions: list[str] = parser.parse_args().versions
    if sys.version_info[:2] < (3, 11):
        parser.error("the engines need Python 3.11 or newer")
    steps: list[tuple[str, Callable[[], bool]]] = [
        (f"environment {VENV.name}", make_environment),
        *((f"SGLang {version}", partial(unpack, version)) for version in versions),
        ("kvcached and the shims in it", install_package),
        *((f"model {kind}", partial(make_model, kind)) for kind in KINDS),
        ("model with a tokenizer", make_served_model),
    ]
    for number, (title, do) in enumerate(steps, start=1):
        with Step(f"sglang [{number}/{len(steps)}] {title}") as state:
            state.done = do()
    return 0


def make_environment() -> bool:
    """Install what every release needs. Returns False when the stamp says that it is there."""
    digest = hashlib.sha256(json.dumps([TORCH, PACKAGES, WITHOUT_DEPENDENCIES, sys.version]).encode()).hexdigest()
    stamp = VENV / "kvcached-sglang.stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return False
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", str(VENV))
    pip("install", TORCH, "numpy")
    pip("install", TORCH, *PACKAGES)
    pip("install", "--no-deps", *WITHOUT_DEPENDENCIES)
    stamp.write_text(digest)
    return True


def unpack(version: str) -> bool:
    """Install one release and its transformers in a folder. Returns False when it is there. The folder appears whole or not at all."""
    target, scratch = ENGINES / f"sglang-{version}", ENGINES / f".unpacking-sglang-{version}"
    if (target / "sglang" / "__init__.py").exists():
        return False
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    number = tuple(int(part) for part in version.split(".")[:3])
    transformers = TRANSFORMERS[max(first for first in TRANSFORMERS if first <= number)]
    older = (f"transformers=={transformers}", *OLDER) if number < (0, 5, 22) else ()
    pip("install", "--no-deps", "--target", str(scratch), f"sglang=={version}", *older)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    return True


def install_package() -> bool:
    """Install this package, editable, and the line that loads the shims. Returns False when that was done."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp, library = VENV / "kvcached-package.stamp", ROOT / "src" / "kvcached" / "vmm" / "libkvcached.so"
    if stamp.exists() and stamp.read_text() == digest and library.exists():
        return False
    if not library.exists():
        run("sh", str(ROOT / "native" / "build.sh"))
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    (site_packages,) = VENV.glob("lib/python3.*/site-packages")
    (site_packages / "sglang_on_cpu.pth").write_text(f"{SHIMS}\nimport sglang_on_cpu\n")
    stamp.write_text(digest)
    return True


def make_model(kind: str) -> bool:
    """Make one of the small models. Returns False when it is there."""
    folder = MODELS / kind
    if (folder / "config.json").exists():
        return False
    run(str(PYTHON), str(ROOT / "tests" / "engines_sglang" / "tiny_models.py"), kind, str(folder))
    return True


def make_served_model() -> bool:
    """Make the model that is served as text. Returns False when it is there."""
    folder = ROOT / ".cache" / "models" / "llama"
    if (folder / "config.json").exists():
        return False
    run(str(PYTHON), "-m", "kvcached.testing.models", "llama", str(folder))
    return True


def pip(*arguments: str) -> None:
    run(str(PYTHON), "-m", "pip", "-qq", *arguments[:1], "--no-compile", *arguments[1:])


def run(*command: str) -> None:
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"  # the environment has cmake and ninja
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "PATH": path})


if __name__ == "__main__":
    sys.exit(main())
