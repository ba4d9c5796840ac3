# SPDX-License-Identifier: Apache-2.0
"""What is done with a running engine, in its own process. Each scenario returns plain data; the tests judge it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cases import load_prompts
from kvcached.core.canary import GUARD_BYTES
from kvcached.errors import InvariantBroken, PeerTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.cases import Case

WAIT_S = 120.0
PATIENCE_S = 10.0


class Engine:
    """A vLLM in this process, elastic or not, and what can be seen of it."""

    def __init__(self, llm: Any, case: Case) -> None:
        self.llm = llm
        self.case = case
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # None: in a process of its own
        self.scheduler = None if core is None else core.scheduler
        self.memory = getattr(self.scheduler, "kvcached", None)
        if self.memory is not None:  # or a request is put back where a busy machine took a moment to map its pages
            self.memory.pool.options = replace(self.memory.pool.options, grow_deadline_s=PATIENCE_S)

    def generate(self, prompts: list[Any], max_tokens: int | None = None) -> list[Any]:
        from vllm import SamplingParams

        tokens = self.case.max_tokens if max_tokens is None else max_tokens
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [answer.outputs[0] for answer in self.llm.generate(prompts, sampling, use_tqdm=False)]

    def tokens(self, prompts: list[Any], max_tokens: int | None = None) -> list[list[int]]:
        return [list(answer.token_ids) for answer in self.generate(prompts, max_tokens)]

    def metric(self, name: str) -> int:
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == name)

    def look(self) -> dict[str, int]:
        """Pages and blocks by state, and what the operating system says about this process's shared memory."""
        counts = self.memory.pool.counts()
        names = ("held_pages", "parked_pages", "used_pages", "retired_pages", "owned_blocks", "cached_blocks", "free_blocks", "limit_pages")
        look = {name: getattr(counts, name) for name in names}
        status = self.memory.operations.status()
        step = self.memory.pool.geometry.release_step_bytes
        return look | {
            "lease_bytes": status.lease_bytes,
            "mapped_bytes": status.mapped_bytes,
            "step_bytes": step,
            "shared_bytes": shared_bytes(),
        }

    def limit(self, limit_bytes: int) -> None:
        """Set it, asking again where a rank is too busy to hear of it at once."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self.memory.operations.limit(limit_bytes)
            except PeerTimeout:
                if time.monotonic() > deadline:
                    raise
            else:
                return

    @property
    def worker_memory(self) -> Any:
        """Of the worker in this process."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.kvcached_memory

    def stamps_read(self) -> int:
        """How often the canary looked at the stamp of a block; 0 without a canary."""
        canary = self.worker_memory._canary
        return 0 if canary is None else int(canary.checks)

    def wait_for(self, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        """Look until the condition holds or the time is over; the last look."""
        deadline = time.monotonic() + WAIT_S
        look = self.look()
        while not condition(look) and time.monotonic() < deadline:
            time.sleep(0.02)
            look = self.look()
        return look


def shared_bytes() -> int:
    """Shared memory of this process that is really there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem"):
            return int(line.split()[1]) << 10
    return 0


def is_settled(look: dict[str, int], zero_pages: int) -> bool:
    """Nothing is held but pages in use, and the zero page where there is one."""
    only_used = look["parked_pages"] == look["retired_pages"] == 0 and look["held_pages"] == look["used_pages"]
    return only_used and look["lease_bytes"] == (look["used_pages"] + zero_pages) * look["step_bytes"]


class Peak:
    """The largest number of held pages while the block runs."""

    def __init__(self, engine: Engine) -> None:
        self._pool = engine.memory.pool if engine.memory else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.pages = 0

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._pool is not None and not self._stop.wait(0.005):
            self.pages = max(self.pages, self._pool.ledger.held_pages)


def generate(engine: Engine) -> dict[str, Any]:
    """All prompts in one batch."""
    prompts = load_prompts()[: engine.case.prompts]
    before = shared_bytes()
    with Peak(engine) as peak:
        tokens = engine.tokens(prompts)
    result: dict[str, Any] = {
        "tokens": tokens,
        "preemptions": engine.metric("vllm:num_preemptions"),
        "hits": engine.metric("vllm:prefix_cache_hits"),
        "scheduler": type(engine.scheduler).__mro__[1].__name__,
        "peak_pages": peak.pages,
    }
    if engine.memory:
        result["line"] = engine.memory.describe()
        zero_pages = int("KVCACHED_ZERO_BACKING" in engine.case.settings)
        settled = engine.wait_for(lambda look: is_settled(look, zero_pages))
        result |= {
            "settled": settled,
            "counted": engine.memory.pool.tally.preemptions,
            "stamps_read": engine.stamps_read(),
            "shared_before": before,
            "shared_after": shared_bytes(),
        }
    return result


def real_text(engine: Engine) -> dict[str, Any]:
    """Prompts alone and all as one text, longer than a sliding window; then that again, for the prefix cache."""
    prompts = load_prompts()[: engine.case.prompts]
    whole = "\n".join(prompts)
    asked = ["One, two, three, four,", whole, *prompts]
    with Peak(engine) as peak:
        tokens = engine.tokens(asked) + engine.tokens([whole], 4)
    tokenizer = engine.llm.get_tokenizer()
    result = {
        "tokens": tokens,
        "first": tokenizer.decode(tokens[0]),
        "longest": max(len(tokenizer.encode(prompt)) for prompt in asked),
        "window": engine.llm.llm_engine.vllm_config.model_config.get_sliding_window(),
        "preemptions": engine.metric("vllm:num_preemptions"),
        "hits": engine.metric("vllm:prefix_cache_hits"),
        "peak_pages": peak.pages,
    }
    if engine.memory:
        result |= {"settled": engine.wait_for(lambda look: is_settled(look, 0)), "line": engine.memory.describe()}
        result["stamps_read"] = engine.stamps_read()
    return result


def score(engine: Engine) -> dict[str, Any]:
    """For each list of continuations the most by which one of its tokens is less likely, given all before it, than the likeliest."""
    from vllm import SamplingParams

    encode = engine.llm.get_tokenizer().encode
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    worst = []
    for answers in engine.case.continuations:
        asked = [encode(prompt) + said for prompt, said in zip(load_prompts(), answers, strict=False)]
        scored = engine.llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)
        worst.append(max(_gap(result, len(said)) for result, said in zip(scored, answers, strict=True)))
    return {"worst": worst}


def _gap(result: Any, tokens: int) -> float:
    places = list(zip(result.prompt_token_ids, result.prompt_logprobs, strict=True))[-tokens:]
    return max(max(entry.logprob for entry in found.values()) - found[token].logprob for token, found in places)


def hopeless(engine: Engine) -> dict[str, Any]:
    """A prompt that can never fit among others that do, and a request that outgrows the pool."""
    from vllm.exceptions import VLLMValidationError
    from vllm.platforms import current_platform

    short, long = "What is water made of?", "word " * 600
    try:
        refused = f"no error: {engine.generate([long], max_tokens=8)}"
    except VLLMValidationError as error:
        refused = str(error)
    type(current_platform).kvcached_prompt_check = None  # what follows is what a scheduler does that meets such a request
    answers = engine.generate([short, long, short], max_tokens=8)
    outgrown = engine.generate([short], max_tokens=2_000)
    after = engine.generate([short], max_tokens=8)
    return {
        "reasons": [answer.finish_reason for answer in answers],
        "why": str(answers[1].stop_reason),
        "refused": refused,
        "outgrown": outgrown[0].finish_reason,
        "outgrown_tokens": len(outgrown[0].token_ids),
        "short": [list(answers[0].token_ids), list(answers[2].token_ids), list(after[0].token_ids)],
        "look": engine.wait_for(lambda look: look["owned_blocks"] <= 1),
    }


def stray_write(engine: Engine) -> dict[str, Any]:
    """Between two steps somebody writes a few bytes too many behind the null block, which is always in use."""
    from kvcached.engines.canary import TorchBytes
    from kvcached.engines.vllm.placement import Allocation

    prompts = load_prompts()[:2]
    before = engine.tokens(prompts, 4)
    geometry, memory = engine.memory.pool.geometry, engine.worker_memory
    place = geometry.block_bytes - GUARD_BYTES
    by_torch = TorchBytes(memory._tensor(memory._mapper, Allocation(geometry.range_bytes, 0)))
    stamps = [by_torch.read([place], GUARD_BYTES), memory._canary._memory.read([place], GUARD_BYTES)]
    by_torch.write([place + 1, place], [b"\xab\xab", b"\xab\xab"])
    try:
        said = f"no error: {engine.tokens(prompts, 4)}"
    except InvariantBroken as error:
        said = str(error)
    return {"before": before, "said": said, "reads_alike": stamps[0] == stamps[1] != [None]}


def idle_limit(engine: Engine) -> dict[str, Any]:
    """An idle engine whose prefix cache fills the pool obeys a lower limit, then a higher one; outputs stay right."""
    prompts = load_prompts()[: engine.case.prompts]
    first = engine.tokens(prompts)
    full = engine.look()
    step = full["step_bytes"]
    low = 3 * step
    begin = time.monotonic()
    engine.limit(low)
    lowered = engine.wait_for(lambda look: look["held_pages"] * step <= low and look["lease_bytes"] <= low)
    took_s = time.monotonic() - begin
    under_limit = engine.tokens(prompts[:8])
    engine.limit(1 << 60)
    raised = engine.look()
    again = engine.tokens(prompts)
    return {
        "first": first,
        "again": again,
        "under_limit": under_limit,
        "full": full,
        "lowered": lowered,
        "raised": raised,
        "took_s": took_s,
        "low_bytes": low,
        "preemptions": engine.metric("vllm:num_preemptions"),
    }


def reset(engine: Engine) -> dict[str, Any]:
    """Reset of the prefix cache, then sleep and wake-up."""
    prompts = load_prompts()[: engine.case.prompts]
    first = engine.tokens(prompts)
    filled = engine.look()
    done = engine.llm.reset_prefix_cache()
    emptied = engine.look()
    again = engine.tokens(prompts)
    engine.llm.sleep(level=1)
    asleep = engine.wait_for(lambda look: is_settled(look, 0) and look["held_pages"] <= 1)
    engine.llm.wake_up()
    awake = engine.tokens(prompts)
    return {"first": first, "again": again, "awake": awake, "done": done, "filled": filled, "emptied": emptied, "asleep": asleep}
