# SPDX-License-Identifier: Apache-2.0
"""Models small enough for SGLang on a CPU, with weights spread so widely that attention to a wrong KV byte changes the tokens.

As a program: `python tiny_models.py DIR KIND...` makes DIR/KIND for each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SPREAD = 0.12
VOCABULARY = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
DEEPSEEK: dict[str, Any] = {
    **{name: value for name, value in SHAPE.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 2,  # no layer has experts
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
GPT_OSS: dict[str, Any] = {
    **SHAPE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}
QWEN3_NEXT: dict[str, Any] = {
    **SHAPE,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def model_of(kind: str) -> Any:
    import transformers

    configs = {
        "llama": lambda: transformers.LlamaConfig(**SHAPE),
        "threelayers": lambda: transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 3}),
        "qwen3": lambda: transformers.Qwen3Config(**SHAPE),
        "deepseek": lambda: transformers.DeepseekV2Config(**DEEPSEEK),
        "gptoss": lambda: transformers.GptOssConfig(**GPT_OSS),
        "qwen3next": lambda: transformers.Qwen3NextConfig(**QWEN3_NEXT),
    }
    return transformers.AutoModelForCausalLM.from_config(configs[kind]())


def make(kind: str, folder: Path, seed: int = 0) -> None:
    """Write config and weights, float32."""
    import torch

    torch.manual_seed(seed)
    model = model_of(kind).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, SPREAD)
    model.save_pretrained(folder)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make(name, Path(sys.argv[1]) / name)
