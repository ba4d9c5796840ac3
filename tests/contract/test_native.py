# SPDX-License-Identifier: Apache-2.0
"""The contract program: every rule of kvcached.h, on the host backend and on CUDA and HIP over stub drivers, under sanitizers."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1024
pytestmark = pytest.mark.timeout(1200)  # the first test builds


def run_contract(programs: Path, tmp_path: Path, backend: str, granularity_bytes: int) -> None:
    where = tmp_path if backend == "host" else programs / f"libstub_{backend}.so"
    done = subprocess.run(
        [programs / "contract", backend, where, str(granularity_bytes)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all hold\n")


@pytest.mark.parametrize("granularity_kib", [64, 2048, 4096])
@pytest.mark.parametrize("backend", ["host", "cuda", "hip"])
def test_contract(programs: Path, tmp_path: Path, backend: str, granularity_kib: int) -> None:
    run_contract(programs, tmp_path, backend, granularity_kib * KIB)


def test_contract_program_can_fail(programs: Path, tmp_path: Path) -> None:
    """A card that cannot be opened is not passed over."""
    (tmp_path / "kvcached-host-0.capacity").write_bytes(b"not a capacity file, but long enough to be one")
    done = subprocess.run([programs / "contract", "host", tmp_path], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "not one of ours" in done.stderr
