# SPDX-License-Identifier: Apache-2.0
"""A real `python -m sglang.launch_server` with the small model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.controller.ports import free_port
from kvcached.testing import servers
from kvcached.testing.kinds import SGLANG, Shape
from sglang_harness.cases import PYTHON, ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ROOT / ".cache" / "models" / "llama"


class Server(servers.Server):
    """Of this release, in this folder, elastic by its environment."""

    def __init__(self, version: str, folder: Path, *options: str, **settings: str) -> None:
        self.run_dir = folder / "run"
        port = free_port()
        command = [str(PYTHON), *SGLANG.arguments(MODEL, "tiny", port, Shape(8, 2048, 16)), "--random-seed", "1"]
        command += ["--max-total-tokens", "16384", *options]
        ours = {"ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(self.run_dir), "KVCACHED_IDLE_TRIM_S": "0.3"}
        super().__init__(command, environment(version, ours | settings), folder / "server.log", port, "tiny")
