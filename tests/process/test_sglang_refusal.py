# SPDX-License-Identifier: Apache-2.0
"""An SGLang that would leave us out is refused before it is imported: the line that does it is installed with the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PTH = Path(__file__).resolve().parents[2] / "native" / "python" / "kvcached-elastic.pth"


def import_sglang(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Import a stand-in for SGLang with the lines of the `.pth` file run first, as Python does at its start."""
    (folder / "sglang.py").write_text("print('imported')")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHED", "ENABLE_KVCACHED", "SGLANG"))}
    return subprocess.run(
        [sys.executable, "-c", f"{PTH.read_text().strip()}\nimport sglang"],
        env={**inherited, **environment, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("plugins", ["lora,other", " "])
def test_a_plugin_list_without_us_is_refused_by_name(tmp_path: Path, plugins: str) -> None:
    done = import_sglang(tmp_path, {"ENABLE_KVCACHED": "true", "SGLANG_PLUGINS": plugins})
    assert done.returncode != 0
    assert "Add kvcached to SGLANG_PLUGINS" in done.stderr
    assert "imported" not in done.stdout


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SGLANG_PLUGINS": "other"},
        {"ENABLE_KVCACHED": "true"},
        {"ENABLE_KVCACHED": "true", "SGLANG_PLUGINS": "other, kvcached"},
        {"ENABLE_KVCACHED": "false", "SGLANG_PLUGINS": "other"},
        {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "0", "SGLANG_PLUGINS": "other"},
    ],
)
def test_everyone_else_imports_it(tmp_path: Path, environment: dict[str, str]) -> None:
    done = import_sglang(tmp_path, environment)
    assert (done.returncode, done.stdout.strip()) == (0, "imported"), done.stderr
