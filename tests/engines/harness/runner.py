# SPDX-License-Identifier: Apache-2.0
"""The engine's process: runs cases one after another and appends one line of JSON for each, so that a crash loses only its own.

python -m harness.runner CASES.json RESULTS.jsonl MODELS
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from harness import ranks, scenarios
from harness.cases import Case
from kvcached.testing.models import ensure_model


def main(cases_path: str, results_path: str, models: str) -> None:
    cases = [Case(**record) for record in json.loads(Path(cases_path).read_text())]
    for model in sorted({case.model for case in cases}):
        ensure_model(model, Path(models) / model)
    share_what_engines_repeat()
    before = cases[0].model
    with Path(results_path).open("a", encoding="utf-8") as results:
        for case in cases:
            if case.model != before:
                forget_groups()
            before = case.model
            result = run(case, Path(models))
            results.write(json.dumps({"name": case.name, **result}) + "\n")
            results.flush()


def share_what_engines_repeat() -> None:
    """vLLM looks at a model's class in a process of its own, half a minute for each; here it is imported anyway. And it registers its
    kernels for every engine, which only the first time goes well in all cases.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    registry._run_in_subprocess = lambda look: look()
    register = getattr(CpuPlatform, "register_triton_kernel_overrides", None)  # since 0.32
    if register is not None:
        CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(register))


def forget_groups() -> None:
    """vLLM makes its groups of ranks for the first model of a process; one with experts needs more of them."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def run(case: Case, models: Path) -> dict[str, Any]:
    """A card of its own for each case: some differ in their cards' sizes."""
    begin = time.monotonic()
    settings = case.settings | {"KVCACHED_RUN_DIR": tempfile.mkdtemp(prefix="run", dir=Path.cwd())}
    before = dict(os.environ)
    os.environ.update(settings)
    engine = None
    try:
        engine = scenarios.Engine(make_llm(case, models), case)
        result = (getattr(scenarios, case.scenario, None) or getattr(ranks, case.scenario))(engine)
    except Exception:  # noqa: BLE001  # whatever it is, the test that asked for it shows it
        result = {"error": traceback.format_exc()}
    finally:
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        for name in settings:
            del os.environ[name]
            os.environ.update({name: before[name]} if name in before else {})
    return {**result, "seconds": time.monotonic() - begin}


def make_llm(case: Case, models: Path) -> Any:
    from vllm import LLM
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.__dict__["check_and_update_config"].__func__

    def with_async(cls: Any, vllm_config: Any) -> None:
        """The CPU platform switches async scheduling off, which the engine itself can do there."""
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    if case.async_scheduling:
        CpuPlatform.check_and_update_config = classmethod(with_async)
    try:
        return LLM(model=str(models / case.model), disable_log_stats=False, **case.engine_options)
    finally:
        CpuPlatform.check_and_update_config = classmethod(stock)


if __name__ == "__main__":
    main(*sys.argv[1:])
