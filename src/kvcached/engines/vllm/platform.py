# SPDX-License-Identifier: Apache-2.0
"""vLLM's platform, which names the elastic worker and scheduler. `...platform.NAME` is this mixin over the platform that NAME spells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvcached.config import check_public_package, load_settings
from kvcached.engines.vllm.chain import class_over, is_ours, name_over
from kvcached.engines.vllm.identity import instances_of, note_cores
from kvcached.engines.vllm.prompt_check import PromptCheck
from kvcached.engines.vllm.support import require_features, require_release
from kvcached.units import MIB

if TYPE_CHECKING:
    _Platform = Any
else:
    _Platform = object

_HERE: Final = __name__
_WORKER: Final = "kvcached.engines.vllm.worker"
_SCHEDULER: Final = "kvcached.engines.vllm.scheduler"
# With a size set, vLLM derives none from the memory that is free on the whole device. The worker tells the true one, the range.
_ANY_SIZE_BYTES: Final = MIB
_STOCK_SCHEDULERS: Final = {False: "vllm.v1.core.sched.scheduler.Scheduler", True: "vllm.v1.core.sched.async_scheduler.AsyncScheduler"}


def __getattr__(name: str) -> Any:
    return class_over(ElasticPlatform, name)


def platform_name() -> str | None:
    """The dotted name of our platform over the one that vLLM would use; None where vLLM itself finds none."""
    from vllm.platforms import builtin_platform_plugins

    stock = next(filter(None, (plugin() for plugin in builtin_platform_plugins.values())), None)
    return None if stock is None else name_over(_HERE, stock)


class ElasticPlatform(_Platform):
    """Nothing differs from the stock platform but the classes that it names, and that it turns away what can never fit."""

    kvcached_prompt_check: ClassVar[PromptCheck | None] = None  # of the engine that this process configured last

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        if vllm_config.model_config is not None:
            make_elastic(vllm_config)
            settings = load_settings()
            cls.kvcached_prompt_check = PromptCheck(settings.run_dir, instances_of(settings, vllm_config))

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """In the front end, whose validation errors reach the client as they are."""
        super().validate_request(processed_inputs, params)
        if cls.kvcached_prompt_check is None:
            return
        from vllm.exceptions import VLLMValidationError

        try:
            cls.kvcached_prompt_check.require_room(processed_inputs)
        except ValueError as error:
            raise VLLMValidationError(str(error)) from error


def make_elastic(vllm_config: Any) -> None:
    """Name our classes over those that are set. Raises `EngineNotSupported` for a release or a feature that cannot be elastic."""
    import vllm

    check_public_package()
    require_release(vllm.__version__)
    require_features(vllm_config)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if not is_ours(parallel.worker_cls, _WORKER):
        parallel.worker_cls = name_over(_WORKER, parallel.worker_cls)
    if not is_ours(scheduler.scheduler_cls, _SCHEDULER):
        scheduler.scheduler_cls = name_over(_SCHEDULER, _scheduler_name(scheduler))
    vllm_config.cache_config.kv_cache_memory_bytes = _ANY_SIZE_BYTES
    note_cores(vllm_config)


def _scheduler_name(scheduler_config: Any) -> str:
    chosen = scheduler_config.scheduler_cls
    if chosen is None:
        return _STOCK_SCHEDULERS[bool(scheduler_config.async_scheduling)]
    return chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}"
