# SPDX-License-Identifier: Apache-2.0
"""What is done with an engine. Each function gets the release and its case, and returns what was seen, for JSON."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from sglang_harness.engine import ALONE, Engine, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Release = tuple[int, ...]
Case = dict[str, Any]
PATIENCE_S = 60.0  # what takes a moment may take many on a machine that others use


def start(release: Release, case: Case, rank: Rank = ALONE) -> Engine:
    if case.get("absorbed_mla"):
        use_absorbed_mla()
    if case.get("expert_biases") and release < (0, 5, 17):
        load_whole_expert_biases()
    if case.get("gated_norm"):
        use_gated_norm()
    if case["arguments"].get("enable_dp_attention"):
        pad_batches()
    return Engine(release, case["model"], rank, **case["arguments"])


def use_absorbed_mla() -> None:
    """torch_native has no kernel for MLA's two-stage path; SGLang's other path needs none."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register("torch_native", lambda attention, batch: handler._dispatch_mla_subtype(attention, batch))


def load_whole_expert_biases() -> None:
    """On a CPU these releases narrow the bias of an expert in a dimension that it does not have."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    load = FusedMoE._load_w2

    def load_bias_or(layer: Any, expert_data: torch.Tensor, *, loaded_weight: torch.Tensor, is_bias: bool = False, **others: Any) -> None:
        if is_bias:
            expert_data.copy_(loaded_weight)
        else:
            load(layer, expert_data=expert_data, loaded_weight=loaded_weight, **others)

    FusedMoE._load_w2 = load_bias_or


def pad_batches() -> None:
    """Ranks with requests of their own run batches of one size. What a row that is padded counts as is asked of the attention, and of those
    for CPUs only the one with kernels says it. The second name is that of older releases."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value"):
        setattr(TorchNativeAttnBackend, name, lambda _: 1)


def use_gated_norm() -> None:
    """The Triton kernel of this norm is written with block pointers, which the interpreter has no more; so the one for CPUs is taken."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate

    fused_norm_gate._use_cpu = True


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + 3 * place + place * place % 11) % 250 + 1 for place in range(length)]


def send_round(engine: Engine, case: Case, name: str) -> None:
    """Prompts of several lengths, some longer than a chunk of prefill, two with a common beginning."""
    count, step, new_tokens = case.get("prompts", 6), case.get("step", 41), case.get("new_tokens", 24)
    for number in range(count):
        engine.send(f"{name}{number}", prompt(number, 20 + step * number), new_tokens, may_end=case.get("may_end", False))
    again = [*prompt(count - 1, 20 + step * (count - 1)), 7, 8, 9]
    engine.send(f"{name}-again", again, new_tokens, may_end=case.get("may_end", False))


def pools_of(engine: Engine) -> list[Any]:
    allocator = engine.scheduler.token_to_kv_pool_allocator
    parts = [getattr(allocator, name, None) for name in ("full_attn_allocator", "swa_attn_allocator")]
    parts = [part for part in parts if part is not None] or [allocator]
    states = getattr(engine.scheduler.req_to_token_pool, "mamba_allocator", None)
    return [part.kvcached_bank for part in (*parts, states) if hasattr(part, "kvcached_bank")]


def tokens(release: Release, case: Case) -> dict[str, Any]:
    """Two rounds of the same prompts, so that the second one finds prefixes; then a flush."""
    engine = start(release, case)
    banks = pools_of(engine)
    peaks = [0] * len(banks)

    def watch(_: Engine) -> None:
        for place, bank in enumerate(banks):
            peaks[place] = max(peaks[place], bank.pool.ledger.counts().owned_blocks)

    send_round(engine, case, "a")
    first = engine.run(watch)
    send_round(engine, case, "b")
    second = engine.run(watch)
    seen: dict[str, Any] = {"tokens": first | second, "peaks": peaks, "strides": strides_of(engine)}
    seen["hits"] = sum(int(getattr(req, "cached_tokens", 0)) for req in engine.requests.values())
    return seen | after_flush(engine)


def strides_of(engine: Engine) -> list[int]:
    """Bytes from slot to slot in the first buffer, and bytes of its row."""
    pool = engine.scheduler.token_to_kv_pool_allocator.get_kvcache()
    pool = getattr(pool, "full_kv_pool", pool)
    buffer = (getattr(pool, "k_buffer", None) or pool.kv_buffer)[0]
    return [buffer.stride(0) * buffer.element_size(), buffer[0].numel() * buffer.element_size()]


def after_flush(engine: Engine) -> dict[str, Any]:
    banks = pools_of(engine)
    flushed = engine.scheduler.flush_cache()

    def leased() -> list[int]:
        return [bank.pool.port_status(PATIENCE_S).lease_bytes // bank.pool.geometry.release_step_bytes for bank in banks]

    held = settle(lambda: [bank.pool.counts().held_pages for bank in banks], lambda pages: set(pages) <= {1})
    return {
        "flushed": flushed,
        "held_pages": held,
        "leased": settle(leased, lambda pages: set(pages) <= {1}),
        "problems": [problem for bank in banks for problem in bank.problems()],
    }


def settle(look: Callable[[], Any], accept: Callable[[Any], bool], timeout_s: float = PATIENCE_S) -> Any:
    """What was seen when it was accepted, or last: another look may see what the keeper does next."""
    deadline = time.monotonic() + timeout_s
    while not accept(seen := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return seen


def set_limit(bank: Any, pages: int, suffix: str = "") -> None:
    """As an operator does, through the control endpoint. `suffix`: of the rank's name."""
    from kvcached.config import load_settings
    from kvcached.runtime.control import ControlClient
    from kvcached.runtime.endpoint import endpoint_path

    settings = load_settings()
    endpoint = endpoint_path(settings.run_dir, f"{settings.instance_name}{suffix}")
    ControlClient(endpoint, PATIENCE_S).limit(pages * bank.pool.geometry.release_step_bytes)


def count_retractions(engine: Engine) -> list[int]:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    counted = [0]
    retract = ScheduleBatch.retract_decode

    def counting(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = retract(batch, *args, **kwargs)
        counted[0] += len(result[0])
        return result

    ScheduleBatch.retract_decode = counting
    return counted


def count_preemptions(engine: Engine) -> int:
    """As the pools have counted them."""
    return sum(bank.pool.tally.preemptions for bank in pools_of(engine))


def squeeze(release: Release, case: Case) -> dict[str, Any]:
    """The limit falls while requests run, to less than they hold together; later it rises again, and as many requests come once more."""
    engine = start(release, case)
    retracted = count_retractions(engine)
    (bank,) = pools_of(engine)
    limits = {step: pages for step, pages in case["limits"]}
    seen: list[dict[str, int]] = []

    def change(_: Engine) -> None:
        if engine.step in limits:
            set_limit(bank, limits[engine.step])
        if engine.step == max(limits):
            send_round(engine, case, "b")
        if engine.step == max(limits) - 1:  # what nobody owns any more the keeper takes in its own time
            settle(bank.pool.counts, lambda counts: counts.held_pages <= max(counts.limit_pages, counts.used_pages))
        counts = bank.pool.counts()
        seen.append(
            {
                "step": engine.step,
                "limit": counts.limit_pages,
                "held": counts.held_pages,
                "used": counts.used_pages,
                "owned": counts.owned_blocks,
            }
        )

    send_round(engine, case, "a")
    out = engine.run(change)
    return {
        "tokens": out,
        "reasons": engine.reasons(),
        "retracted": retracted[0],
        "counted": count_preemptions(engine),
        "seen": seen,
        "page_blocks": bank.pool.geometry.max_blocks_per_page,
    } | after_flush(engine)


def states(release: Release, case: Case) -> dict[str, Any]:
    """Little memory for the states of a hybrid model: few requests run at the same time, and the tree gives states up."""
    engine = start(release, case)
    allocator = engine.scheduler.req_to_token_pool.mamba_allocator
    seen: list[list[int]] = []

    def watch(_: Engine) -> None:
        held = len(allocator.kvcached_spare)
        used = allocator.kvcached_bank.out_pages - held
        seen.append([len(engine.scheduler.running_batch.reqs), used, held, len(set(allocator.free_slots.tolist()))])

    send_round(engine, case, "a")
    first = engine.run(watch)
    send_round(engine, case, "b")
    second = engine.run(watch)
    most, size = allocator.kvcached_gate.most_slots, allocator.size
    cache = engine.scheduler.req_to_token_pool.mamba_pool.mamba_cache
    cells = [tensor.stride(1) * tensor.element_size() for tensor in (*cache.conv, cache.temporal)]
    rows = [tensor[:, 0].numel() * tensor.element_size() for tensor in (*cache.conv, cache.temporal)]
    page = allocator.kvcached_bank.pool.geometry.page_bytes
    return {"tokens": first | second, "seen": seen, "most": most, "size": size, "cells": cells, "rows": rows, "page": page} | after_flush(
        engine
    )


def hopeless(release: Release, case: Case) -> dict[str, Any]:
    """One prompt is longer than the limit, one by a token, and one is as long as can be. The rest is served."""
    engine = start(release, case)
    send_round(engine, case, "a")
    engine.send("long", prompt(9, case["long"]), 8)
    engine.send("beyond", prompt(10, case["longest"] + 1), 8)
    engine.send("longest", prompt(11, case["longest"]), 8)
    out = engine.run()
    return {"tokens": out, "reasons": engine.reasons()} | after_flush(engine)


def lowered(release: Release, case: Case) -> dict[str, Any]:
    """A request waits behind another (of one at a time); then the limit falls below what it needs."""
    engine = start(release, case)
    (bank,) = pools_of(engine)
    engine.send("running", prompt(1, 200), 40)

    def change(_: Engine) -> None:
        if engine.step == 4:
            engine.send("waiting", prompt(2, 900), 8)
        if engine.step == 12:
            set_limit(bank, case["pages"])

    out = engine.run(change)
    return {"tokens": out, "reasons": engine.reasons()} | after_flush(engine)


def parked(release: Release, case: Case) -> dict[str, Any]:
    """The limit falls below what a prefill under way needs; then another request comes."""
    engine = start(release, case)
    (bank,) = pools_of(engine)
    engine.send("long", prompt(1, 900), 8)
    fell = [0]

    def change(_: Engine) -> None:
        if engine.scheduler.chunked_req is not None and not fell[0]:
            set_limit(bank, case["pages"])
            fell[0] = engine.step
        if engine.step == fell[0] + 5:
            engine.send("next", prompt(2, 100), 8)

    out = engine.run(change)
    return {"tokens": out, "reasons": engine.reasons(), "fell": fell[0]} | after_flush(engine)


def crowded(release: Release, case: Case) -> dict[str, Any]:
    """Another pool was there first and holds nearly all of the card while a request comes to an idle engine; later it goes."""
    from kvcached.runtime.api import open_card

    with open_card("host:0", instance_name="other") as card:
        other = card.open_pool("other", block_bytes=1 << 20, blocks=card.budget_bytes >> 20)
        other.take(other.geometry.num_blocks)
        engine = start(release, case)
        waited: list[int] = []

        def change(_: Engine) -> None:
            waited.append(len(engine.scheduler.waiting_queue))
            if engine.step == case["turns"]:
                other.close()

        engine.send("late", prompt(1, 500), 8)
        out = engine.run(change)
    return {"tokens": out, "waited": sum(waited)} | after_flush(engine)


def cached(release: Release, case: Case) -> dict[str, Any]:
    """How much of the prefix tree stays."""
    engine = start(release, case)
    send_round(engine, case, "a")
    out = engine.run()
    return {"tokens": out, "evictable": engine.scheduler.tree_cache.evictable_size()} | after_flush(engine)


def asked(release: Release, case: Case) -> dict[str, Any]:
    """While the engine idles in its loop, another thread evicts its cache, as the control endpoint does; then it serves again."""
    engine = start(release, case)
    (bank,) = pools_of(engine)
    send_round(engine, case, "a")
    first = engine.run()
    counts = bank.pool.counts()
    answer: dict[str, Any] = {"explained": []}

    def ask() -> None:
        from kvcached.config import load_settings
        from kvcached.runtime.control import ControlClient
        from kvcached.runtime.endpoint import endpoint_path

        settings = load_settings()
        client = ControlClient(endpoint_path(settings.run_dir, settings.instance_name), PATIENCE_S)
        status, block_bytes = client.status(), bank.pool.geometry.block_stride_bytes
        answer["status"] = [status.owned_bytes // block_bytes, status.cached_bytes // block_bytes]
        answer["explained"] = [row.reason for row in client.explain().rows]
        answer["evicted"] = client.evict(bank.pool.geometry.range_bytes).given_bytes
        answer["trimmed"] = client.trim().given_bytes
        answer["held"] = settle(lambda: bank.pool.counts().held_pages, lambda pages: pages == 1)

    asker = threading.Thread(target=ask)
    engine.requests.clear()

    def begin(_: Engine) -> None:
        """Requests come from the engine's own thread: what another one sends while the loop takes them may be lost."""
        if engine.step_in_run == 5:
            asker.start()
        elif engine.step_in_run > 5 and not asker.is_alive() and not engine.requests:
            send_round(engine, case, "b")

    second = engine.run(begin)
    asker.join()
    return {"tokens": first | second, "counted": [counts.owned_blocks, counts.cached_blocks], "answer": answer} | after_flush(engine)


def occupation(release: Release, case: Case) -> dict[str, Any]:
    """SGLang's own way to give memory back and to take it again."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    engine = start(release, case)
    (bank,) = pools_of(engine)
    send_round(engine, case, "a")
    first = engine.run()
    held: list[int] = []

    def steps(_: Engine) -> None:
        if engine.step_in_run == 2:
            engine.put(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        if engine.step_in_run == 5:
            held.append(settle(lambda: bank.pool.counts().held_pages, lambda pages: pages == 1))
            engine.put(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
            send_round(engine, case, "b")

    second = engine.run(steps)
    return {"tokens": first | second, "held": held} | after_flush(engine)


def refused(release: Release, case: Case) -> dict[str, Any]:
    """The start fails, saying why."""
    from kvcached.errors import KVCachedError

    try:
        start(release, case)
    except (KVCachedError, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def late(release: Release, case: Case) -> dict[str, Any]:
    """Ids come back some turns of the loop later, as from a device that is busy; the pool is small, so that they are missed."""
    from kvcached.engines.sglang import bank as module

    turn, waits = [0], [0]

    class LateEvent:
        def __init__(self) -> None:
            self._due = turn[0] + case["turns"]

        def query(self) -> bool:
            return turn[0] >= self._due

        def synchronize(self) -> None:
            waits[0] += not self.query()
            self._due = turn[0]

    def copy_late(ids: torch.Tensor) -> tuple[torch.Tensor, LateEvent]:
        return ids.clone(), LateEvent()

    module.copy_to_host = copy_late
    module.PageBank.arrives_late = property(lambda bank: True)
    engine = start(release, case)
    (bank,) = pools_of(engine)
    most_arriving = [0]

    def watch(_: Engine) -> None:
        turn[0] += 1
        most_arriving[0] = max(most_arriving[0], bank.arriving_pages)

    send_round(engine, case, "a")
    first = engine.run(watch)
    send_round(engine, case, "b")
    second = engine.run(watch)
    return {"tokens": first | second, "waits": waits[0], "arriving": most_arriving[0], "turns": turn[0]} | after_flush(engine)


def books(release: Release, case: Case) -> dict[str, Any]:
    """A page bank in random use, with ids that come back late, against sets."""
    import random

    import torch

    from kvcached.engines.sglang.bank import PageBank
    from kvcached.errors import InvariantBroken, PoolExhausted
    from kvcached.runtime.api import open_card
    from kvcached.testing.consistency import must_be_consistent

    draw = random.Random(1)
    with open_card("host:0") as card, card.open_pool("books", block_bytes=4096, blocks=257, limit="512KiB") as elastic:
        pool = elastic._pool
        pool.grow(1)
        pool.take_ids([0])
        pool.pin_page_of(0)
        bank = PageBank(pool, 16, torch.device("cpu"))
        mine: list[int] = []
        misses = 0
        for _ in range(2000):
            if draw.random() < 0.5:
                count = draw.randrange(1, 40)
                try:
                    ids = bank.take(count).tolist()
                except PoolExhausted:
                    misses += 1
                    continue
                assert len(set(ids)) == count
                assert not set(ids) & {0, *mine}
                mine += ids
            elif mine:
                draw.shuffle(mine)
                cut = draw.randrange(1, len(mine) + 1)
                given, mine = mine[:cut], mine[cut:]
                slots = torch.tensor([page * 16 + draw.randrange(16) for page in given for _ in range(2)])
                if draw.random() < 0.3:
                    bank.give_pages_of(slots)
                else:
                    bank.give(torch.tensor(given))
            assert bank.free_slots == (256 - len(mine)) * 16
            assert set(bank.free_ids().tolist()) == set(range(1, 257)) - set(mine)
            assert bank.problems() == []
        must_be_consistent(pool)
        assert misses > 10
        free = sorted(set(range(1, 257)) - set(mine))
        for wrong in ([free[0]], [free[0], free[-1]], [0], [0, mine[0]], [mine[0], mine[0]], [mine[0], 257], [mine[0], -1]):
            try:
                bank.give(torch.tensor(wrong))
            except InvariantBroken:
                bank.out_pages += len(wrong)
                bank.arriving_pages = 0
                assert bank.problems() == []
            else:
                raise AssertionError(f"{wrong} was taken back")
        bank.clear()
        return {"steps": 2000, "owned": pool.counts().owned_blocks}
