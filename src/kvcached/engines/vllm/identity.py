# SPDX-License-Identifier: Apache-2.0
"""Under which names an engine's processes find each other, and people find the engine."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from kvcached.config import Settings

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MODEL_LETTERS: Final = 24


class Identity(NamedTuple):
    """`instance`: the same in all processes of one engine, different from every other engine's. `name`: the model's, for people."""

    instance: str
    name: str

    @classmethod
    def of(cls, settings: Settings, vllm_config: Any) -> Identity:
        """vLLM makes its instance id once, in the front end, and hands it to every process with the configuration."""
        name = settings.model_name or _model_name(vllm_config.model_config)
        mark = hashlib.sha256(str(vllm_config.instance_id).encode()).hexdigest()[:8]
        letters = _NOT_IN_A_NAME.sub("-", name).strip("-._")[:_MODEL_LETTERS] or "vllm"
        return cls(settings.instance_name or f"{letters}-{mark}", name)


def _model_name(model_config: Any) -> str:
    served = getattr(model_config, "served_model_name", None)
    name = served[0] if isinstance(served, list) else served
    return PurePath(str(name or model_config.model)).name
