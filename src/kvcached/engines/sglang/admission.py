# SPDX-License-Identifier: Apache-2.0
"""Around SGLang's `PrefillAdder`: who is let in has memory behind the prefill, mapped already."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvcached.engines.sglang.gate import gates_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcached.engines.sglang.gate import Gates


def admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """The prefix that the request found must not be evicted for it, so it is locked before memory is made for the rest."""
    gates = gates_of(adder.token_to_kv_pool_allocator)
    if gates is None:
        return original(adder, req, *args, **kwargs)
    with adder._lock_node(req.last_node) if gates.can_evict() else contextlib.nullcontext():
        needed = _paged(gates, _chunk_of(adder, _extend_tokens(req)))
        if _is_parked(adder):
            gates.turned_away(needed)
            return _no_token()
        if not gates.admits(needed, reserved=_reserved(adder, gates)):
            return _no_token()
        if not gates.can_run(_count_running(adder) + 1):
            gates.turned_away(needed)
            return _no_token()
        return original(adder, req, *args, **kwargs)


def admit_chunk(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """A prefill under way goes on with what there is; where that is nothing it is parked, and nobody is let in before it."""
    gates = gates_of(adder.token_to_kv_pool_allocator)
    if gates is None:
        return original(adder, req)
    wanted = _chunk_of(adder, _extend_tokens(req))
    tokens = gates.secure_chunk(wanted, _reserved(adder, gates))
    if tokens is None:
        adder.kvcached_parked = True
        if not hasattr(req, "set_extend_range"):  # these releases cache what they take for computed
            req.fill_ids = req.fill_ids[: len(req.prefix_indices)]
            req.set_extend_input_len(0)
        return req
    if tokens < wanted and adder.rem_chunk_tokens is not None:  # or what the chunk leaves of the batch is for others
        adder.rem_chunk_tokens = tokens
    return original(adder, req)


def remaining_tokens(original: Callable[..., Any], adder: Any) -> Any:
    """Growth by decoding is promised up to the limit, but to a request that would be alone: waiting would not help it."""
    gates = gates_of(adder.token_to_kv_pool_allocator)
    counted = original(adder)
    return counted if gates is None or adder.rem_total_token_offset == 0 else counted - gates.full.count_withheld()


def remaining_window_tokens(original: Callable[..., Any], adder: Any) -> Any:
    gates = gates_of(adder.token_to_kv_pool_allocator)
    counted = original(adder)
    return counted if gates is None or adder.rem_swa_token_offset == 0 else counted - gates.window.count_withheld()


def check_decode(original: Callable[..., Any], batch: Any, selected_indices: list[int] | None = None) -> bool:
    fits = bool(original(batch, selected_indices=selected_indices))
    gates = gates_of(batch.token_to_kv_pool_allocator)
    return fits and (gates is None or gates.secure(batch.new_tokens_required_next_decode(selected_indices)))


def _is_parked(adder: Any) -> bool:
    return bool(getattr(getattr(adder, "memory_budget", adder), "kvcached_parked", False))


def _count_running(adder: Any) -> int:
    """Requests that decode, that have been let in, and one more, whose prefill may be under way, where there is any."""
    running = adder.running_batch
    others = len(adder.can_run_list) + (0 if running is None else len(running.reqs))
    return others + 1 if others else 0


def _reserved(adder: Any, gates: Gates) -> int:
    """What this pass has promised already and not allocated yet.

    SGLang counts one slot for each request that decodes along with a prefill. It may take a page.
    """
    budget = getattr(adder, "memory_budget", None)
    if budget is not None:
        return int(budget.current_offset)  # made by our allocators, which count pages
    decoding = len(adder.running_batch.reqs) if gates.mixes_decode and adder.running_batch is not None else 0
    return int(adder.cur_rem_token_offset) + decoding * (gates.page_slots - 1)


def _extend_tokens(req: Any) -> int:
    known = getattr(req, "extend_input_len", None)
    if known is not None:
        return int(known)
    prefix = getattr(req, "prefix_len", None)
    return len(req.full_untruncated_fill_ids) - (len(req.prefix_indices) if prefix is None else int(prefix))


def _chunk_of(adder: Any, tokens: int) -> int:
    return tokens if adder.rem_chunk_tokens is None else max(0, min(tokens, int(adder.rem_chunk_tokens)))


def _paged(gates: Gates, tokens: int) -> int:
    """In whole pages, and one more, as SGLang reckons."""
    return gates.full.pages(tokens) * gates.page_slots + gates.page_slots


def _no_token() -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.NO_TOKEN
