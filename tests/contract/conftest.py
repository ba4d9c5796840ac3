# SPDX-License-Identifier: Apache-2.0
"""Builds the contract program and the stub drivers once per source state, with sanitizers and without."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB_CAPACITY_BYTES = 1 << 30


def build(directory: Path, *options: str) -> Path:
    """Configure and build `native/` with its tests; returns the folder of the programs. Does nothing when all is up to date."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(
        ["cmake", "-S", ROOT / "native", "-B", directory, *generator, "-DKVCACHED_TESTS=ON", *options], check=True, capture_output=True
    )
    built = subprocess.run(["cmake", "--build", directory, "--parallel", "2"], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-4000:]
    return directory / "tests"


@pytest.fixture(scope="session")
def sanitized_programs() -> Path:
    return build(ROOT / "build" / "native-sanitized", "-DCMAKE_BUILD_TYPE=Debug", "-DKVCACHED_SANITIZE=address,undefined")


@pytest.fixture(scope="session")
def programs() -> Path:
    return build(ROOT / "build" / "native-tests", "-DCMAKE_BUILD_TYPE=Release")
