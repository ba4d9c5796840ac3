# SPDX-License-Identifier: Apache-2.0
"""What an engine is asked to do: prompts, options and settings, as plain data that travels to the engine's process as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).resolve().parent.parent / "prompts.txt"
# Small batches, so that long prompts are prefilled in chunks beside running ones; one thread and float32, so that tokens are exact.
BASE_OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "seed": 0,
}


@dataclass(frozen=True)
class Case:
    """One engine: `scenario` names a function of `scenarios.py`. `settings` are environment variables for the adapter."""

    name: str
    scenario: str = "generate"
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    async_scheduling: bool = False
    max_tokens: int = 24
    prompts: int = 1_000
    limit_bytes: int = 0  # of a scenario that sets one
    neighbour_bytes: int = 0  # of a scenario with another process on the second card
    continuations: list[list[list[int]]] = field(default_factory=list)  # of a scenario that scores what engines said to the prompts

    @property
    def engine_options(self) -> dict[str, Any]:
        return BASE_OPTIONS | self.options


def load_prompts(path: Path = PROMPTS) -> list[str]:
    """The prompts, with shared passages put in."""
    passages: dict[str, str] = {}
    prompts: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, equals, text = line.partition(" = ")
        if equals and name.isidentifier() and not prompts:
            passages[name] = text
        elif line and not line.startswith("#"):
            prompts.append(_filled(line, passages))
    return prompts


def _filled(line: str, passages: dict[str, str]) -> str:
    for name, text in passages.items():
        line = line.replace(f"<{name}>", f"{text} ")
    return line
