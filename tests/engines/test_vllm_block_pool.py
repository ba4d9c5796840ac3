# SPDX-License-Identifier: Apache-2.0
"""The elastic block pool under random use in every release: vLLM's view of each block and the pool's agree after every stretch."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from harness.engines import PYTHON, environment, versions

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("version", versions())
def test_random_use_keeps_both_views_of_every_block_together(version: str, seed: int, tmp_path: Path) -> None:
    command = [str(PYTHON), "-m", "harness.pool_model", str(seed), "2500"]
    done = subprocess.run(command, env=environment(version), cwd=tmp_path, capture_output=True, text=True, timeout=1_200)
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert all(counts[name] > 20 for name in ("take", "finish", "hit", "finish_twice", "evict", "limit", "shrink", "reset", "missed"))
    assert counts["hits"] > 200
    assert counts["found"] > 200  # looks at a cached block that was found before
    assert counts["above"] > 20  # looks at a pool above its limit
    assert counts["emptied"] > 2
