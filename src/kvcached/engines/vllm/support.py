# SPDX-License-Identifier: Apache-2.0
"""Which vLLM, and which of its features, can be elastic. Everything else is refused by name before the engine starts."""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from kvcached.engines.vllm.seams import FIRST, LAST
from kvcached.errors import EngineNotSupported
from kvcached.units import format_size

_log = logging.getLogger("kvcached.vllm")
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
_OFF: Final = "; unset ENABLE_KVCACHED to run without elastic memory"


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as `0.32.0+cpu`. Raises `EngineNotSupported` for text that is no version."""
    match = _VERSION.match(version)
    if match is None:
        raise EngineNotSupported(f"vLLM says that its version is {version!r}, which is no release{_OFF}")
    return int(match[1]), int(match[2])


def require_release(version: str) -> None:
    """Raises `EngineNotSupported` for a release outside the range that this adapter was made for."""
    if not FIRST <= release_of(version) <= LAST:
        raise EngineNotSupported(
            f"vLLM {version} is not supported: this release of kvcached-elastic knows {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}; "
            f"`kvcached verify` tells what moved{_OFF}"
        )


def require_features(vllm_config: Any) -> None:
    """Raises `EngineNotSupported` when the configuration asks for something that cannot be elastic, saying what."""
    for reason in _refusals(vllm_config):
        raise EngineNotSupported(f"{reason}{_OFF}")


def _refusals(vllm_config: Any) -> list[str]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    found = []
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            found.append(f"{name} {getattr(parallel, name)} captures and warms up on blocks that are not allocated and cannot be elastic")
    if parallel.world_size > 1 and getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        found.append("external_launcher runs a scheduler beside each worker, whose memory would differ, and cannot be elastic")
    if getattr(parallel, "enable_elastic_ep", False):
        found.append(
            "elastic expert parallelism (enable_elastic_ep) changes the workers of a running engine and cannot be elastic in memory"
        )
    if getattr(parallel, "enable_dbo", False):
        found.append("dual batch overlap (enable_dbo) runs on streams that an unmap does not wait for and cannot be elastic")
    if vllm_config.kv_transfer_config is not None:
        found.append(f"the KV connector {vllm_config.kv_transfer_config.kv_connector} registers KV memory as a whole and cannot be elastic")
    if getattr(cache, "kv_offloading_size", None):
        found.append("KV offloading (kv_offloading_size) registers KV memory as a whole and cannot be elastic")
    if getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        found.append("HiSparse keeps reading blocks that it has freed and cannot be elastic")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and str(cache.cache_dtype).startswith("fp8"):
        found.append("sleep mode with an fp8 KV cache clears the whole range on wake-up and cannot be elastic")
    return found


def warn_if_one_request_is_too_long(vllm_config: Any, specs: dict[str, Any], room_bytes: int) -> None:
    """vLLM refuses a start without room for one longest request, and names settings that size nothing here: say first which do.

    `specs`: of this worker's layers. For layers that share blocks vLLM may need less than their sum, so the refusal is left to it.
    """
    needed_bytes = sum(int(spec.max_memory_usage_bytes(vllm_config)) for spec in specs.values())
    if needed_bytes > room_bytes:
        _log.warning(
            "one request of %d tokens may need %s of KV memory and all of it may hold %s: raise KVCACHED_BUDGET (KVCACHED_VIRTUAL if it is "
            "set; KVCACHED_HOST_CAPACITY on a CPU) or lower --max-model-len; gpu_memory_utilization does not size the KV cache here",
            vllm_config.model_config.max_model_len,
            format_size(needed_bytes),
            format_size(room_bytes),
        )


def require_specs(kv_cache_config: Any) -> None:
    """Raises `EngineNotSupported` for a kind of cache whose blocks do not come from the block pool's own calls."""
    for group in kv_cache_config.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__
        if kind.startswith(("SinkFullAttention", "HiSparse")):
            raise EngineNotSupported(f"a KV cache of kind {kind} cannot be elastic{_OFF}")
