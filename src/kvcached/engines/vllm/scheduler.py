# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with an elastic block pool. `...scheduler.NAME` is this mixin over the scheduler class that NAME spells.

The pool's lock is held through every method that touches blocks, so the keeper and the control endpoint act between two of them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kvcached.config import configure_logging, load_settings
from kvcached.engines.vllm.chain import class_over
from kvcached.engines.vllm.forgotten import close_when_forgotten
from kvcached.engines.vllm.scheduler_memory import SchedulerMemory

if TYPE_CHECKING:
    _Scheduler = Any
else:
    _Scheduler = object

_log = logging.getLogger("kvcached.vllm")


def __getattr__(name: str) -> Any:
    return class_over(ElasticScheduler, name)


class ElasticScheduler(_Scheduler):
    """Schedules as its base class does; blocks come from, and go back to, an elastic pool."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = load_settings()
        configure_logging(settings)
        self.kvcached = SchedulerMemory(settings, self)
        close_when_forgotten(self, self.kvcached.close)
        _log.info("elastic: %s", self.kvcached.describe())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        with self.kvcached.pool.lock:
            self.kvcached.require_working()
            self.kvcached.begin_step()
            output = super().schedule(*args, **kwargs)
            self.kvcached.note_preemptions(output)
            self.kvcached.steps.stamp(output, self.kvcached.step_operations(), self.kvcached.step_notes())
            rest_s = self.kvcached.rest_s(self, output)
        if rest_s:
            time.sleep(rest_s)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        with self.kvcached.pool.lock:
            self.kvcached.require_working()
            self.kvcached.finish_step(scheduler_output)
            outputs = super().update_from_output(scheduler_output, model_runner_output)
            self.kvcached.end_hopeless(self, outputs)
            return outputs

    def add_request(self, *args: Any, **kwargs: Any) -> Any:
        with self.kvcached.pool.lock:
            return super().add_request(*args, **kwargs)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        with self.kvcached.pool.lock:
            return super().finish_requests(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        with self.kvcached.pool.lock:
            done = super().reset_prefix_cache(*args, **kwargs)
            if done:
                self.kvcached.note_reset()
            return done

    def set_pause_state(self, pause_state: Any) -> None:
        with self.kvcached.pool.lock:
            super().set_pause_state(pause_state)
            self.kvcached.note_pause(bool(pause_state.name != "UNPAUSED"))

    def shutdown(self) -> None:
        super().shutdown()
        self.kvcached.close()
