# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve` with a small model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from harness.engines import MODELS, PYTHON, environment
from kvcached.controller.ports import free_port
from kvcached.testing import servers
from kvcached.testing.kinds import VLLM, Shape

if TYPE_CHECKING:
    from pathlib import Path


class Server(servers.Server):
    """Of this release, in this folder, elastic by its environment."""

    always: ClassVar[dict[str, Any]] = {"return_token_ids": True}

    def __init__(self, version: str, folder: Path, *options: str, model: str = "llama", **settings: str) -> None:
        self.run_dir = folder / "run"
        port = free_port()
        command = [str(PYTHON), *VLLM.arguments(MODELS / model, "tiny", port, Shape(8, 2048)), "--seed", "0", *options]
        ours = {"ENABLE_KVCACHED": "true", "KVCACHED_RUN_DIR": str(self.run_dir), "KVCACHED_IDLE_TRIM_S": "0.3"}
        super().__init__(command, environment(version, **(ours | settings)), folder / "server.log", port, "tiny")

    def abandon(self, prompt: str, max_tokens: int) -> None:
        """Begin a long streamed answer and hang up after its first piece."""
        self.stream(prompt, max_tokens, pieces=1)
