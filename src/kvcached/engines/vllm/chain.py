# SPDX-License-Identifier: Apache-2.0
"""Subclass whatever class the engine was going to use, by name.

vLLM takes worker, scheduler and platform as dotted names and resolves `module.attribute`. A name made here carries the base class's
own name as its attribute, `kvcached.engines.vllm.worker.some:module:Class`, and the module makes the subclass when it is asked for it.
So a class that another plugin chose is extended, not replaced.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

_DOT: Final = ":"


def name_over(module: str, base: str) -> str:
    """The dotted name, in `module`, of our class over the class that is called `base`."""
    return f"{module}.{base.replace('.', _DOT)}"


def is_ours(name: object, module: str) -> bool:
    """Whether `name` was made by `name_over` for `module`."""
    return isinstance(name, str) and name.startswith(f"{module}.") and _DOT in name


@functools.cache
def class_over(mixin: type, attribute: str) -> Any:
    """The class that `attribute` of `mixin`'s module stands for. Raises `AttributeError` when it is no such name."""
    if _DOT not in attribute:
        raise AttributeError(f"module {mixin.__module__!r} has no attribute {attribute!r}")
    module, _, name = attribute.replace(_DOT, ".").rpartition(".")
    base = getattr(importlib.import_module(module), name)
    return type(f"Elastic{name}", (mixin, base), {"__module__": mixin.__module__, "__qualname__": attribute, "__doc__": mixin.__doc__})
