# SPDX-License-Identifier: Apache-2.0
"""The SGLang adapter. SGLang calls `plugin` in each of its processes, by an entry point; nothing else is needed.

Switched off, it does nothing: no part of SGLang or torch is loaded here.
"""

from __future__ import annotations

from kvcached.config import elastic_is_asked_for
from kvcached.errors import KVCachedError


def plugin() -> None:
    """SGLang's door. It logs an exception that comes out of here and goes on without us, so a refusal ends the process instead."""
    try:
        if not elastic_is_asked_for():
            return
        from kvcached.engines.sglang.adapter import install

        install()
    except KVCachedError as error:
        raise SystemExit(f"kvcached: this engine was asked to be elastic and cannot be: {error}") from error
