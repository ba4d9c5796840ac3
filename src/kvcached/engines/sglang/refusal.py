# SPDX-License-Identifier: Apache-2.0
"""Refuses an SGLang that would leave this package out although elastic memory was asked for.

`SGLANG_PLUGINS`, where it is set, lists all plugins that SGLang loads; without `kvcached` in it our plugin is never called, and the engine
would start with a static cache and say nothing. So a line in a `.pth` file, which Python runs at every start, loads this module when the
list leaves us out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvcached.config import elastic_is_asked_for
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class RefuseSglang:
    """An import finder that lets nobody import SGLang."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "sglang":
            raise EngineNotSupported(
                "ENABLE_KVCACHED is set, but SGLANG_PLUGINS does not name kvcached: SGLang would start with a static KV cache. "
                "Add kvcached to SGLANG_PLUGINS, or unset one of the two"
            )


if elastic_is_asked_for():
    sys.meta_path.insert(0, RefuseSglang())
