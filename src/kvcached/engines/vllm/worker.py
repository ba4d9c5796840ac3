# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker over an arena. `kvcached.engines.vllm.worker.NAME` is this mixin over the worker class that NAME spells."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from kvcached.config import configure_logging, load_settings
from kvcached.engines.vllm.chain import class_over, is_ours
from kvcached.engines.vllm.forgotten import close_when_forgotten
from kvcached.engines.vllm.layouts import backends_of, choose_layout
from kvcached.engines.vllm.steps import Steps
from kvcached.engines.vllm.support import require_specs, warn_if_one_request_is_too_long
from kvcached.engines.vllm.worker_memory import WorkerMemory
from kvcached.errors import EngineNotSupported
from kvcached.units import ceil_div

if TYPE_CHECKING:
    from kvcached.engines.vllm.worker_memory import ZerosFromArena

    _Worker = Any
else:
    _Worker = object

_log = logging.getLogger("kvcached.vllm")


def __getattr__(name: str) -> Any:
    return class_over(ElasticWorker, name)


class ElasticWorker(_Worker):
    """Its KV tensors are addresses; memory comes behind them when the scheduler's pool asks for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _require_elastic_scheduler(self.vllm_config)
        self.kvcached_settings = load_settings()
        configure_logging(self.kvcached_settings)
        self.kvcached_memory: WorkerMemory | None = None
        self.kvcached_step = 0

    def init_device(self) -> None:
        cache = self.vllm_config.cache_config
        asked = cache.gpu_memory_utilization
        cache.gpu_memory_utilization = 0.0  # the guard asks for a share of the whole device to be free, whoever holds the rest
        try:
            super().init_device()
        finally:
            cache.gpu_memory_utilization = asked
        self.kvcached_memory = WorkerMemory(self.kvcached_settings, self.vllm_config, self.device, self.rank, self.local_rank)
        close_when_forgotten(self, self.kvcached_memory.close)

    def determine_available_memory(self) -> int:
        super().determine_available_memory()  # warms up and profiles; its answer is the size that the platform set
        if self.device.type == "cpu" and self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            self.model_runner.profile_run()  # makes the buffers between stages; with a size set, vLLM's CPU worker leaves it out
        self._memory.note_profiled()
        range_bytes: int = self._memory.virtual_bytes
        warn_if_one_request_is_too_long(self.vllm_config, self.get_kv_cache_spec(), range_bytes)
        return range_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        require_specs(kv_cache_config)
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.close)
            with self._place(kv_cache_config) as zeros:
                super().initialize_from_config(kv_cache_config)
            zeros.require_answered()
            undo.pop_all()

    def _place(self, kv_cache_config: Any) -> ZerosFromArena:
        choice = choose_layout(
            kv_cache_config,
            backends_of(self.vllm_config),
            dense_latents=self.device.type == "cpu" and self.vllm_config.model_config.use_mla,
            wanted=self.kvcached_settings.contiguous_layout,
        )
        if choice.because:
            _log.info("layout per layer: %s", choice.because)
        first_blocks = 1 if self.device.type == "cpu" else self._warm_up_blocks(kv_cache_config)
        return self._memory.place(kv_cache_config, choice, first_blocks=first_blocks)

    def _warm_up_blocks(self, kv_cache_config: Any) -> int:
        """Warm-up steps run on ids 1, 2, ... before there is a scheduler: a full batch of tokens, and a few more for every request."""
        scheduler = self.vllm_config.scheduler_config
        sizes = [int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups]
        return 1 + sum(ceil_div(int(scheduler.max_num_batched_tokens), size) + 2 * int(scheduler.max_num_seqs) + 2 for size in sizes)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with self._memory.occupancy:
            self._memory.apply(Steps.operations_of(scheduler_output), Steps.notes_of(scheduler_output))
            output = super().execute_model(scheduler_output, *args, **kwargs)
            self.kvcached_step = Steps.number_of(scheduler_output)
            if output is not None or self._ends_without_sampling:  # else the step goes on with sample_tokens
                self._memory.note_submitted(self.kvcached_step)
            return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with self._memory.occupancy:
            output = super().sample_tokens(*args, **kwargs)
            self._memory.note_submitted(self.kvcached_step)
            return output

    def execute_dummy_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._memory.occupancy:
            return super().execute_dummy_batch(*args, **kwargs)

    @property
    def _ends_without_sampling(self) -> bool:
        """Pooling models: no stage but the last returns anything, and none samples."""
        return bool(self.vllm_config.model_config.runner_type == "pooling")

    @property
    def _memory(self) -> WorkerMemory:
        if self.kvcached_memory is None:
            raise EngineNotSupported("vLLM asked for KV memory before it initialised the device")
        return self.kvcached_memory

    def shutdown(self) -> None:
        super().shutdown()
        if self.kvcached_memory is not None:
            self.kvcached_memory.close()


def _require_elastic_scheduler(vllm_config: Any) -> None:
    chosen = vllm_config.scheduler_config.scheduler_cls
    if not is_ours(chosen, "kvcached.engines.vllm.scheduler"):
        raise EngineNotSupported(
            f"the worker is elastic and the scheduler, {chosen}, is not: something replaced scheduler_cls after kvcached had set it"
        )
