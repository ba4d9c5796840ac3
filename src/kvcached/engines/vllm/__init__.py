# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter. vLLM calls the two functions below in each of its processes, by entry points; nothing else is needed.

Switched off, they do nothing: no part of vLLM or torch is loaded here.
"""

from __future__ import annotations

from kvcached.config import elastic_is_asked_for, tell_misspelt_switches
from kvcached.errors import EngineNotSupported


def platform_plugin() -> str | None:
    """vLLM's first door: the dotted name of the platform class to use, or None to leave vLLM as it is.

    vLLM takes an exception here for "not available" and goes on without us; `general_plugin` sees to it that it does not go far.
    """
    if not elastic_is_asked_for():
        return None
    from kvcached.engines.vllm.platform import platform_name

    return platform_name()


def general_plugin() -> None:
    """vLLM's second door. Raises `EngineNotSupported`, which ends the process, when elastic memory was asked for and is not in place."""
    if not elastic_is_asked_for():
        tell_misspelt_switches()
        return
    import vllm
    from vllm.platforms import current_platform

    from kvcached.engines.vllm.platform import ElasticPlatform
    from kvcached.engines.vllm.support import require_release

    require_release(vllm.__version__)
    if not isinstance(current_platform, ElasticPlatform):
        raise EngineNotSupported(
            f"ENABLE_KVCACHED is set, but vLLM chose the platform {type(current_platform).__name__}: its memory would not be elastic. "
            "VLLM_TARGET_DEVICE must not be set, and VLLM_PLUGINS, if set, must name kvcached"
        )
