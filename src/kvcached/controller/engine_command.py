# SPDX-License-Identifier: Apache-2.0
"""The command line and the environment of an engine's server: all that differs between engines when they are started. Pure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcached.controller.adoption import Purpose, digests
from kvcached.controller.config import instance_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcached.controller.config import Model

_NO_PORT: Final = 0
_VISIBLE: Final = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES"}


def command_of(name: str, model: Model, port: int) -> list[str]:
    """The interpreter and what follows it. The file's own arguments come last, so that they win."""
    where = ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    return [str(interpreter(model)), *_program(model), *where, *model.args]


def purpose_of(name: str, model: Model, replica: int, inherited: Mapping[str, str], folder: Path, log: str) -> Purpose:
    """What a server is started for, whatever port it gets. `folder`: where the gateway works."""
    environment = digests(environment_of(name, model, replica, inherited), model.env)
    return Purpose(name, replica, log, str(folder), tuple(command_of(name, model, _NO_PORT)), environment)


def interpreter(model: Model) -> Path:
    if model.venv is not None:
        return model.venv / "bin" / "python"
    return model.python or Path(sys.executable)


def _program(model: Model) -> list[str]:
    naps = model.sleeps in ("host", "discard")
    if model.engine == "vllm":
        return ["-m", "vllm.entrypoints.cli.main", "serve", str(model.model), *(["--enable-sleep-mode"] if naps else [])]
    saver = ["--enable-memory-saver"] if naps else []
    backup = ["--enable-weights-cpu-backup"] if model.sleeps == "host" else []
    return ["-m", "sglang.launch_server", "--model-path", str(model.model), *saver, *backup]


def environment_of(name: str, model: Model, replica: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the process gets: what we have, what the file's keys mean, and the file's `env`, which wins."""
    return {**inherited, "PYTHONUNBUFFERED": "1", **_device(model), **_elastic(name, model, replica), **_doors(model), **model.env}


def _device(model: Model) -> dict[str, str]:
    kind, _, number = (model.card or "").partition(":")
    return {_VISIBLE[kind]: number} if kind in _VISIBLE else {}


def _elastic(name: str, model: Model, replica: int) -> dict[str, str]:
    if not model.elastic:
        return {"ENABLE_KVCACHED": "false"}
    facts = {
        "KVCACHED_CARD": model.card if model.card is not None and model.card.startswith("host:") else None,
        "KVCACHED_OTHER_BYTES": model.weights or None,
        "KVCACHED_FLOOR": model.floor,
        "KVCACHED_LIMIT": model.limit,
    }
    given = {variable: str(value) for variable, value in facts.items() if value is not None}
    return {"ENABLE_KVCACHED": "true", "KVCACHED_IPC_NAME": instance_name(name, replica), "KVCACHED_NAME": name, **given}


def _doors(model: Model) -> dict[str, str]:
    """vLLM opens its sleep paths only to who asks for them."""
    return {"VLLM_SERVER_DEV_MODE": "1"} if model.engine == "vllm" and model.sleeps in ("host", "discard") else {}
