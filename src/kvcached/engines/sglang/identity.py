# SPDX-License-Identifier: Apache-2.0
"""Under which names people and other pools find this engine."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

from kvcached.config import INSTANCE_PATTERN
from kvcached.errors import SettingError

if TYPE_CHECKING:
    from kvcached.config import Settings
    from kvcached.engines.sglang.ranks import Accord

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MODEL_LETTERS: Final = 24


class Identity(NamedTuple):
    """`instance`: different from every other pool's on the machine. `name`: the model's, for people."""

    instance: str
    name: str

    @classmethod
    def of(cls, settings: Settings, model: str, accord: Accord | None) -> Identity:
        """`model`: path or name of the model as SGLang was given it. Ranks of one engine differ by their suffix alone.

        Raises `SettingError` when a given name leaves no room for the suffix.
        """
        name = settings.model_name or PurePath(model).name
        letters = _NOT_IN_A_NAME.sub("-", name).strip("-._")[:_MODEL_LETTERS] or "sglang"
        first, suffix = (os.getpid(), "") if accord is None else (accord.seats[0].pid, accord.mine.suffix)
        instance = f"{settings.instance_name or f'{letters}-{first}'}{suffix}"
        if INSTANCE_PATTERN.fullmatch(instance) is None:
            raise SettingError(
                f"KVCACHED_IPC_NAME={settings.instance_name} leaves no room for the number of the rank: {instance} is too long"
            )
        return cls(instance, f"{name} ({suffix[1:]})" if suffix else name)

    def part(self, part: str) -> Identity:
        """The name of one of several pools of an engine; `part` is empty where there is one."""
        return Identity(f"{self.instance}-{part}", f"{self.name} ({part})") if part else self
