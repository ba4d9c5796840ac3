#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the environment in which real SGLang runs on the CPU: one virtual environment, several SGLang releases beside it.

Usage: python3.11 scripts/setup_sglang.py [--versions 0.5.23 0.5.21 0.5.17 0.5.11] [--only-demo]

One environment (`.venv-sglang`) holds torch and what every release needs; each release lies with its own transformers in
`.cache/engines/sglang-X` and is chosen by putting that folder first on PYTHONPATH. SGLang has no build for a CPU without kernels: two
small shims (`tests/engines_sglang/shims`) stand in for what it imports and never calls. A second run finds its stamps and does nothing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from functools import partial
from typing import TYPE_CHECKING

from engine_environment import RELEASES, ROOT, TORCH, Environment, take_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENT = Environment(".venv-sglang")
TINY_MODELS = ROOT / ".cache" / "sglang-models"
SHIMS = ROOT / "tests" / "engines_sglang" / "shims"

VERSIONS = ("0.5.23", "0.5.21", "0.5.17", "0.5.11")
TRANSFORMERS = {(0, 5, 11): "5.6.0", (0, 5, 13): "5.8.1", (0, 5, 15): "5.12.1", (0, 5, 22): "5.19.0"}  # from this release on
OLDER = ("tokenizers==0.22.2", "huggingface-hub>=1.5,<2")  # what transformers before 5.19 wants
# SGLang's own list, less its kernels and what only other models than language models need, plus what it imports and does not list.
PACKAGES = (
    *("transformers==5.19.0", "aiohttp", "fastapi", "uvicorn", "uvloop", "pyzmq", "psutil", "orjson", "msgspec", "pydantic"),
    *("python-multipart", "partial_json_parser", "pillow", "prometheus-client", "requests", "regex", "packaging", "scipy", "setproctitle"),
    *("pybase64", "python-dateutil<3", "tqdm", "sentencepiece==0.2.1", "tiktoken", "einops", "interegular", "xxhash", "zstandard"),
    *("IPython", "llguidance", "gguf", "distro", "xgrammar==0.2.7", "openai==2.8.0", "openai-harmony==0.0.4"),
    *("compressed-tensors==0.18.0", "dill", "cffi", "lxml", "pycryptodomex", "jsonschema", "numpy", "ninja>=1.11", "cmake>=3.22"),
    *("scikit-build-core>=0.10,<1", "pytest>=8,<10", "pytest-timeout>=2.3,<3"),
)
WITHOUT_DEPENDENCIES = (
    *("torchvision==0.28.0", "watchfiles", "blobfile==3.0.0", "soundfile==0.13.1", "apache-tvm-ffi==0.1.11", "easydict", "timm==1.0.25"),
    "accelerate",  # transformers wants it to read the file that the real model is made from
)
KINDS = ("llama", "threelayers", "qwen3", "deepseek", "gptoss", "qwen3next")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), metavar="X.Y.Z", help="SGLang releases to unpack")
    parser.add_argument("--only-demo", action="store_true", help="the first of them and the real model: what the demo needs")
    asked = parser.parse_args()
    if sys.version_info[:2] < (3, 11):
        parser.error("the engines need Python 3.11 or newer")
    tiny_models, models = ((), ("smollm2",)) if asked.only_demo else (KINDS, ("llama", "smollm2"))
    take_steps(
        "sglang",
        [
            (f"environment {ENVIRONMENT.folder.name} (torch and more)", make_environment),
            *((f"SGLang {version}", partial(unpack, version)) for version in asked.versions[: 1 if asked.only_demo else None]),
            ("kvcached and the shims in it", install_package),
            *((("models without a tokenizer", partial(make_tiny_models, tiny_models)),) if tiny_models else ()),
            *((f"model {kind}, with a tokenizer", partial(ENVIRONMENT.make_model, kind)) for kind in models),
        ],
    )
    return 0


def make_environment() -> bool:
    """Install what every release needs. Returns False when the stamp says that it is there."""
    without = ["--no-deps", *WITHOUT_DEPENDENCIES]
    return ENVIRONMENT.make("kvcached-sglang.stamp", [TORCH, "numpy"], [TORCH, *PACKAGES], without)


def unpack(version: str) -> bool:
    """Install one release and its transformers in a folder. Returns False when it is there. The folder appears whole or not at all."""
    target, scratch = RELEASES / f"sglang-{version}", RELEASES / f".unpacking-sglang-{version}"
    if (target / "sglang" / "__init__.py").exists():
        return False
    shutil.rmtree(scratch, ignore_errors=True)
    number = tuple(int(part) for part in version.split(".")[:3])
    transformers = TRANSFORMERS[max(first for first in TRANSFORMERS if first <= number)]
    older = (f"transformers=={transformers}", *OLDER) if number < (0, 5, 22) else ()
    ENVIRONMENT.install("--no-deps", "--target", str(scratch), f"sglang=={version}", *older)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    return True


def install_package() -> bool:
    """Install this package, editable, and the line that loads the shims. Returns False when that was done."""
    (site_packages,) = ENVIRONMENT.folder.glob("lib/python3.*/site-packages")
    (site_packages / "sglang_on_cpu.pth").write_text(f"{SHIMS}\nimport sglang_on_cpu\n")
    return ENVIRONMENT.install_package()


def make_tiny_models(kinds: Sequence[str]) -> bool:
    """Make the small models without a tokenizer. Returns False when they are there."""
    missing = [kind for kind in kinds if not (TINY_MODELS / kind / "config.json").exists()]
    if missing:
        ENVIRONMENT.run(str(ENVIRONMENT.python), str(ROOT / "tests" / "engines_sglang" / "tiny_models.py"), str(TINY_MODELS), *missing)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
