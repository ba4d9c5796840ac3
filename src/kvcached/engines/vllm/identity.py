# SPDX-License-Identifier: Apache-2.0
"""Under which names an engine's processes find each other, and people find the engine."""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvcached.config import INSTANCE_PATTERN
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from kvcached.config import Settings

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_CORE_MARK: Final = re.compile(r"_dp\d+$")  # vLLM adds it to its instance id for some executors, not for all
_MODEL_LETTERS: Final = 24
_CORES: Final = "kvcached_cores"


class Identity(NamedTuple):
    """`instance`: the same in all processes of one engine core, different from every other's. `name`: the model's, for people."""

    instance: str
    name: str

    @classmethod
    def of(cls, settings: Settings, vllm_config: Any) -> Identity:
        """vLLM makes its instance id once, in the front end, and hands it to every process with the configuration.

        Raises `SettingError` when a given name leaves no room for the number of the core.
        """
        name, shared = _shared_names(settings, vllm_config)
        parallel = vllm_config.parallel_config
        core = int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0)) or 0)
        return cls(_of_core(shared, core) if cores_of(vllm_config) > 1 or core else shared, name)


def instances_of(settings: Settings, vllm_config: Any) -> list[str]:
    """The names of all engine cores behind one front end."""
    cores = cores_of(vllm_config)
    _, shared = _shared_names(settings, vllm_config)
    return [shared] if cores == 1 else [_of_core(shared, core) for core in range(cores)]


def note_cores(vllm_config: Any) -> None:
    """In the front end: a core of a model without experts is told that it is the only one."""
    setattr(vllm_config, _CORES, cores_of(vllm_config))


def cores_of(vllm_config: Any) -> int:
    """Engine cores that serve the same model in parallel (data parallelism)."""
    return int(getattr(vllm_config, _CORES, 0) or getattr(vllm_config.parallel_config, "data_parallel_size", 1))


def _shared_names(settings: Settings, vllm_config: Any) -> tuple[str, str]:
    name = settings.model_name or _model_name(vllm_config.model_config)
    mark = hashlib.sha256(_CORE_MARK.sub("", str(vllm_config.instance_id)).encode()).hexdigest()[:8]
    letters = _NOT_IN_A_NAME.sub("-", name).strip("-._")[:_MODEL_LETTERS] or "vllm"
    return name, settings.instance_name or f"{letters}-{mark}"


def _of_core(shared: str, core: int) -> str:
    instance = f"{shared}-dp{core}"
    if INSTANCE_PATTERN.fullmatch(instance) is None:
        raise SettingError(f"KVCACHED_IPC_NAME={shared} leaves no room for the number of the engine core: {instance} is too long")
    return instance


def _model_name(model_config: Any) -> str:
    served = getattr(model_config, "served_model_name", None)
    name = served[0] if isinstance(served, list) else served
    return PurePath(str(name or model_config.model)).name
