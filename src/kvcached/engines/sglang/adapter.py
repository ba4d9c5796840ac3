# SPDX-License-Identifier: Apache-2.0
"""The functions that are put around SGLang's, in the process of a scheduler. `seams.py` says which goes where, and why."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from kvcached.config import check_public_package, configure_logging, load_settings
from kvcached.engines.sglang import admission
from kvcached.engines.sglang.gate import Gates
from kvcached.engines.sglang.install import install_seams, is_installed
from kvcached.engines.sglang.memory import EngineMemory, TokenMemory
from kvcached.engines.sglang.seams import seams_of
from kvcached.engines.sglang.states import STATES_OF_A_REQUEST, StateMemory, states_of
from kvcached.engines.sglang.support import (
    attention_replicas,
    require_features,
    require_pool,
    require_release,
    require_settings,
    require_states,
)
from kvcached.engines.sglang.watch import SchedulerWatch
from kvcached.engines.sglang.zeros import ZerosFromArena
from kvcached.errors import EngineNotSupported, PeerLost
from kvcached.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.sglang.gate import Gate
    from kvcached.engines.sglang.seams import Version

_log = logging.getLogger("kvcached.sglang")
_SCHEDULER_MODULE: Final = "sglang.srt.managers.scheduler"
_LOST_S: Final = 2.0  # until the rank whose end broke an exchange is known
# Attention backends whose kernels take the distance of slots from the tensors; shown by tests. Others get dense tensors.
_FIRST_WITH_STATES: Final = (0, 5, 17)
_TAKES_STRIDES: Final = frozenset({"torch_native", "triton"})


def install() -> None:
    """Wrap SGLang's functions, where there is a scheduler; a second call does nothing. Raises `EngineNotSupported`, `SettingError`.

    A process that has not loaded the scheduler's module, a detokenizer or a router, holds no KV memory.
    """
    import sglang

    check_public_package()
    version = require_release(sglang.__version__)
    if _SCHEDULER_MODULE not in sys.modules:
        return
    seams = seams_of(version)
    if any(seam.hook and is_installed(seam) for seam in seams):
        return
    install_seams(seams, Adapter(version))


class Adapter:
    """Everything between SGLang and one scheduler's memory. A process has one scheduler."""

    def __init__(self, version: Version) -> None:
        self._version = version
        self._memory: EngineMemory | None = None
        self._watch: SchedulerWatch | None = None
        self._server_args: Any = None

    # ------------------------------------------------------------------ memory

    def virtual_bytes(self, original: Callable[..., Any], holder: Any, *args: Any, **kwargs: Any) -> int:
        size_bytes = self._open(holder).virtual_bytes()
        if getattr(holder, "mambaish_config", None) is None:
            return size_bytes
        if self._version < _FIRST_WITH_STATES:
            raise EngineNotSupported("models with states of linear attention can be elastic from SGLang 0.5.17 on")
        return int(holder._handle_max_mamba_cache(size_bytes / GIB) * GIB)  # sets how many states there are; what is left is for tokens

    def _open(self, holder: Any) -> EngineMemory:
        """`holder`: what SGLang sizes its pools with; it knows the device."""
        if self._server_args is None:
            raise EngineNotSupported("SGLang sizes its KV pools outside a scheduler")
        if self._memory is None:
            settings = load_settings()
            require_settings(settings)
            device = torch.device(holder.device)
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            model = self._server_args.served_model_name or self._server_args.model_path
            replicas = attention_replicas(self._server_args)
            self._memory = EngineMemory(settings, model, device, interleaved=self._takes_strides(), replicas=replicas)
        return self._memory

    def _takes_strides(self) -> bool:
        args = self._server_args
        names = {args.attention_backend, getattr(args, "prefill_attention_backend", None), getattr(args, "decode_attention_backend", None)}
        names -= {None}
        return bool(names) and names <= _TAKES_STRIDES

    @property
    def memory(self) -> EngineMemory:
        if self._memory is None:
            raise EngineNotSupported("SGLang made KV memory before it asked for its size")
        return self._memory

    def create_mha_buffers(self, original: Callable[..., Any], kv_pool: Any) -> None:
        require_pool(kv_pool)
        rows = [(kv_pool.head_num, kv_pool.head_dim), (kv_pool.head_num, kv_pool.v_head_dim)] * kv_pool.layer_num
        tensors = TokenMemory(self.memory, kv_pool, rows).tensors()
        kv_pool.k_buffer, kv_pool.v_buffer = tensors[::2], tensors[1::2]

    def create_mha_buffers_and_rest(self, original: Callable[..., Any], kv_pool: Any) -> None:
        """The original makes its buffers by `torch.zeros`, K of all layers and then V, and notes their addresses."""
        require_pool(kv_pool)
        rows = [(kv_pool.head_num, kv_pool.head_dim)] * kv_pool.layer_num + [(kv_pool.head_num, kv_pool.v_head_dim)] * kv_pool.layer_num
        with ZerosFromArena(TokenMemory(self.memory, kv_pool, rows).tensors()) as zeros:
            original(kv_pool)
        zeros.require_answered()
        kv_pool.data_strides = torch.tensor([cache.stride(0) * cache.element_size() for cache in (*kv_pool.k_buffer, *kv_pool.v_buffer)])

    def create_mla_buffers(self, original: Callable[..., Any], kv_pool: Any) -> None:
        require_pool(kv_pool)
        kv_pool.kv_buffer = TokenMemory(self.memory, kv_pool, [(1, kv_pool.kv_cache_dim)] * kv_pool.layer_num).tensors()

    def create_states(self, original: Callable[..., Any], state_pool: Any, *args: Any, **kwargs: Any) -> None:
        """The original makes its buffers by `torch.zeros`: each kind of convolution's states of all layers, then the temporal ones."""
        if self.memory.accord is not None:
            raise EngineNotSupported("a hybrid model with states of linear attention cannot be elastic on several ranks in this release")
        states = states_of(kwargs)
        memory = StateMemory(self.memory, state_pool, states, slots=kwargs["size"] + 1)
        tensors = memory.tensors()
        with ZerosFromArena([*tensors]) as zeros:
            original(state_pool, *args, **kwargs)
        zeros.require_answered()
        cache = state_pool.mamba_cache
        if [tensor.data_ptr() for tensor in (*cache.conv, cache.temporal)] != [tensor.data_ptr() for tensor in tensors]:
            raise EngineNotSupported("SGLang lays its states out anew for the kernels of this CPU")

    def adopt_configured(self, original: Callable[..., Any], configurator: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(configurator, *args, **kwargs)
        gates = self._adopt(result.token_to_kv_pool_allocator, result.token_to_kv_pool, configurator.model_config.context_len)
        if hasattr(result.req_to_token_pool, "mamba_pool"):
            require_states(configurator, result.req_to_token_pool)
            self._adopt_states(result.req_to_token_pool, gates)
        return result

    def adopt_runner(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        self._adopt(runner.token_to_kv_pool_allocator, runner.token_to_kv_pool, runner.model_config.context_len)
        return result

    def _adopt(self, allocator: Any, kv_pool: Any, context_tokens: int) -> Gates:
        from kvcached.engines.sglang.allocators import adopt
        from kvcached.engines.sglang.window_allocator import adopt_windows

        def gate_of(pool: Any) -> Gate:
            return self.memory.part_of(pool).start(context_tokens)

        if hasattr(allocator, "swa_attn_allocator"):
            return adopt_windows(allocator, gate_of)
        gates = Gates(gate_of(getattr(kv_pool, "full_kv_pool", kv_pool)))  # of a hybrid model: the pool of its attention
        adopt(allocator, gates)
        return gates

    def _adopt_states(self, req_to_token_pool: Any, gates: Gates) -> None:
        from kvcached.engines.sglang.state_slots import adopt_states

        part = self.memory.part_of(req_to_token_pool.mamba_pool)
        gate = part.start(STATES_OF_A_REQUEST)
        if part.owner is not None:
            part.owner.operations.longest_request_tokens = int  # its slots are no tokens
        extra = req_to_token_pool.mamba_ping_pong_track_buffer_size if req_to_token_pool.enable_mamba_extra_buffer else 0
        gates.states = adopt_states(req_to_token_pool.mamba_allocator, gate, extra)

    # ------------------------------------------------------------------ admission

    admit = staticmethod(admission.admit)
    admit_chunk = staticmethod(admission.admit_chunk)
    remaining_tokens = staticmethod(admission.remaining_tokens)
    remaining_window_tokens = staticmethod(admission.remaining_window_tokens)
    check_decode = staticmethod(admission.check_decode)

    # ------------------------------------------------------------------ scheduler

    def start(self, original: Callable[..., Any], scheduler: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        settings = load_settings()
        configure_logging(settings)
        require_features(server_args, self._version)
        self._server_args = server_args
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            original(scheduler, server_args, *args, **kwargs)
            self._watch = SchedulerWatch(scheduler, self.memory, settings.max_cached_tokens)
            self.memory.serve()
            self._watch.settle_bounds()
            undo.pop_all()
        _log.info("elastic: on, %s", "; ".join(part.describe() for part in self.memory.parts))

    def _close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    @property
    def watch(self) -> SchedulerWatch:
        if self._watch is None:
            raise EngineNotSupported("SGLang's scheduler works before it is complete")
        return self._watch

    def run(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """An exchange fails where a rank is gone: the one that is left knows only that, so the one that has ended is named here."""
        crew = self.memory.crew
        try:
            result = original(scheduler)
        except RuntimeError as error:  # what torch raises for a group that has lost a rank
            lost = "" if crew is None else crew.word(_LOST_S)
            if lost:
                raise PeerLost(lost) from error
            raise
        if crew is not None:
            crew.leave()
        return result

    def receive(self, original: Callable[..., Any], scheduler: Any, recv_reqs: Any) -> Any:
        with self.watch.lock:
            if recv_reqs:
                self.watch.requests_come()
            return original(scheduler, recv_reqs)

    def checked(self, original: Callable[..., Any], checker: Any) -> Any:
        with self.watch.lock:
            return original(checker)

    def schedule(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        with self.watch.lock:
            with self.watch.agreed():
                self.watch.reopen()
                plan = original(scheduler, *args, **kwargs)
                batch = getattr(plan, "batch_to_run", plan)
                if batch is None or batch.forward_mode.is_idle():  # the latter while other replicas of attention work
                    self.watch.end_hopeless()
                if batch is not None:
                    self.watch.begin_step(batch)
            return plan

    def retract(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Within `schedule`, so with the lock held."""
        retracted, ratio, aborted = original(batch, *args, **kwargs)
        spared = self.watch.spare(batch, aborted)
        self.watch.note_preemptions(len(retracted) + len(spared))
        return [*retracted, *spared], ratio, [req for req in aborted if req not in spared]

    def finish_step(self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.watch.lock:
            outcome = original(scheduler, batch, *args, **kwargs)
            self.watch.finish_step()
            self.watch.tidy(batch)
            return outcome

    def idle(self, original: Callable[..., Any], scheduler: Any) -> Any:
        with self.watch.lock:
            self.watch.tidy()
            self.watch.finish_all()
            return original(scheduler)

    def sleep(self, original: Callable[..., Any], scheduler: Any) -> Any:
        if scheduler.idle_sleeper is None:
            return original(scheduler)
        with self.watch.unlocked():
            return original(scheduler)

    def flush(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        with self.watch.lock:
            if scheduler.is_fully_idle():
                self.watch.finish_all()
            done = original(scheduler, *args, **kwargs)
        if done:
            self.watch.rest()
        return done

    def require_room(self, original: Callable[..., Any], scheduler: Any, req: Any) -> Any:
        result = original(scheduler, req)
        with self.watch.lock:
            self.watch.require_room(req)
        return result
