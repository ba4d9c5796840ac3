# SPDX-License-Identifier: Apache-2.0
"""Which SGLang, and which of its features, can be elastic. Everything else is refused by name before the engine serves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvcached.engines.sglang.seams import FIRST, LAST, Version
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from kvcached.config import Settings

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_OFF: Final = "; unset ENABLE_KVCACHED to run without elastic memory"
_FIRST_WITH_REPLICAS: Final = (0, 5, 21)
# Argument of the server, the value that it may have, and what stands against others. An older release lacks some.
_ARGUMENTS: Final[tuple[tuple[str, object, str], ...]] = (
    ("disaggregation_mode", "null", "disaggregated prefill and decode register KV memory as a whole"),
    ("enable_unified_memory", False, "unified memory cuts all pools from one buffer of its own"),
    ("enable_hisparse", False, "HiSparse keeps reading slots that it has freed"),
    ("enable_memory_saver", False, "the memory saver pauses and resumes KV memory as a whole; elastic memory needs no saver"),
    ("enable_hierarchical_cache", False, "the hierarchical cache copies between layouts of its own"),
    ("enable_lmcache", False, "LMCache registers KV memory as a whole"),
    ("enable_flexkv", False, "FlexKV registers KV memory as a whole"),
    ("radix_cache_backend", None, "a prefix cache of another package evicts and copies in ways of its own"),
    ("enable_unified_cache_external_linker", False, "an external cache linker registers KV memory as a whole"),
    ("enable_kv_cache_sharding", False, "a KV cache that is sharded by pages has a layout of its own"),
    ("enable_pdmux", False, "PD multiplexing runs prefill and decode on streams of its own"),
    ("speculative_algorithm", None, "speculative decoding has a second KV pool on the same slots"),
    ("enable_linear_replayssm", False, "the rings of a replayed state are not in the pool of states"),
    ("enable_linear_replayssm_spec", False, "the rings of a replayed state are not in the pool of states"),
    ("nnodes", 1, "the ranks of an engine must be on one machine"),
    ("attn_cp_size", 1, "context parallel ranks hold different parts of a request"),
    ("dcp_size", 1, "context parallel ranks hold different parts of a request"),
    ("elastic_ep_backend", None, "ranks that come and go cannot agree on memory"),
)


def release_of(version: str) -> Version:
    """The first three numbers of a version such as `0.5.23.post1`. Raises `EngineNotSupported` for text that is no version."""
    match = _VERSION.match(version)
    if match is None:
        raise EngineNotSupported(f"SGLang says that its version is {version!r}, which is no release{_OFF}")
    return int(match[1]), int(match[2]), int(match[3])


def require_release(version: str) -> Version:
    """Raises `EngineNotSupported` for a release outside the range that this adapter was made for."""
    release = release_of(version)
    if not FIRST <= release <= LAST:
        first, last = (".".join(map(str, edge)) for edge in (FIRST, LAST))
        raise EngineNotSupported(f"SGLang {version} is not supported: this release of kvcached-elastic knows {first} to {last}{_OFF}")
    return release


def require_features(server_args: Any, version: Version) -> None:
    """Raises `EngineNotSupported` when the engine was asked for something that cannot be elastic, saying what."""
    for name, allowed, reason in _ARGUMENTS:
        value = getattr(server_args, name, allowed)
        if value != allowed and value is not None:
            raise _not_elastic(f"{name}={value}", reason)
    if getattr(server_args, "dp_size", 1) > 1 and not _counts_attention(server_args):
        raise _not_elastic(f"dp_size={server_args.dp_size}", "data parallel schedulers share a name")
    if attention_replicas(server_args) > 1 and version < _FIRST_WITH_REPLICAS:
        first = ".".join(map(str, _FIRST_WITH_REPLICAS))
        raise _not_elastic("data parallel attention", f"it was tried with SGLang {first} and newer")
    if attention_replicas(server_args) > 1 and getattr(server_args, "pp_size", 1) > 1:
        raise _not_elastic(f"pp_size={server_args.pp_size} with data parallel attention", "it was not tried")


def _not_elastic(asked: str, reason: str) -> EngineNotSupported:
    return EngineNotSupported(f"{asked} cannot be elastic in this release: {reason}{_OFF}")


def _counts_attention(server_args: Any) -> bool:
    """Whether `dp_size` is the number of replicas of attention: in what older releases were asked, and newer ones still take."""
    return bool(getattr(server_args, "enable_dp_attention", False)) and getattr(server_args, "attn_dp_size", 1) == 1


def attention_replicas(server_args: Any) -> int:
    """Among how many groups of ranks, each with a scheduler and a KV cache of its own, the requests are divided within one engine."""
    return int(server_args.dp_size if _counts_attention(server_args) else getattr(server_args, "attn_dp_size", 1))


def require_settings(settings: Settings) -> None:
    """Raises `EngineNotSupported` for a setting that has no meaning here."""
    if settings.canary:
        raise EngineNotSupported(
            "KVCACHED_CANARY is for vLLM and for pools of a program: on SGLang no stamps are written; unset KVCACHED_CANARY"
        )


def require_pool(kv_pool: Any) -> None:
    """Raises `EngineNotSupported` for a pool whose memory does not come from the functions that are wrapped."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    kind = type(kv_pool)
    if kind not in (MHATokenToKVPool, MLATokenToKVPool):
        raise EngineNotSupported(f"SGLang's {kind.__name__} cannot be elastic in this release{_OFF}")
    layout = getattr(kv_pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise EngineNotSupported(f"the KV layout {layout} cannot be elastic in this release{_OFF}")
    if getattr(kv_pool, "enable_custom_mem_pool", False):
        raise EngineNotSupported(f"a custom memory pool for KV memory cannot be elastic{_OFF}")


def require_states(configurator: Any, req_to_token_pool: Any) -> None:
    """Raises `EngineNotSupported` for a hybrid model whose states are kept in a way that is not known to work at a distance from slot to
    slot."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

    pools = (type(req_to_token_pool), type(req_to_token_pool.mamba_pool))
    if pools != (HybridReqToTokenPool, MambaPool):
        raise EngineNotSupported(f"SGLang's {pools[0].__name__} with {pools[1].__name__} cannot be elastic in this release{_OFF}")
    if str(configurator.device) != "cpu":
        raise EngineNotSupported(f"hybrid models can be elastic on a CPU only in this release: their kernels for GPUs were not tried{_OFF}")
    if getattr(configurator, "hybrid_gdn_config", None) is None:
        raise EngineNotSupported(f"of hybrid models only those with gated delta rules (Qwen3-Next) can be elastic in this release{_OFF}")
    if getattr(req_to_token_pool, "mamba_ckpt_pool", None) is not None:
        raise EngineNotSupported(f"a pool of states in 8 bits beside the others cannot be elastic{_OFF}")
    if getattr(req_to_token_pool.mamba_pool, "_slot_siblings", ()):
        raise EngineNotSupported(f"states beside those of linear attention cannot be elastic in this release{_OFF}")
