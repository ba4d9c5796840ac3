# SPDX-License-Identifier: Apache-2.0
"""The demo's engines: their command lines, their environment, and the card that they share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo.ask import Server
from examples.demo.engine import Engine, free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.demo.options import Options
    from examples.demo.plan import Sizes

NAMES = ("facts", "stories")
BLOCK_TOKENS = 32
CACHED_TOKENS = 32


def engine_environment(name: str, engine_folder: Path, run_dir: Path, sizes: Sizes) -> dict[str, str]:
    """What makes `vllm serve` elastic, and what keeps two of them and this program polite on two cores."""
    unwanted = ("KVCACHED_", "VLLM_", "PYTHONDONTWRITEBYTECODE")  # without compiled files every start takes twice as long
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(unwanted)}
    return {
        **inherited,
        "PYTHONPATH": str(engine_folder),
        "ENABLE_KVCACHED": "true",
        "KVCACHED_RUN_DIR": str(run_dir),
        "KVCACHED_HOST_CAPACITY": str(sizes.budget_bytes),
        "KVCACHED_BUDGET": str(sizes.budget_bytes),
        "KVCACHED_MARGIN": "0",
        "KVCACHED_IPC_NAME": name,
        "KVCACHED_MAX_CACHED_TOKENS": str(CACHED_TOKENS),
        "KVCACHED_MIN_RESERVED_PAGES": "1",
        "KVCACHED_MAX_RESERVED_PAGES": "2",
        "KVCACHED_IDLE_TRIM_S": "2",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def serve_arguments(name: str, model: Path, port: int, request_tokens: int, requests: int) -> list[str]:
    """The arguments of `vllm`: nothing in them is about KVCacheD."""
    return [
        "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", name, "--dtype", "float32",
        "--enforce-eager", "--max-model-len", str(request_tokens), "--max-num-seqs", str(requests), "--block-size", str(BLOCK_TOKENS),
    ]  # fmt: skip


def start_engines(options: Options, model: Path, engine_folder: Path, run_dir: Path, sizes: Sizes) -> list[Engine]:
    """One process group for each name. They are not ready yet."""
    ports = free_ports(len(NAMES))
    vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    return [
        Engine(
            Server(name, port, options.tokens),
            [*vllm, *serve_arguments(name, model, port, sizes.request_tokens, options.requests)],
            engine_environment(name, engine_folder, run_dir, sizes),
            options.output / f"engine-{name}.log",
        )
        for name, port in zip(NAMES, ports, strict=True)
    ]


def public_command(engine: Engine) -> str:
    """The command as a user would type it."""
    return " ".join(["ENABLE_KVCACHED=true", "vllm", *engine.command[3:]])


def kvctl_hint(run_dir: Path, engines: Sequence[Engine]) -> list[str]:
    """What can be tried while the engines are running."""
    kvctl = Path(sys.executable).with_name("kvctl")
    before = f"KVCACHED_RUN_DIR={run_dir} {kvctl if kvctl.exists() else 'kvctl'}"
    return [f"{before} list", f"{before} watch", *(f"curl {engine.server.url}/v1/models" for engine in engines)]
