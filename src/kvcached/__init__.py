# SPDX-License-Identifier: Apache-2.0
"""KVCacheD: elastic KV cache memory for LLM engines. The engine-free API; engines hook in by `kvcached.engines`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcached.runtime.api import ElasticCard, ElasticPool, open_card

__version__ = "0.1.0"
__all__ = ["ElasticCard", "ElasticPool", "__version__", "open_card"]


def __getattr__(name: str) -> Any:
    """Load the API on first use: engines import this package in every process, also where it is switched off."""
    if name in ("ElasticCard", "ElasticPool", "open_card"):
        from kvcached.runtime import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
