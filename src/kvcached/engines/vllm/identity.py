# SPDX-License-Identifier: Apache-2.0
"""Under which names an engine's processes find each other, and people find the engine."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvcached.config import Settings


class Identity(NamedTuple):
    """`instance`: the same in all processes of one engine, different from every other engine's. `name`: the model's, for people."""

    instance: str
    name: str

    @classmethod
    def of(cls, settings: Settings, vllm_config: Any) -> Identity:
        """vLLM makes its instance id once, in the front end, and hands it to every process with the configuration."""
        instance = settings.instance_name or f"vllm-{vllm_config.instance_id}"
        return cls(instance, settings.model_name or _model_name(vllm_config.model_config))


def _model_name(model_config: Any) -> str:
    served = getattr(model_config, "served_model_name", None)
    name = served[0] if isinstance(served, list) else served
    return PurePath(str(name or model_config.model)).name
