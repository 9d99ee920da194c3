"""Configurations by name: the small model that ships with the library and a smaller one for tests and first tries."""

from __future__ import annotations

from typing import Any

from dsa_jax.models.config import ModelConfig

_SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 64,
    "index_hadamard": True,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}

_TINY = _SMALL | {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
    "max_position_embeddings": 256,
    "rope_parameters": _SMALL["rope_parameters"] | {"original_max_position_embeddings": 64},
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
}

_TINY_GLM = _TINY | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "index_topk_freq": 3,
    "index_skip_topk_offset": 2,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}

PRESETS: dict[str, dict[str, Any]] = {"small": _SMALL, "tiny": _TINY, "tiny-glm": _TINY_GLM}
"""``small`` is the shipped model; ``tiny`` and ``tiny-glm`` (shared layers) have the same parts, smaller."""


def preset(name: str) -> ModelConfig:
    """Configuration called ``name``.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: no model is called {name!r}; choose one of {', '.join(PRESETS)}")
    return ModelConfig.from_hf(PRESETS[name])
