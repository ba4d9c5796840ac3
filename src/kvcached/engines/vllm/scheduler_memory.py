# SPDX-License-Identifier: Apache-2.0
"""The memory of one scheduler: the owner of the pool, and what the scheduler's methods report to it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvcached.core.canary import GUARD_BYTES
from kvcached.engines.vllm.block_pool import ElasticBlockPool
from kvcached.engines.vllm.cache_manager import ElasticKVCacheManager
from kvcached.engines.vllm.chain import is_ours
from kvcached.engines.vllm.demand import Demand
from kvcached.engines.vllm.greeting import greeting
from kvcached.engines.vllm.identity import Identity
from kvcached.engines.vllm.rests import Rests
from kvcached.engines.vllm.steps import Steps
from kvcached.errors import EngineNotSupported
from kvcached.ranks.group import RankGroup
from kvcached.runtime.canary import WatcherAfar
from kvcached.runtime.cards import rank_socket
from kvcached.runtime.owner import Owner
from kvcached.units import format_size

if TYPE_CHECKING:
    from kvcached.config import Settings
    from kvcached.core.canary import Note
    from kvcached.ranks.api import MapperPort
    from kvcached.ranks.facts import MapperFacts
    from kvcached.ranks.operations import Op
    from kvcached.runtime.operations import PoolOperations

_log = logging.getLogger("kvcached.vllm")


class SchedulerMemory:
    """Made when the stock scheduler is complete. Raises `EngineNotSupported`, `PeerError` when the worker is not elastic."""

    def __init__(self, settings: Settings, scheduler: Any) -> None:
        config = scheduler.vllm_config
        self._worker = config.parallel_config.worker_cls
        if not is_ours(self._worker, "kvcached.engines.vllm.worker"):
            raise EngineNotSupported(f"the scheduler is elastic and the worker, {self._worker}, is not: something replaced worker_cls")
        self._scheduler = type(scheduler).__name__
        self._watermark = float(getattr(config.scheduler_config, "watermark", 0.0))
        self.steps = Steps()
        self._paused = False
        self._rests = Rests()
        self._in_step_with_others = config.parallel_config.data_parallel_size > 1
        port, facts = _connect(settings, config)
        self._group = port if isinstance(port, RankGroup) else None
        self._watcher = WatcherAfar() if settings.canary else None
        self._owner = _start_owner(settings, scheduler, port, facts, self._watcher)
        self.pool = self._owner.pool
        with self.pool.lock:
            ElasticBlockPool.adopt(scheduler.kv_cache_manager.block_pool, self.pool, self.steps)
            self._manager = ElasticKVCacheManager.adopt(scheduler.kv_cache_manager, self.pool)
        self._owner.operations.longest_request_tokens = self._manager.longest_request_tokens
        self._owner.start()

    @property
    def operations(self) -> PoolOperations:
        """What `kvctl` can ask of this pool."""
        return self._owner.operations

    def describe(self) -> str:
        """One line for the log: what is in place."""
        geometry = self.pool.geometry
        worker = self._worker.rpartition(":")[2]
        return (
            f"on, worker Elastic{worker}, scheduler {self._scheduler}, layout {'interleaved' if geometry.planes == 1 else 'per layer'}, "
            f"page {format_size(geometry.page_bytes)}, release step {format_size(geometry.release_step_bytes)}, "
            f"range {format_size(geometry.range_bytes)}, limit {format_size(self.pool.limits.limit_bytes)}, instance {self._owner.instance}"
            f"{'' if self._watcher is None else f', canary: the last {GUARD_BYTES} bytes of each block are a stamp'}"
        )

    def require_working(self) -> None:
        """Raises `StateUnknown`, which names the worker, when the memory of one is lost: what came of its step is worth nothing."""
        if self.pool.failed is not None:
            raise self.pool.failed

    def begin_step(self) -> None:
        self.steps.begin()
        if self._watermark:
            self._manager.watermark_blocks = int(self._watermark * self.pool.max_blocks())

    def note_preemptions(self, scheduler_output: Any) -> None:
        self.pool.note_preemptions(len(scheduler_output.preempted_req_ids or ()))

    def rest_s(self, scheduler: Any, scheduler_output: Any) -> float:
        """How long to wait before the next look: requests lack memory, and only others can help, since none runs and no step is under way
        whose end would free pages. vLLM itself would look again a thousand times a second, on their cores. Replicas of one engine step
        together, and none makes the others rest.
        """
        idle = not scheduler_output.total_num_scheduled_tokens and not scheduler.running and not self.pool.counts().retired_pages
        return self._rests.next_s(only_waits=idle and self._manager.kvcached_growth.was_refused() and not self._in_step_with_others)

    def step_operations(self) -> tuple[Op, ...]:
        """What every worker has to map before the step that was just made. A worker in this process has mapped it already."""
        return () if self._group is None else self._group.step_ops()

    def step_notes(self) -> tuple[Note, ...]:
        """What the workers' canary is told with the step that was just made."""
        return () if self._watcher is None else self._watcher.notes()

    def finish_step(self, scheduler_output: Any) -> None:
        """The step's tokens are on the host: it has finished, and all before it."""
        self.pool.advance(self.steps.number_of(scheduler_output))

    def end_hopeless(self, scheduler: Any, outputs: Any) -> None:
        """End the requests that can never be served, each with an error that its client sees."""
        hopeless, self._manager.kvcached_hopeless = self._manager.kvcached_hopeless, {}
        for request_id, reason in hopeless.items():
            end_with_error(scheduler, outputs, request_id, reason)

    def note_pause(self, paused: bool) -> None:
        self._paused = paused

    def note_reset(self) -> None:
        """A reset of the cache while paused is how vLLM goes to sleep: what is empty leaves now."""
        if self._paused:
            self._owner.rest()

    def close(self) -> None:
        """Give everything back. A second call does nothing."""
        self._owner.close()


def end_with_error(scheduler: Any, outputs: Any, request_id: str, reason: str) -> None:
    """Finish one request with an error, and tell its client."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.request import RequestStatus

    request = scheduler.requests.get(request_id)
    if request is None or not scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR):
        return
    _log.error("request %s ended with an error: %s", request_id, reason)
    answer = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
    outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(answer)


def _start_owner(settings: Settings, scheduler: Any, port: MapperPort, facts: MapperFacts, watcher: WatcherAfar | None) -> Owner:
    config = scheduler.vllm_config
    identity = Identity.of(settings, config)
    length = config.model_config.max_model_len
    owner = Owner(
        settings,
        port,
        facts,
        instance=identity.instance,
        name=identity.name,
        block_tokens=scheduler.block_size,
        longest_request_blocks=Demand(scheduler.kv_cache_manager.coordinator.single_type_managers).held_at_most(length),
        watcher=watcher,
    )
    local = getattr(config, "kvcached_mapper", None)
    if local is not None:
        local.owner = owner
    return owner


def _connect(settings: Settings, config: Any) -> tuple[MapperPort, MapperFacts]:
    """The worker's mapper in this process, or those of all workers at their sockets."""
    identity = Identity.of(settings, config)
    local = getattr(config, "kvcached_mapper", None)
    if local is not None and local.mapper is not None:
        return local.mapper, local.mapper.facts
    ranks = range(int(config.parallel_config.world_size))
    group = RankGroup(
        [rank_socket(settings.run_dir, identity.instance, rank) for rank in ranks],
        greeting(identity.instance),
        timeout_s=settings.ipc_timeout_s,
        ahead_pages=settings.max_reserved_pages if settings.prealloc_enabled else 0,
    )
    group.begin_steps()
    return group, group.shared_facts
