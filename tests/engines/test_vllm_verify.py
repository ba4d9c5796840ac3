# SPDX-License-Identifier: Apache-2.0
"""`kvcached verify` on the releases that the tests run: every door is where it is recorded, and a door that moved is named."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from harness.engines import PYTHON, RELEASES, environment, versions

if TYPE_CHECKING:
    from pathlib import Path


def verify(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON.with_name("kvcached")), "verify", *arguments]
    return subprocess.run(command, env=environment(version), capture_output=True, text=True, timeout=1_200, check=False)


@pytest.mark.parametrize("version", versions())
def test_a_release_has_every_door_where_it_is_recorded(version: str) -> None:
    done = verify(version)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no problems" in done.stdout


def test_a_door_that_moved_is_named(tmp_path: Path) -> None:
    newest = versions()[-1]
    moved = tmp_path / "vllm"
    shutil.copytree(RELEASES / f"vllm-{newest}" / "vllm", moved, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    pool = moved / "v1" / "core" / "block_pool.py"
    pool.write_text(pool.read_text().replace("def get_new_blocks(", "def fetch_new_blocks("))
    done = verify(newest, "--source", f"{moved}={newest}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "get_new_blocks" in done.stdout
