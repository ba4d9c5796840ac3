# SPDX-License-Identifier: Apache-2.0
"""Schemathesis on the gateway's own description: what is described is what is answered, whatever is asked."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from test_controller_processes import running

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = shutil.which("schemathesis")
SETTINGS = """
[parameters]
"path.model" = "chat"

# More sizes are understood than the description says.
[[operations]]
include-path = "/action/limit/{model}"
checks.negative_data_rejection.enabled = false
"""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not on PATH; any environment will do: pip install schemathesis")
@pytest.mark.parametrize("sleep", ["host", "kv"])
def test_the_description_holds(tmp_path: Path, run_dir: Path, sleep: str) -> None:
    (tmp_path / "pool").write_text("4")
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    assert PROGRAM is not None
    with running(tmp_path, sleep=sleep, env={"KVCACHED_RUN_DIR": str(run_dir)}) as it:
        it.engine_pid()
        command = [PROGRAM, "run", it.url + "/openapi.json", "--max-examples", "25", "--no-color"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stdout[-8000:]
        assert "15 selected / 15 total" in done.stdout
