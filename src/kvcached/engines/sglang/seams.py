# SPDX-License-Identifier: Apache-2.0
"""All that this adapter touches in SGLang, as data: functions that it wraps, and what it reads, calls or sets besides.

A wrapped function is replaced where it is defined, in the process of a scheduler, and calls the original but where its reason says
otherwise. Nothing outside this list is relied on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

Version = tuple[int, int, int]
FIRST: Final[Version] = (0, 5, 11)
LAST: Final[Version] = (0, 5, 23)


class Kind(Enum):
    DOOR = "door"  # SGLang asks for it
    WRAP = "wrap"  # a function around which ours is put
    PROPERTY = "property"  # a property whose getter is wrapped
    CLASS = "class"  # a finished instance gets our subclass
    CALL = "call"
    FIELD = "field"  # read or set
    ATTRIBUTE = "attribute"  # set on an instance by its constructor or later, so not to be found before there is one


@dataclass(frozen=True, slots=True)
class Seam:
    """`target` is `module:Class.name` below `sglang.srt`; `parameters` must be among the function's own; versions are inclusive.

    `hook` names the method of `Adapter` that is put around the target; empty where nothing is.
    """

    target: str
    kind: Kind
    reason: str
    hook: str = ""
    parameters: tuple[str, ...] = ()
    first: Version = FIRST
    last: Version = LAST


_POOLS: Final = "mem_cache.memory_pool"
_CONFIGURATOR: Final = "mem_cache.kv_cache_configurator:KVCacheConfigurator"
_MIXIN: Final = "model_executor.model_runner_kv_cache_mixin:ModelRunnerKVCacheMixin"
_SCHEDULER: Final = "managers.scheduler:Scheduler"
_ALLOCATOR: Final = "mem_cache.allocator"
_ADDER: Final = "managers.schedule_policy:PrefillAdder"

SEAMS: Final[tuple[Seam, ...]] = (
    Seam("plugins:load_plugins", Kind.DOOR, "calls the entry points of the group sglang.srt.plugins in every process"),
    Seam(
        f"{_POOLS}:MHATokenToKVPool._create_buffers_normal",
        Kind.WRAP,
        "K and V buffers are views over an arena; the original is not called",
        "create_mha_buffers",
        first=(0, 5, 16),
    ),
    Seam(
        f"{_POOLS}:MHATokenToKVPool._create_buffers",
        Kind.WRAP,
        "K and V buffers are views over an arena; the original's other work is done with them",
        "create_mha_buffers_and_rest",
        last=(0, 5, 15),
    ),
    Seam(
        f"{_POOLS}:MLATokenToKVPool._create_buffers",
        Kind.WRAP,
        "latent buffers are views over an arena; the original is not called",
        "create_mla_buffers",
    ),
    Seam(
        f"{_POOLS}:MambaPool.__init__",
        Kind.WRAP,
        "states of linear attention are views over an arena; the original makes them",
        "create_states",
        ("size", "cache_params", "mamba_layer_ids"),
        first=(0, 5, 17),
    ),
    Seam(
        f"{_CONFIGURATOR}._handle_max_mamba_cache",
        Kind.CALL,
        "how many states there are, and what is left for tokens",
        parameters=("total_rest_memory",),
        first=(0, 5, 17),
    ),
    Seam(
        "mem_cache.allocator.mamba:MambaSlotAllocator._do_alloc",
        Kind.CLASS,
        "the pool chooses the states",
        parameters=("need_size",),
        first=(0, 5, 17),
    ),
    Seam("mem_cache.allocator.mamba:MambaSlotAllocator.free", Kind.CLASS, "states go back", parameters=("free_index",), first=(0, 5, 17)),
    Seam(
        f"{_CONFIGURATOR}._profile_available_bytes",
        Kind.WRAP,
        "capacity is the address range, not the memory that is free now; the original is not called",
        "virtual_bytes",
        ("pre_model_load_memory",),
        first=(0, 5, 16),
    ),
    Seam(
        f"{_MIXIN}._profile_available_bytes",
        Kind.WRAP,
        "capacity is the address range, not the memory that is free now; the original is not called",
        "virtual_bytes",
        ("pre_model_load_memory",),
        last=(0, 5, 15),
    ),
    Seam(
        f"{_CONFIGURATOR}.configure",
        Kind.WRAP,
        "the finished allocator becomes elastic",
        "adopt_configured",
        ("pre_model_load_memory",),
        first=(0, 5, 16),
    ),
    Seam(
        f"{_MIXIN}.init_memory_pool",
        Kind.WRAP,
        "the finished allocator becomes elastic",
        "adopt_runner",
        ("pre_model_load_memory",),
        last=(0, 5, 15),
    ),
    Seam(f"{_SCHEDULER}.__init__", Kind.WRAP, "refuses what cannot be elastic; checks the finished engine", "start", ("server_args",)),
    Seam(f"{_SCHEDULER}.run_event_loop", Kind.WRAP, "says which rank has ended, where one has", "run"),
    Seam(
        f"{_SCHEDULER}.process_input_requests",
        Kind.WRAP,
        "bounds prompts, may free slots: holds the pool's lock",
        "receive",
        ("recv_reqs",),
    ),
    Seam(f"{_SCHEDULER}.get_next_batch_to_run", Kind.WRAP, "admits, allocates, retracts: numbers the steps; holds the lock", "schedule"),
    Seam("managers.schedule_batch:ScheduleBatch.retract_decode", Kind.WRAP, "counts the requests that are put back", "retract"),
    Seam(f"{_SCHEDULER}.process_batch_result", Kind.WRAP, "a step has finished; frees slots", "finish_step", ("batch", "result")),
    Seam(f"{_SCHEDULER}.on_idle", Kind.WRAP, "checks the counts: holds the pool's lock", "idle", first=(0, 5, 13)),
    Seam(
        "managers.scheduler_runtime_checker_mixin:SchedulerRuntimeCheckerMixin.on_idle",
        Kind.WRAP,
        "checks the counts: holds the pool's lock",
        "idle",
        last=(0, 5, 12),
    ),
    Seam(f"{_SCHEDULER}.maybe_sleep_on_idle", Kind.WRAP, "sleeps inside on_idle: lets go of the pool's lock", "sleep"),
    Seam(f"{_SCHEDULER}.flush_cache", Kind.WRAP, "gives back all but the padding page", "flush"),
    Seam(f"{_SCHEDULER}.is_fully_idle", Kind.CALL, "whether a flush will be done"),
    Seam(f"{_SCHEDULER}.init_req_max_new_tokens", Kind.WRAP, "a prompt that can never fit is turned away", "require_room", ("req",)),
    Seam(
        "managers.scheduler_components.invariant_checker:SchedulerInvariantChecker.self_check_during_busy",
        Kind.WRAP,
        "compares counts: holds the pool's lock",
        "checked",
        first=(0, 5, 13),
    ),
    Seam(
        "managers.scheduler_runtime_checker_mixin:SchedulerRuntimeCheckerMixin.self_check_during_busy",
        Kind.WRAP,
        "compares counts: holds the pool's lock",
        "checked",
        last=(0, 5, 12),
    ),
    Seam(
        "mem_cache.prefill_budget:PrefillBudget.check_prefill",
        Kind.CLASS,
        "admission: subclassed, made by the allocator",
        parameters=("extend_input_len", "chunk_limit"),
        first=(0, 5, 21),
    ),
    Seam(f"{_ADDER}.rem_total_tokens", Kind.PROPERTY, "admission: less what has no memory", "remaining_tokens", last=(0, 5, 20)),
    Seam(f"{_ADDER}.cur_rem_tokens", Kind.PROPERTY, "admission: less what has no memory", "remaining_tokens", last=(0, 5, 20)),
    Seam(
        f"{_ADDER}.rem_swa_tokens",
        Kind.PROPERTY,
        "admission: less what has no memory, of sliding windows",
        "remaining_window_tokens",
        last=(0, 5, 20),
    ),
    Seam(f"{_ADDER}.add_one_req", Kind.WRAP, "admission: with memory behind it", "admit", ("req",)),
    Seam(f"{_ADDER}._lock_node", Kind.CALL, "keeps a prefix that a request found", parameters=("last_node",)),
    Seam(f"{_ADDER}.add_chunked_req", Kind.WRAP, "admission: with memory behind it", "admit_chunk", ("req",), last=(0, 5, 20)),
    Seam(
        "managers.schedule_batch:ScheduleBatch.check_decode_mem",
        Kind.WRAP,
        "decoding: with memory behind it",
        "check_decode",
        ("selected_indices",),
        last=(0, 5, 18),
    ),
    Seam(
        f"{_ALLOCATOR}:BaseTokenToKVPoolAllocator.check_decode_capacity",
        Kind.CLASS,
        "decoding: with memory behind it",
        parameters=("num_tokens",),
        first=(0, 5, 19),
    ),
    Seam(f"{_ALLOCATOR}:TokenToKVPoolAllocator.alloc", Kind.CLASS, "the pool chooses the slots", parameters=("need_size",)),
    Seam(f"{_ALLOCATOR}:TokenToKVPoolAllocator.free", Kind.CLASS, "slots go back to the pool", parameters=("free_index",)),
    Seam(f"{_ALLOCATOR}:PagedTokenToKVPoolAllocator.alloc", Kind.CLASS, "the pool chooses the pages", parameters=("need_size",)),
    Seam(f"{_ALLOCATOR}:PagedTokenToKVPoolAllocator.free", Kind.CLASS, "pages go back to the pool", parameters=("free_index",)),
    Seam(
        f"{_ALLOCATOR}:PagedTokenToKVPoolAllocator.alloc_extend",
        Kind.CLASS,
        "the kernel spreads slots over pages that the pool chose",
        parameters=("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc", "extend_num_tokens"),
    ),
    Seam(
        f"{_ALLOCATOR}:PagedTokenToKVPoolAllocator.alloc_decode",
        Kind.CLASS,
        "the kernel spreads slots over pages that the pool chose",
        parameters=("seq_lens", "seq_lens_cpu", "last_loc"),
    ),
    Seam(
        "utils:get_num_new_pages",
        Kind.CALL,
        "pages that an allocation needs",
        parameters=("seq_lens", "page_size", "prefix_lens", "decode"),
    ),
    Seam("mem_cache.base_prefix_cache:EvictParams.num_tokens", Kind.FIELD, "how much to evict from the tree"),
    Seam(f"{_SCHEDULER}.token_to_kv_pool_allocator", Kind.ATTRIBUTE, "must be elastic when the scheduler is complete"),
    Seam(f"{_SCHEDULER}.tree_cache", Kind.ATTRIBUTE, "gives up what no request holds"),
    Seam(f"{_SCHEDULER}.req_to_token_pool", Kind.ATTRIBUTE, "the states of a hybrid model: its mamba_pool and mamba_allocator"),
    Seam(f"{_CONFIGURATOR}.hybrid_gdn_config", Kind.ATTRIBUTE, "whether all states are those of gated delta rules", first=(0, 5, 17)),
    Seam("mem_cache.base_prefix_cache:EvictParams.mamba_num", Kind.FIELD, "how many states to evict", first=(0, 5, 17)),
    Seam(f"{_SCHEDULER}.waiting_queue", Kind.ATTRIBUTE, "requests that can never be served leave it"),
    Seam(f"{_SCHEDULER}.running_batch", Kind.ATTRIBUTE, "is not full when nothing runs"),
    Seam("managers.schedule_batch:ScheduleBatch.batch_is_full", Kind.FIELD, "set when a request got no memory; keeps all others out"),
    Seam("managers.schedule_batch:ScheduleBatch.is_empty", Kind.CALL, "whether anything runs"),
    Seam(f"{_SCHEDULER}.last_batch", Kind.ATTRIBUTE, "whether a step is under way"),
    Seam(f"{_SCHEDULER}.chunked_req", Kind.ATTRIBUTE, "a prefill that can never go on is aborted, by hand where nothing marks it for that"),
    Seam(f"{_SCHEDULER}._pending_chunked_abort_req", Kind.ATTRIBUTE, "marks a prefill that is to be aborted; not in all releases"),
    Seam("managers.schedule_batch:Req.discard_output_reason", Kind.ATTRIBUTE, "what its client is told; not in all releases"),
    Seam("managers.schedule_batch:FINISH_ABORT", Kind.CALL, "what its client is told", parameters=("message", "status_code")),
    Seam("mem_cache.common:release_kv_cache", Kind.CALL, "releases a prefill that nothing marks", parameters=("req", "tree_cache")),
    Seam(f"{_SCHEDULER}.is_mixed_chunk", Kind.ATTRIBUTE, "whether a prefill brings the decoding requests along"),
    Seam(f"{_SCHEDULER}.sliding_window_size", Kind.ATTRIBUTE, "what a pool of windows has to hold of a request"),
    Seam(f"{_SCHEDULER}.idle_sleeper", Kind.ATTRIBUTE, "whether an idle scheduler sleeps inside on_idle"),
    Seam(f"{_SCHEDULER}.chunked_prefill_size", Kind.ATTRIBUTE, "what one batch takes at most"),
    Seam("distributed.parallel_state:get_world_group", Kind.CALL, "the ranks of the engine, and their CPU group"),
    Seam("distributed.parallel_state:get_pp_group", Kind.CALL, "which stage of a pipeline this is"),
    Seam("distributed.parallel_state:get_tp_group", Kind.CALL, "which rank of its stage this is"),
    Seam("managers.scheduler_pp_mixin:SchedulerPPMixin.event_loop_pp", Kind.CALL, "sends requests on before it schedules"),
    Seam(f"{_SCHEDULER}.mbs", Kind.ATTRIBUTE, "of a pipeline: the batches whose steps may be under way"),
    Seam(f"{_SCHEDULER}.forward_stream", Kind.ATTRIBUTE, "pages are unmapped behind it"),
    Seam(f"{_SCHEDULER}.schedule_stream", Kind.ATTRIBUTE, "pages are unmapped behind it; ids are copied on it"),
    Seam(f"{_POOLS}:MHATokenToKVPool.k_buffer", Kind.ATTRIBUTE, "set to views over the arena, and v_buffer"),
    Seam(f"{_POOLS}:MLATokenToKVPool.kv_buffer", Kind.ATTRIBUTE, "set to views over the arena"),
)


def seams_of(version: Version) -> list[Seam]:
    """What is touched in this release; beyond the supported range, in the nearest one within."""
    nearest = max(FIRST, min(version, LAST))
    return [seam for seam in SEAMS if seam.first <= nearest <= seam.last]
