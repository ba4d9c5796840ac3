# SPDX-License-Identifier: Apache-2.0
"""How the server of each engine is started on a CPU: the one place for what differs between them on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_UNWANTED = ("KVCACHED_", "ENABLE_KVCACHED", "VLLM_", "SGLANG_", "PYTHONDONTWRITEBYTECODE")  # a start without compiled files takes long
_POLITE = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each engine would bind itself to the same core
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a server must be able to run at once."""

    sequences: int
    sequence_tokens: int
    block_tokens: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class EngineKind:
    """An engine's server. `needed`: variables without which its command does not work on a CPU, beside the PYTHONPATH of its release."""

    title: str
    package: str
    environment_folder: str
    make_target: str
    program: tuple[str, ...]
    model_option: tuple[str, ...]
    options_of_shape: tuple[str, str, str]
    cpu_options: tuple[str, ...]
    needed: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, model: Path, name: str, port: int, shape: Shape) -> list[str]:
        """What follows the interpreter. Nothing in it is about KVCacheD."""
        where = ("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port))
        return [*self.program, *self.model_option, str(model), *where, *self.options(shape)]

    def options(self, shape: Shape) -> list[str]:
        """What says how large it is and that it runs on a CPU."""
        sizes = (shape.sequence_tokens, shape.sequences, shape.block_tokens)
        of_shape = [text for option, size in zip(self.options_of_shape, sizes, strict=True) for text in (option, str(size))]
        return [*of_shape, "--dtype", "float32", *self.cpu_options]

    def variables(self, release: Path, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of a server of this release on one thread, without settings from outside."""
        kept = {name: value for name, value in inherited.items() if not name.startswith(_UNWANTED)}
        return {**kept, **_POLITE, **self.needed, "PYTHONPATH": str(release)}

    def python(self, root: Path) -> Path:
        return root / self.environment_folder / "bin" / "python"

    def releases(self, root: Path) -> list[Path]:
        """The folders of the releases that are set up in this source tree, oldest first."""
        folders = (root / ".cache" / "engines").glob(f"{self.package}-*")
        found = [folder for folder in folders if (folder / self.package / "__init__.py").exists()]
        return sorted(found, key=lambda folder: [int(part) for part in folder.name.rpartition("-")[2].split(".") if part.isdecimal()])


VLLM = EngineKind(
    "vLLM",
    "vllm",
    ".venv-engines",
    "make engines",
    program=("-m", "vllm.entrypoints.cli.main", "serve"),
    model_option=(),
    options_of_shape=("--max-model-len", "--max-num-seqs", "--block-size"),
    cpu_options=("--enforce-eager",),
)
SGLANG = EngineKind(
    "SGLang",
    "sglang",
    ".venv-sglang",
    "make sglang",
    program=("-m", "sglang.launch_server"),
    model_option=("--model-path",),
    options_of_shape=("--context-length", "--max-running-requests", "--page-size"),
    cpu_options=(
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--mem-fraction-static", "0.2", "--chunked-prefill-size", "256", "--disable-cuda-graph", "--sleep-on-idle"),
    ),
    needed={"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"},  # or it binds threads to cores that others use too
)
KINDS = {kind.package: kind for kind in (VLLM, SGLANG)}
