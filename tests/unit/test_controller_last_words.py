# SPDX-License-Identifier: Apache-2.0
"""The line that says why, among what engines really said."""

from __future__ import annotations

import pytest

from kvcached.controller.last_words import cause_of

TRACEBACK = """Traceback (most recent call last):
  File "/opt/vllm/v1/engine/core.py", line 100, in run_engine_core
    raise ValueError(words)"""
TOO_SMALL = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
VLLM_CORE = f"""(APIServer pid=7) WARNING 11-30 20:10:09 [system_utils.py:255] Found a limit that can cause `OSError: [Errno 24]`
(EngineCore pid=9) ERROR 11-30 20:10:09 [core.py:880] EngineCore failed to start.
(EngineCore pid=9) ERROR 11-30 20:10:09 [core.py:880] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-30 20:10:09 [core.py:880]   File "/opt/vllm/v1/engine/core.py", line 100, in run_engine_core
(EngineCore pid=9) ERROR 11-30 20:10:09 [core.py:880] {TOO_SMALL}
(EngineCore pid=9) Process EngineCore:
(APIServer pid=7) {TRACEBACK}
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
[W1130 20:10:11 ProcessGroup.cpp:1] Warning: a last word"""
PYDANTIC = """(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=7)   Value error, User-specified max_model_len (999999) is greater than the derived max_model_len (8192).
(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.12/v/value_error"""
SGLANG = f"""[2026-11-30 20:10:09] Scheduler hit an exception: {TRACEBACK}
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-11-30 20:10:09] Received sigquit from a child process. It usually means the child failed.
Killed"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (VLLM_CORE, TOO_SMALL),
        (PYDANTIC, "Value error, User-specified max_model_len (999999) is greater than the derived max_model_len (8192)."),
        (SGLANG, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
        ("usage: vllm [-h]\nvllm: error: unrecognized arguments: --no", "vllm: error: unrecognized arguments: --no"),
        ("KeyError: 'a'\nDuring handling of it:\nAssertionError\nbye", "AssertionError"),
        ("one\ntwo\nthree\nfour", "two / three / four"),
        ("", ""),
        ("OSError: " + "x" * 5_000, "OSError: " + "x" * 991),
    ],
)
def test_the_line_that_says_why(said: str, cause: str) -> None:
    assert cause_of(said.split("\n")) == cause
