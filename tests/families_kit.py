"""A tiny configuration for every supported family that turns on what is peculiar to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    CohereConfig,
    FalconConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
)

from tests import kit

WINDOW = 6


def mistral_config(**changes: Any) -> MistralConfig:
    """A window in every layer, shorter than the prompt; heads wider than their share of the hidden state."""
    return MistralConfig(**{**kit.COMMON, "sliding_window": WINDOW, "head_dim": 16, **changes})


def mixtral_config(**changes: Any) -> MixtralConfig:
    """Experts, and a window in every layer."""
    peculiar = {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralConfig(**{**kit.COMMON, **peculiar, **changes})


def qwen2_config(**changes: Any) -> Qwen2Config:
    """Biases in attention; a window in the upper layers alone."""
    peculiar = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return Qwen2Config(**{**kit.COMMON, **peculiar, **changes})


def qwen3_moe_config(**changes: Any) -> Qwen3MoeConfig:
    """Experts in some layers, normed queries and keys, a window in every layer."""
    peculiar = {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**{**kit.COMMON, **peculiar, **changes})


def phi3_config(**changes: Any) -> Phi3Config:
    """Fused projections, a partial rotation, and a window in every layer."""
    peculiar = {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}
    return Phi3Config(**{**kit.COMMON, **peculiar, **changes})


def olmo2_config(**changes: Any) -> Olmo2Config:
    """Norms behind the blocks instead of before, and over all heads' queries and keys at once."""
    return Olmo2Config(**{**kit.COMMON, **changes})


def smollm3_config(**changes: Any) -> SmolLM3Config:
    """Layers without rotation, which are those that slide."""
    peculiar = {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW}
    return SmolLM3Config(**{**kit.COMMON, **peculiar, **changes})


def stablelm_config(**changes: Any) -> StableLmConfig:
    """A partial rotation, blocks in parallel, normed heads."""
    peculiar = {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}
    return StableLmConfig(**{**kit.COMMON, **peculiar, **changes})


def granite_config(**changes: Any) -> GraniteConfig:
    """Multipliers of embedding, residuals, attention and logits."""
    peculiar = {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
    }
    return GraniteConfig(**{**kit.COMMON, **peculiar, **changes})


def cohere_config(**changes: Any) -> CohereConfig:
    """Scaled logits, blocks in parallel, an interleaved rotation, normed heads."""
    return CohereConfig(**{**kit.COMMON, "logit_scale": 0.25, "use_qk_norm": True, **changes})


def gpt_neox_config(**changes: Any) -> GPTNeoXConfig:
    """A partial rotation, blocks in parallel, fused projections."""
    own = {name: value for name, value in kit.COMMON.items() if name != "num_key_value_heads"}
    return GPTNeoXConfig(**{**own, "rotary_pct": 0.5, "use_parallel_residual": True, **changes})


def opt_config(**changes: Any) -> OPTConfig:
    """The 350m kind: an embedding narrower than the layers, norms behind the blocks, none before the head."""
    own = {name: kit.COMMON[name] for name in kit.COMMON if name not in ("intermediate_size", "num_key_value_heads")}
    peculiar = {
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    }
    return OPTConfig(**{**own, **peculiar, **changes})


def falcon_config(**changes: Any) -> FalconConfig:
    """Layers that return a tuple, blocks in parallel with norms of their own, groups of heads."""
    own = {name: kit.COMMON[name] for name in kit.COMMON if name not in ("intermediate_size", "num_key_value_heads")}
    peculiar = {"ffn_hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    return FalconConfig(**{**own, **peculiar, **changes})


def gptj_config(**changes: Any) -> GPTJConfig:
    """A rotary table of fixed length over a part of each head, blocks in parallel, a bias in the head."""
    peculiar = {
        "vocab_size": kit.VOCAB,
        "n_embd": 32,
        "n_layer": kit.NUM_LAYERS,
        "n_head": 4,
        "n_inner": 64,
        "n_positions": 64,
        "rotary_dim": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPTJConfig(**{**peculiar, **changes})


CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    **kit.CONFIGS,
    "mistral": mistral_config,
    "mixtral": mixtral_config,
    "qwen2": qwen2_config,
    "qwen3_moe": qwen3_moe_config,
    "phi3": phi3_config,
    "olmo2": olmo2_config,
    "smollm3": smollm3_config,
    "stablelm": stablelm_config,
    "granite": granite_config,
    "cohere": cohere_config,
    "gpt_neox": gpt_neox_config,
    "opt": opt_config,
    "falcon": falcon_config,
    "gptj": gptj_config,
}
