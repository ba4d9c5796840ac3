# SPDX-License-Identifier: Apache-2.0
"""Under which names people and other pools find this engine."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from kvcached.config import Settings

_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_MODEL_LETTERS: Final = 24


class Identity(NamedTuple):
    """`instance`: different from every other pool's on the machine. `name`: the model's, for people."""

    instance: str
    name: str

    @classmethod
    def of(cls, settings: Settings, model: str) -> Identity:
        """`model`: path or name of the model as SGLang was given it."""
        name = settings.model_name or PurePath(model).name
        letters = _NOT_IN_A_NAME.sub("-", name).strip("-._")[:_MODEL_LETTERS] or "sglang"
        return cls(settings.instance_name or f"{letters}-{os.getpid()}", name)

    def part(self, part: str) -> Identity:
        """The name of one of several pools of an engine; `part` is empty where there is one."""
        return Identity(f"{self.instance}-{part}", f"{self.name} ({part})") if part else self
