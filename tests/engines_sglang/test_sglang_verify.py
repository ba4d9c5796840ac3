# SPDX-License-Identifier: Apache-2.0
"""`kvcached verify --engine sglang` on the releases that the tests run: every door is where it is recorded, one that moved is named."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from sglang_harness.cases import PYTHON, ROOT, environment
from sglang_harness.matrix import NEWEST, OLDER

if TYPE_CHECKING:
    from pathlib import Path

RELEASES = (NEWEST, *(pytest.param(version, marks=pytest.mark.full) for version in OLDER))


def verify(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON.with_name("kvcached")), "verify", "--engine", "sglang", *arguments]
    return subprocess.run(command, env=environment(version, {}), capture_output=True, text=True, timeout=1_200, check=False)


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_has_every_door_where_it_is_recorded(version: str) -> None:
    done = verify(version)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"SGLang {version}: in the supported range")
    assert "no problems" in done.stdout


@pytest.mark.full
def test_a_run_gives_the_same_tokens_and_memory_back() -> None:
    done = verify(NEWEST, "--run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "run:" in line] == [
        "ok       run: the same tokens",
        "ok       run: memory goes when the cache is flushed",
        "ok       run: bytes leased after shutdown",
    ]


@pytest.mark.full
def test_a_door_that_moved_is_named(tmp_path: Path) -> None:
    source = ROOT / ".cache" / "engines" / f"sglang-{NEWEST}"
    moved = tmp_path / "sglang"
    shutil.copytree(source / "sglang", moved, ignore=shutil.ignore_patterns("__pycache__"))
    for other in source.iterdir():
        if other.name != "sglang":
            (tmp_path / other.name).symlink_to(other)
    module = moved / "srt" / "mem_cache" / "base_prefix_cache.py"
    module.write_text(module.read_text().replace("mamba_num", "state_num"))
    done = verify(NEWEST, "--source", f"{moved}={NEWEST}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MOVED    mem_cache.base_prefix_cache:EvictParams.mamba_num (field)" in done.stdout
