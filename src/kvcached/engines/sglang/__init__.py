# SPDX-License-Identifier: Apache-2.0
"""The SGLang adapter. SGLang calls `plugin` in each of its processes, by an entry point; nothing else is needed.

Switched off, it does nothing: no part of SGLang or torch is loaded here.
"""


def plugin() -> None:
    """SGLang's door. It logs an exception that comes out of here and goes on without us, so whatever fails ends the process instead."""
    try:
        from kvcached.config import elastic_is_asked_for

        if not elastic_is_asked_for():
            return
        from kvcached.engines.sglang.adapter import install

        install()
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise SystemExit(f"kvcached: this engine was asked to be elastic and cannot be: {reason}") from error
