# SPDX-License-Identifier: Apache-2.0
"""The SGLang adapter. SGLang calls `plugin` in each of its processes, by an entry point; nothing else is needed.

Switched off, it does nothing: no part of SGLang or torch is loaded here.
"""


def plugin() -> None:
    """SGLang's door. It logs an exception that comes out of here and goes on without us.

    So be it where nobody knows yet that elastic memory was asked for; from there on whatever fails ends the process instead.
    """
    from kvcached.config import elastic_is_asked_for, tell_misspelt_switches
    from kvcached.errors import SettingError

    try:
        if not elastic_is_asked_for():
            tell_misspelt_switches()
            return
    except SettingError as error:
        raise _refusal(error) from error
    try:
        from kvcached.engines.sglang.adapter import install

        install()
    except Exception as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> SystemExit:
    reason = str(error) or type(error).__name__
    return SystemExit(f"kvcached: this engine was asked to be elastic and cannot be: {reason}")
