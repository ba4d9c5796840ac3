# SPDX-License-Identifier: Apache-2.0
"""What a running scheduler tells its memory: which step is under way, which has finished, when nothing is, and who can never be served."""

from __future__ import annotations

import contextlib
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from kvcached.engines.sglang.agreed import AgreedGate, Agreement
from kvcached.engines.sglang.gate import gates_of
from kvcached.engines.sglang.ranks import Topic
from kvcached.engines.sglang.staged import StagedAgreement, StagedGate
from kvcached.errors import EngineNotSupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcached.engines.sglang.gate import Gate
    from kvcached.engines.sglang.memory import EngineMemory
    from kvcached.engines.sglang.ranks import Accord

_log = logging.getLogger("kvcached.sglang")
_NO_BOUND: Final = (1 << 62) - 1
_MOST_AHEAD: Final = 8  # part of the pool that is kept free for what comes next


class SchedulerWatch:
    """Made when the stock scheduler is complete. Raises `EngineNotSupported` when its allocator is not elastic."""

    def __init__(self, scheduler: Any, memory: EngineMemory, max_cached_tokens: int) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._max_cached_tokens = max_cached_tokens
        self._begun = 0
        self._begun_batch: Any = None
        self._finished = 0
        gates = gates_of(scheduler.token_to_kv_pool_allocator)
        if gates is None:
            raise EngineNotSupported(f"{type(scheduler.token_to_kv_pool_allocator).__name__} is not elastic: something replaced it")
        self._gates = gates
        self.gates = gates.all
        self.lock = memory.lock  # held through each entry point: keeper and control endpoint act between two of them
        gates.mixes_decode = bool(scheduler.is_mixed_chunk)
        self._window_tokens = int(scheduler.sliding_window_size or 0) + gates.page_slots
        self._ahead_slots = _slots_of_a_step(scheduler) if self.gates[0].bank.arrives_late else 0
        with self.lock:
            gates.watch_tree(scheduler.tree_cache)
        memory.streams.scheduler = scheduler
        self._agreement = _agreement_of(memory.deciders, self.gates, scheduler)

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Let go of the lock, which this thread holds once."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()

    # ------------------------------------------------------------------ ranks

    def settle_bounds(self) -> None:
        """The engine is complete: what all of its ranks can serve."""
        if self._agreement is not None:
            accord = self._agreement.accord
            (most,) = accord.least(Topic.SETTINGS, [self._max_cached_tokens if self._max_cached_tokens >= 0 else _NO_BOUND])
            self._max_cached_tokens = -1 if most == _NO_BOUND else most
            with self.lock:
                self._agreement.start()

    def requests_come(self) -> None:
        if self._agreement is not None:
            self._agreement.requests_come(len(self._scheduler.waiting_queue))

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """With the lock held: what is decided within rests on what all ranks have agreed on."""
        if self._agreement is None:
            yield
            return
        self._agreement.begin(len(self._scheduler.waiting_queue))
        try:
            yield
        finally:
            self._agreement.lapse()

    # ------------------------------------------------------------------ steps

    def begin_step(self, batch: Any) -> None:
        """What is freed from now on may be read by this step."""
        self._begun += 1
        self._begun_batch = batch
        for bank in self._gates.banks:
            bank.marker = self._begun

    def spare(self, batch: Any, aborted: Sequence[Any]) -> list[Any]:
        """Of the requests that SGLang ends because they outgrow what there is alone: those that are not alone, since a prefill is under
        way, or others run in other batches of a pipeline. They have given their memory back, as requests do that are put back."""
        others = [other for other in getattr(self._scheduler, "running_mbs", ()) if other is not batch and not other.is_empty()]
        are_alone = not others and self._scheduler.chunked_req is None
        spared = [] if are_alone else [req for req in aborted if getattr(req, "beam_group", None) is None]
        for req in spared:
            req.to_finish = None
        return spared

    def note_preemptions(self, requests: int) -> None:
        self._gates.full.bank.pool.note_preemptions(requests)

    def finish_step(self) -> None:
        """The oldest step under way has its tokens on the host: it has finished."""
        self._finished = min(self._finished + 1, self._begun)
        self._advance()

    def finish_all(self) -> None:
        """Nothing is under way."""
        self._finished = self._begun
        self._advance()
        self._begun_batch = None
        if self._gates.states is not None:
            self._gates.states.kvcached_tidy(0)

    def _advance(self) -> None:
        for bank in self._gates.banks:
            bank.pool.advance(self._finished)

    def tidy(self, batch: Any = None) -> None:
        """Count what has arrived, and keep the prefix cache within its bound."""
        for bank in self._gates.banks:
            bank.settle()
        for gate in self.gates:
            if self._ahead_slots:
                gate.evict_ahead(min(self._ahead_slots, gate.most_slots // _MOST_AHEAD))
        if self._gates.states is not None:
            self._gates.states.kvcached_tidy(self._count_running(batch))
        self.gates[0].trim_cache(self._max_cached_tokens)

    def _count_running(self, finished: Any) -> int:
        """Requests that run, and one more, whose prefill may be under way. `finished`: the batch whose step has just finished."""
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch, self._begun_batch, finished)
        return 1 + len({id(req) for batch in batches if batch is not None for req in batch.reqs})

    def rest(self) -> None:
        """The cache was flushed on an idle engine: what is empty leaves now."""
        for part in self._memory.parts:
            if part.owner is not None:
                part.owner.keeper.tick()  # it would take the emptying of pages for work, and fill its reserve for more
                part.owner.rest()

    def reopen(self) -> None:
        """A request got no memory, and SGLang lets nobody in until one that runs has ended. Where none runs, that never comes; and memory
        comes from elsewhere, too: with several ranks, as far as all of them have it mapped."""
        running = self._scheduler.running_batch
        if running.is_empty() or self._gates.may_reopen():
            running.batch_is_full = False

    # ------------------------------------------------------------------ requests that can never be served

    def require_room(self, req: Any) -> None:
        """Turn away a prompt that the pool can never hold."""
        reason = self._too_long(len(req.origin_input_ids), self._at_once())
        if reason:
            req.set_finish_with_abort(reason)

    def _at_once(self) -> int | None:
        """Tokens that a pool of windows must have room for before a prefill begins; None for all of them."""
        chunk = self._scheduler.chunked_prefill_size
        return max(self._window_tokens, int(chunk)) if chunk else None

    def _too_long(self, tokens: int, at_once: int | None) -> str:
        """`at_once`: how many of them a pool of windows has to hold at the same time."""
        in_window = tokens if at_once is None else min(tokens, at_once)
        for gate, needed in ((self.gates[0], tokens), (self.gates[-1], in_window)):
            most = gate.longest_prompt_slots
            if needed > most:
                return (
                    f"the request needs {needed} tokens of KV cache and the pool can hold {most} at most at its present limit; "
                    "raise its limit (kvctl limit, KVCACHED_LIMIT) or send a shorter request"
                )
        return self._no_state()

    def _no_state(self) -> str:
        states = self._gates.states
        if states is None or states.kvcached_gate.most_slots >= states.kvcached_per_request:
            return ""
        return (
            f"a request needs {states.kvcached_per_request} states of linear attention and the pool can hold "
            f"{states.kvcached_gate.most_slots} at most at its present limit; raise its limit (kvctl limit, KVCACHED_LIMIT)"
        )

    def end_hopeless(self) -> None:
        """Nothing could be scheduled. Requests that wait for what can never be there end with an error; others wait for memory."""
        scheduler = self._scheduler
        for req in list(scheduler.waiting_queue):
            reason = self._too_long(_tokens_of(req), self._at_once())
            if reason:
                _end_waiting(scheduler, req, reason)
        chunked = scheduler.chunked_req
        reason = "" if chunked is None else self._too_long(_tokens_of(chunked), self._window_tokens)
        if reason:
            _end_chunked(scheduler, chunked, reason)


def _agreement_of(accord: Accord | None, gates: Sequence[Gate], scheduler: Any) -> Agreement | None:
    if accord is None:
        return None
    staged = [gate for gate in gates if isinstance(gate, StagedGate)]
    if staged:
        return StagedAgreement(accord, staged, scheduler, _slots_of_a_step(scheduler))
    return Agreement(accord, [gate for gate in gates if isinstance(gate, AgreedGate)])


def _tokens_of(req: Any) -> int:
    """A request that was retracted takes up what it has decoded as well."""
    return len(req.origin_input_ids) + len(req.output_ids)


def _slots_of_a_step(scheduler: Any) -> int:
    """What one batch takes at most: a chunk of prefill, or a token for every request."""
    chunk = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
    return max(int(chunk), int(scheduler.max_running_requests) * int(scheduler.page_size))


def _end_waiting(scheduler: Any, req: Any, reason: str) -> None:
    """Take a request out of the queue, and tell its client why."""
    _log.error("request %s ended with an error: %s", req.rid, reason)
    scheduler.waiting_queue.remove(req)
    release = getattr(scheduler, "_release_aborted_request", None)
    if release is not None:
        release(req)
    _tell(scheduler, req, reason)


def _end_chunked(scheduler: Any, req: Any, reason: str) -> None:
    """End a prefill under way: by SGLang's own mark for the next turn, or here, when the step that may use it has finished."""
    if hasattr(scheduler, "_pending_chunked_abort_req"):
        if scheduler._pending_chunked_abort_req is req:
            return
        from sglang.srt.managers.io_struct import AbortReq
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        _log.error("request %s ended with an error: %s", req.rid, reason)
        if hasattr(req, "discard_output_reason"):  # these releases pass it on
            req.discard_output_reason = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST)
        scheduler.abort_request(AbortReq(rid=req.rid))
    elif not scheduler.last_batch and not any(getattr(scheduler, "mbs", ())):
        from sglang.srt.mem_cache.common import release_kv_cache

        _log.error("request %s ended with an error: %s", req.rid, reason)
        release_kv_cache(req, scheduler.tree_cache, is_insert=False)
        scheduler.chunked_req = None
        _tell(scheduler, req, reason)


def _tell(scheduler: Any, req: Any, reason: str) -> None:
    """The client of a request that is in no queue any more."""
    from sglang.srt.managers.io_struct import AbortReq

    finished = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "message": reason}
    answer = AbortReq(finished_reason=finished, rid=req.rid)
    send = getattr(scheduler, "send_abort_output", None)
    if send is not None:
        send(answer, req)
    else:
        channels = getattr(scheduler, "ipc_channels", scheduler)
        channels.send_to_tokenizer.send_output(answer, req)
