# SPDX-License-Identifier: Apache-2.0
"""One small model of each kind of KV cache, as numbers: windows, shared layers, latents, states. `models.py` gives them weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

VOCABULARY: Final = 512
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    # Wide enough for queries and keys to disagree: with the usual 0.02 attention is nearly uniform and a wrong KV byte goes unseen.
    "initializer_range": 0.08,
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Architecture:
    """The names of transformers' module and classes, and what differs from `SHAPE`; `without`: what the configuration does not take."""

    module: str
    config: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in (SHAPE | self.changes).items() if name not in self.without}


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaConfig", "LlamaForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
    "mixtral": Architecture(
        "mixtral", "MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "mistral": Architecture("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": 128}),
    # Three groups of two layers, of which one lacks a layer.
    "gemma3": Architecture(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 5, "sliding_window": 128, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]},
    ),
    # The last two layers read what an earlier layer of their kind wrote.
    "gemma3n": Architecture(
        "gemma3n",
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 6,
            "intermediate_size": [512] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "sliding_window": 128,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 16,
            "tie_word_embeddings": True,
        },
    ),
    # Its full layers have another head size and another number of heads than its sliding ones, so blocks of unlike bytes.
    "gemma4": Architecture(
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 6,
            "sliding_window": 128,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "global_head_dim": 128,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "deepseek": Architecture(
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        ("head_dim",),
    ),
    # Three groups of two layers: with one layer each all groups would share one plane, and there would be one layout only.
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 6,
            "layer_types": ["linear_attention", "linear_attention", FULL] * 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    # Attention and a Mamba-2 state in every layer.
    "falconh1": Architecture(
        "falcon_h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_ssm": 512, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 32},
    ),
    "jamba": Architecture(
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 8,
            "expert_layer_offset": 7,
            "num_experts": 2,
            "mamba_d_state": 16,
            "use_mamba_kernels": False,
        },
        ("head_dim",),
    ),
    "nemotronh": Architecture(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp", "attention", "mamba"],
            "num_hidden_layers": 6,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 32,
            "n_groups": 1,
            "chunk_size": 32,
        },
    ),
    "zamba2": Architecture(
        "zamba2",
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 32,
            "mamba_headdim": 64,
            "mamba_ngroups": 1,
            "chunk_size": 32,
            "n_mamba_heads": 8,
            "num_key_value_heads": 4,
            "attention_head_dim": 128,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
        },
        ("head_dim",),
    ),
    "gptoss": Architecture(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {"sliding_window": 128, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
