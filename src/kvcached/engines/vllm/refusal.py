# SPDX-License-Identifier: Apache-2.0
"""Refuses a vLLM that would leave this package out although elastic memory was asked for.

`VLLM_PLUGINS`, where it is set, lists all plugins that vLLM loads; without `kvcached` in it neither of vLLM's doors is ever called,
and the engine would start with a static cache and say nothing. So a line in a `.pth` file, which Python runs at every start, loads
this module when both variables are set.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvcached.config import elastic_is_asked_for, loads_plugin
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class RefuseVllm:
    """An import finder that lets nobody import vLLM."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "vllm":
            raise EngineNotSupported(
                "ENABLE_KVCACHED is set, but VLLM_PLUGINS does not name kvcached: vLLM would start with a static KV cache. "
                "Add kvcached to VLLM_PLUGINS, or unset one of the two"
            )


if elastic_is_asked_for() and not loads_plugin("kvcached"):
    sys.meta_path.insert(0, RefuseVllm())
