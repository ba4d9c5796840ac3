# SPDX-License-Identifier: Apache-2.0
"""One SGLang engine in a process of its own, for `engine_sglang.py`: a JSON line for each command, and for each answer.

Commands come on standard input. Answers go to a pipe of their own, whose number is the first argument: what the engine and its
processes print goes to a log file and cannot get between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
LOG_LINES = 40
NOISE = ("Ignore import", "UserWarning", "warnings.warn(")
PLUGIN = '''"""Two things that a benchmark needs inside SGLang's scheduler process: weights that matter, and samples of what it does."""

import collections, json, os, sys, threading, time


def spread(result, model, *args, **kwargs):
    """Dummy weights are near zero: attention would not matter to the tokens."""
    import torch

    parameters = [parameter for parameter in model.parameters() if parameter.dim() >= 2 and parameter.is_floating_point()]
    generator = torch.Generator(device=parameters[0].device)
    generator.manual_seed(0)
    for parameter in parameters:
        parameter.data.normal_(0, float(os.environ["SPREAD"]), generator=generator)


def sample(original, scheduler):
    """While the file `on` is there, note every 2 ms in which function of SGLang's or ours the scheduler's thread is."""
    folder, thread = os.environ["SAMPLES"], threading.get_ident()

    def whose(frame):
        while frame is not None:
            path = frame.f_code.co_filename
            for package in ("/kvcached/", "/sglang/"):
                if package in path:
                    return package.strip("/") + " " + path.rsplit("/", 1)[1] + ":" + frame.f_code.co_name
            frame = frame.f_back
        return "other"

    def watch():
        counts = collections.Counter()
        while True:
            if os.path.exists(folder + "/on"):
                counts[whose(sys._current_frames().get(thread))] += 1
                time.sleep(0.002)
                continue
            if counts:
                with open(folder + "/samples.new", "w") as file:
                    json.dump(counts, file)
                os.replace(folder + "/samples.new", folder + "/samples.json")
                counts.clear()
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    return original(scheduler)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", spread, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", sample, HookType.AROUND)
'''


def write_plugin(folder: Path) -> None:
    """A package that SGLang finds by its entry point when `folder` is on the path."""
    (folder / "spread-0.dist-info").mkdir(parents=True)
    (folder / "sglang_benchmark_plugin.py").write_text(PLUGIN)
    (folder / "spread-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: spread\nVersion: 0\n")
    (folder / "spread-0.dist-info" / "entry_points.txt").write_text("[sglang.srt.plugins]\nspread = sglang_benchmark_plugin:register\n")


class EngineFailed(Exception):
    """The engine has ended or does not answer; the text has the end of its log."""


class Child:
    """The benchmark's end. Whatever becomes of the engine, `kill` ends all of its processes."""

    def __init__(self, kind: str, arguments: dict[str, object], environment: dict[str, str], folder: Path, log: Path) -> None:
        self.kind = kind
        self.log = log
        self.samples = folder / f"samples-{kind}"
        self.samples.mkdir()
        self._answers, theirs = os.pipe()
        self._rest = b""
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs), json.dumps(arguments)],
                env={**os.environ, **environment, "SAMPLES": str(self.samples), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[theirs], start_new_session=True,
            )  # fmt: skip
        os.close(theirs)

    def ask(self, timeout_s: float, **command: object) -> dict[str, object]:
        self.tell(**command)
        return self.read(timeout_s)

    def tell(self, **command: object) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(self._report("has ended")) from None

    def read(self, timeout_s: float) -> dict[str, object]:
        """Raises `EngineFailed` when the engine ends or says nothing in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineFailed(self._report(f"has not answered within {timeout_s:.0f} s"))
            read = os.read(self._answers, 1 << 16)
            if not read:
                raise EngineFailed(self._report("has ended"))
            self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, object] = json.loads(line)
        return answer

    def _report(self, what: str) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if what.startswith("has not") else 5)
        code = self.process.returncode
        text = self.log.read_text(errors="replace").splitlines()
        lines = deque((line for line in text if not any(noise in line for noise in NOISE)), LOG_LINES)
        return "\n  ".join([f"the {self.kind} engine {what} (exit code {code}); the end of its log:", *lines])

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if word in line]

    def sampled(self, timeout_s: float = 5) -> dict[str, int]:
        """What the scheduler did while `samples / "on"` was there; call it after that file is gone."""
        file, deadline = self.samples / "samples.json", time.monotonic() + timeout_s
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        counts: dict[str, int] = json.loads(file.read_text()) if file.exists() else {}
        file.unlink(missing_ok=True)
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# ---------------------------------------------------------------------- the engine's end


def memory() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"card_free_gib": round(free / GIB, 2), "card_total_gib": round(total / GIB, 2)}


def prompts_of(command: dict[str, int]) -> list[list[int]]:
    rng = random.Random(command["seed"])
    low, high = command["vocabulary"] // 100, command["vocabulary"] * 3 // 4
    return [[rng.randrange(low, high) for _ in range(command["tokens_in"])] for _ in range(command["requests"])]


def run_at_once(engine: object, rows: list[list[int]], sampling: dict[str, object]) -> dict[str, object]:
    """All in one message: the scheduler sees the same queue in every run, so its batches are the same."""
    start = time.perf_counter()
    outputs = engine.generate(input_ids=rows, sampling_params=sampling)
    seconds = time.perf_counter() - start
    tokens = [list(output["output_ids"]) for output in outputs]
    digests = [hashlib.sha1(str(row).encode()).hexdigest()[:8] for row in tokens]
    return {"seconds": seconds, "digests": digests, "distinct": len({token for row in tokens for token in row})}


def run_at_rate(engine: object, rows: list[list[int]], sampling: dict[str, object], rate: float) -> dict[str, object]:
    """Requests arrive `rate` times a second, whether or not the engine keeps up. Seconds until the last is served, and of each."""

    async def one(number: int) -> float:
        await asyncio.sleep(number / rate)
        await engine.async_generate(input_ids=rows[number], sampling_params=sampling)
        return time.perf_counter() - start - number / rate

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(number) for number in range(len(rows))))

    start = time.perf_counter()
    latencies = engine.loop.run_until_complete(all_of_them())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "latency_s": statistics.median(latencies), "slowest_s": max(latencies)}


def obey(engine: object, command: dict[str, object]) -> dict[str, object]:
    if command["do"] == "flush":
        return {"flushed": bool(engine.flush_cache().success), **memory()}
    if command["do"] == "memory":
        return memory()
    sampling = {"temperature": 0, "max_new_tokens": command["tokens_out"], "ignore_eos": True}
    rows = prompts_of(command)
    ran = run_at_rate(engine, rows, sampling, command["rate"]) if command["rate"] else run_at_once(engine, rows, sampling)
    return {**ran, **memory()}


def main() -> None:
    descriptor, arguments = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(descriptor, False)
    answers = os.fdopen(descriptor, "w", buffering=1)
    start = time.time()
    import sglang

    imported = time.time()
    engine = sglang.Engine(**arguments)
    print(json.dumps({"import_s": imported - start, "up_s": time.time() - imported, **memory()}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":
            engine.shutdown()
            print(json.dumps(memory()), file=answers)
            return
        print(json.dumps(obey(engine, command)), file=answers)


if __name__ == "__main__":
    main()
