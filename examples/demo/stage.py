# SPDX-License-Identifier: Apache-2.0
"""The demo's engines: their command lines, their environment, and the card that they share."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from examples.demo.ask import Server
from examples.demo.engine import Engine
from examples.demo.options import MODEL, ROOT, newest_release

from kvcached.controller.ports import free_ports
from kvcached.testing.kinds import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from examples.demo.options import Options
    from examples.demo.plan import Sizes

    from kvcached.testing.kinds import EngineKind

NAMES = ("facts", "stories")
BLOCK_TOKENS = 32
CACHED_TOKENS = 32


def engine_environment(kind: EngineKind, name: str, release: Path, run_dir: Path, sizes: Sizes) -> dict[str, str]:
    """What makes a server elastic, and what keeps two of them and this program polite on two cores."""
    return {
        **kind.variables(release, os.environ),
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
    }


def start_engines(options: Options, run_dir: Path, sizes: Sizes) -> list[Engine]:
    """One process group for each name. They are not ready yet."""
    shape = Shape(options.requests, sizes.request_tokens, BLOCK_TOKENS)
    return [
        Engine(
            Server(name, port, options.tokens),
            [str(kind.python(ROOT)), *kind.arguments(MODEL, name, port, shape)],
            engine_environment(kind, name, newest_release(kind), run_dir, sizes),
            options.output / f"engine-{name}.log",
        )
        for kind, name, port in zip(options.kinds, NAMES, free_ports(len(NAMES)), strict=True)
    ]


def public_command(kind: EngineKind, engine: Engine) -> str:
    """A command for a shell in this folder that starts such an engine, alone on a card of its usual size."""
    variables = {"PYTHONPATH": str(newest_release(kind)), **kind.needed, "ENABLE_KVCACHED": "true"}
    words = [*(f"{name}={value}" for name, value in variables.items()), *engine.command]
    return " ".join(shlex.quote(word.replace(f"{ROOT}{os.sep}", "")) for word in words)


def kvctl_hint(run_dir: Path, engines: Sequence[Engine]) -> list[str]:
    """What can be tried while the engines are running."""
    kvctl = Path(sys.executable).with_name("kvctl")
    before = f"KVCACHED_RUN_DIR={run_dir} {kvctl if kvctl.exists() else 'kvctl'}"
    return [f"{before} list", f"{before} watch", *(f"curl {engine.server.url}/v1/models" for engine in engines)]
