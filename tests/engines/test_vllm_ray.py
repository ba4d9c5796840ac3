# SPDX-License-Identifier: Apache-2.0
"""The Ray executor on two nodes of a local cluster."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from harness.engines import MODELS, PYTHON, RAY, environment
from harness.matrix import NEWEST, RANKS_STOCK

from kvcached.testing.models import ensure_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.engines import Batch


@pytest.mark.parametrize("version", NEWEST)
def test_workers_on_two_ray_nodes_say_the_same_and_hold_the_same(version: str, tmp_path: Path, batches: Callable[..., Batch]) -> None:
    assert RAY.is_dir(), "no Ray beside the engine environment; make engines sets it up"
    ensure_model("llama", MODELS / "llama")
    settings = {"ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(tmp_path / "run"), "KVCACHED_HOST_GRANULARITY": "256KiB"}
    settings |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "RAY_USAGE_STATS_ENABLED": "0"}
    with_ray = environment(version, **settings)
    with_ray["PYTHONPATH"] += f":{RAY}"
    command = [str(PYTHON), "-m", "harness.ray_cluster", str(MODELS / "llama")]
    done = subprocess.run(command, env=with_ray, cwd=tmp_path, capture_output=True, text=True, timeout=1_800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    seen = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    assert seen["executor"].startswith("Ray")
    assert seen["nodes"] == 2
    assert seen["tokens"] == batches(version, RANKS_STOCK, False)["tensor"]["tokens"]
    assert seen["mapped"][0] == seen["mapped"][1] > 0
    assert seen["device_files"] == []
    assert seen["nothing_left"]
