# SPDX-License-Identifier: Apache-2.0
"""All that this adapter touches in vLLM, as data: official doors, overridden methods, and attributes that it reads or sets.

`kvcached verify` looks each of them up in an installed release and says which one moved. Nothing outside this list is relied on, and
no function of vLLM is replaced: the doors take names of subclasses.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

FIRST: Final = (0, 24)
LAST: Final = (0, 33)


class Kind(Enum):
    DOOR = "door"  # vLLM asks for it: an entry point or a configuration field
    METHOD = "method"  # overridden in a subclass that calls the original
    CALL = "call"  # called, or the function whose one allocation is answered
    FIELD = "field"  # read or set


@dataclass(frozen=True, slots=True)
class Seam:
    """`target` is `module:Class.name` or `module:function`; `parameters` must be among the function's own; versions are inclusive."""

    target: str
    kind: Kind
    reason: str
    parameters: tuple[str, ...] = ()
    first: tuple[int, int] = FIRST
    last: tuple[int, int] = LAST


_POOL: Final = "vllm.v1.core.block_pool:BlockPool"
_MANAGER: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_GROUP: Final = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_WORKER: Final = "vllm.v1.worker.gpu_worker:Worker"
_PLATFORM: Final = "vllm.platforms.interface:Platform"
_INTERFACE: Final = "vllm.v1.kv_cache_interface"
_LAYER: Final = "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"
_RUNNER: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

SEAMS: Final[tuple[Seam, ...]] = (
    Seam(
        "vllm.plugins:load_general_plugins", Kind.DOOR, "the second door: an engine that is asked to be elastic and is not must not start"
    ),
    Seam("vllm.platforms:builtin_platform_plugins", Kind.DOOR, "which platform vLLM would use: ours subclasses it"),
    Seam("vllm.platforms:resolve_current_platform_cls_qualname", Kind.DOOR, "asks the entry points for a platform class"),
    Seam("vllm.config.parallel:ParallelConfig.worker_cls", Kind.DOOR, "name of the worker class"),
    Seam("vllm.config.scheduler:SchedulerConfig.scheduler_cls", Kind.DOOR, "name of the scheduler class"),
    Seam("vllm.config.scheduler:SchedulerConfig.async_scheduling", Kind.FIELD, "which scheduler class is the default"),
    Seam(
        "vllm.config.cache:CacheConfig.kv_cache_memory_bytes",
        Kind.FIELD,
        "a size that is set skips guards on the whole device's free memory",
    ),
    Seam("vllm.config.vllm:VllmConfig.instance_id", Kind.FIELD, "the name under which scheduler and worker find each other"),
    Seam(f"{_PLATFORM}.check_and_update_config", Kind.METHOD, "names worker and scheduler classes", ("vllm_config",)),
    Seam(f"{_PLATFORM}.validate_request", Kind.METHOD, "a prompt that can never fit is turned away with a sentence", ("processed_inputs",)),
    Seam(f"{_WORKER}.init_device", Kind.METHOD, "the start guard must ask for what this engine needs, not for a share of the card"),
    Seam(f"{_WORKER}.determine_available_memory", Kind.METHOD, "capacity is the address range, not the memory that is free now"),
    Seam(f"{_WORKER}.initialize_from_config", Kind.METHOD, "strides are set and the one allocation is answered", ("kv_cache_config",)),
    Seam(f"{_WORKER}.execute_model", Kind.METHOD, "knows when a step has been queued on the device", ("scheduler_output",)),
    Seam(f"{_WORKER}.sample_tokens", Kind.METHOD, "the rest of a step", ("grammar_output",)),
    Seam(f"{_WORKER}.execute_dummy_batch", Kind.METHOD, "a step without requests must not run when the memory is going"),
    Seam("vllm.v1.worker.worker_base:WorkerBase.rank", Kind.FIELD, "which mapper this worker is"),
    Seam("vllm.v1.worker.worker_base:WorkerBase.local_rank", Kind.FIELD, "which card of a list is this worker's"),
    Seam(f"{_RUNNER}.profile_run", Kind.CALL, "makes the buffers between pipeline stages on a CPU"),
    Seam("vllm.distributed.parallel_state:get_world_group", Kind.CALL, "the workers agree once on how blocks lie on pages"),
    Seam("vllm.distributed.parallel_state:GroupCoordinator.cpu_group", Kind.FIELD, "the group that they do it over"),
    Seam("vllm.config.parallel:ParallelConfig.world_size", Kind.FIELD, "how many workers an engine core has"),
    Seam("vllm.config.parallel:ParallelConfig.data_parallel_size", Kind.FIELD, "how many engine cores there are"),
    Seam("vllm.config.parallel:ParallelConfig.data_parallel_index", Kind.FIELD, "which of them this is"),
    Seam(
        "vllm.v1.worker.worker_base:WorkerBase.shutdown", Kind.METHOD, "gives the memory back when an engine ends inside a living process"
    ),
    Seam(
        f"{_RUNNER}._allocate_kv_cache_tensors", Kind.CALL, "makes the KV memory by torch.zeros of int8", ("kv_cache_config",), last=(0, 28)
    ),
    Seam(
        "vllm.v1.worker.utils:allocate_kv_cache",
        Kind.CALL,
        "makes the KV memory by one torch.zeros of int8",
        ("kv_cache_config", "device"),
        first=(0, 29),
    ),
    Seam(f"{_INTERFACE}:KVCacheTensor.size", Kind.FIELD, "bytes of the backing allocation"),
    Seam(f"{_INTERFACE}:KVCacheTensor.offset", Kind.FIELD, "where a layer begins"),
    Seam(f"{_INTERFACE}:KVCacheTensor.block_stride", Kind.FIELD, "distance of blocks"),
    Seam(f"{_INTERFACE}:KVCacheTensor.shared_by", Kind.FIELD, "layers of a tensor", last=(0, 28)),
    Seam(f"{_INTERFACE}:KVCacheTensor.layers", Kind.FIELD, "layers of a tensor", first=(0, 29)),
    Seam(f"{_INTERFACE}:KVCacheTensor.layer_stride", Kind.FIELD, "distance of layers", first=(0, 29)),
    Seam(f"{_INTERFACE}:KVCacheSpec.page_size_bytes", Kind.FIELD, "bytes of one block in one layer"),
    Seam("vllm.config.vllm:get_layers_from_vllm_config", Kind.CALL, "the layers of a model"),
    Seam(f"{_LAYER}.get_attn_backend", Kind.CALL, "how a layer's kernels take blocks"),
    Seam(
        "vllm.v1.attention.backend:AttentionBackend.get_supported_kernel_block_sizes",
        Kind.CALL,
        "blocks that are split for the kernels cannot be interleaved",
    ),
    Seam(f"{_SCHEDULER}.__init__", Kind.METHOD, "the finished block pool becomes elastic", ("vllm_config", "kv_cache_config")),
    Seam(f"{_SCHEDULER}.schedule", Kind.METHOD, "numbers the steps; holds the pool's lock"),
    Seam(
        f"{_SCHEDULER}.update_from_output",
        Kind.METHOD,
        "a step has finished; ends hopeless requests",
        ("scheduler_output", "model_runner_output"),
    ),
    Seam(f"{_SCHEDULER}.finish_requests", Kind.METHOD, "frees blocks: holds the pool's lock", ("request_ids", "finished_status")),
    Seam(f"{_SCHEDULER}.add_request", Kind.METHOD, "may free blocks of a streaming session: holds the pool's lock", ("request",)),
    Seam(f"{_SCHEDULER}.reset_prefix_cache", Kind.METHOD, "frees cached blocks: holds the pool's lock"),
    Seam(f"{_SCHEDULER}.set_pause_state", Kind.METHOD, "sleep gives all memory back", ("pause_state",)),
    Seam(f"{_SCHEDULER}.shutdown", Kind.METHOD, "closes the pool"),
    Seam(f"{_SCHEDULER}.kv_cache_manager", Kind.FIELD, "set by __init__"),
    Seam(
        f"{_MANAGER}.allocate_slots",
        Kind.METHOD,
        "a miss grows the pool and asks again",
        ("request", "num_new_tokens", "full_sequence_must_fit"),
    ),
    Seam(f"{_GROUP}.req_to_blocks", Kind.FIELD, "blocks that a request holds"),
    Seam(f"{_GROUP}.block_size", Kind.FIELD, "tokens of a block in a group"),
    Seam(f"{_MANAGER}.watermark_blocks", Kind.FIELD, "a share of what the pool may hold, not of its address range"),
    Seam(f"{_POOL}.get_new_blocks", Kind.METHOD, "the pool chooses the ids", ("num_blocks",)),
    Seam(f"{_POOL}.free_blocks", Kind.METHOD, "reports what became free or cached", ("ordered_blocks",)),
    Seam(f"{_POOL}.touch", Kind.METHOD, "reports cached blocks that are in use again", ("blocks",)),
    Seam(
        f"{_POOL}._maybe_evict_cached_block", Kind.METHOD, "reports a cached block whose hash is dropped; drops it for victims", ("block",)
    ),
    Seam(f"{_POOL}.reset_prefix_cache", Kind.METHOD, "counts logically; reports what was dropped"),
    Seam(f"{_POOL}.get_num_free_blocks", Kind.METHOD, "blocks that can be handed out on mapped pages"),
    Seam(f"{_POOL}.get_usage", Kind.METHOD, "a share of what the pool may hold"),
    Seam("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove", Kind.CALL, "takes a chosen id out of the queue", ("block",)),
    Seam(
        "vllm.v1.engine:EngineCoreOutput",
        Kind.CALL,
        "tells a client that its request ended with an error",
        ("request_id", "new_token_ids", "finish_reason"),
    ),
    Seam("vllm.v1.core.sched.output:SchedulerOutput.preempted_req_ids", Kind.FIELD, "requests that were put back for lack of blocks"),
    Seam("vllm.exceptions:VLLMValidationError", Kind.CALL, "its text reaches the client, with HTTP status 400"),
    Seam("vllm.v1.request:RequestStatus.FINISHED_ERROR", Kind.FIELD, "the status of a request that can never be served"),
)


def seams_of(version: tuple[int, int]) -> list[Seam]:
    """What is touched in this release; beyond the supported range, in the nearest one within."""
    nearest = max(FIRST, min(version, LAST))
    return [seam for seam in SEAMS if seam.first <= nearest <= seam.last]
