"""A tiny configuration for every supported family that turns on what is peculiar to it, and what their tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
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
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
)

from layerskip.model.families import FAMILIES
from tests import kit

WINDOW = 6
# Weights so large that attention is not flat, so that windows and rotations count.
COMMON = {**kit.COMMON, "initializer_range": 0.2}


def mistral_config(**changes: Any) -> MistralConfig:
    """A window in every layer, shorter than the prompt; heads wider than their share of the hidden state."""
    return MistralConfig(**{**COMMON, "sliding_window": WINDOW, "head_dim": 16, **changes})


def mixtral_config(**changes: Any) -> MixtralConfig:
    """Experts, and a window in every layer."""
    peculiar = {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralConfig(**{**COMMON, **peculiar, **changes})


def qwen2_config(**changes: Any) -> Qwen2Config:
    """Biases in attention; a window in the upper layers alone."""
    peculiar = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return Qwen2Config(**{**COMMON, **peculiar, **changes})


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
    return Qwen3MoeConfig(**{**COMMON, **peculiar, **changes})


def phi3_config(**changes: Any) -> Phi3Config:
    """Fused projections, a partial rotation, and a window in every layer."""
    peculiar = {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}
    return Phi3Config(**{**COMMON, **peculiar, **changes})


def olmo2_config(**changes: Any) -> Olmo2Config:
    """Norms behind the blocks instead of before, and over all heads' queries and keys at once."""
    return Olmo2Config(**{**COMMON, **changes})


def smollm3_config(**changes: Any) -> SmolLM3Config:
    """Layers without rotation, which are those that slide."""
    peculiar = {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW}
    return SmolLM3Config(**{**COMMON, **peculiar, **changes})


def stablelm_config(**changes: Any) -> StableLmConfig:
    """A partial rotation, blocks in parallel, normed heads."""
    peculiar = {"partial_rotary_factor": 0.5, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}
    return StableLmConfig(**{**COMMON, **peculiar, **changes})


def granite_config(**changes: Any) -> GraniteConfig:
    """Multipliers of embedding, residuals, attention and logits."""
    peculiar = {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
    }
    return GraniteConfig(**{**COMMON, **peculiar, **changes})


def cohere_config(**changes: Any) -> CohereConfig:
    """Scaled logits, blocks in parallel, an interleaved rotation, normed heads."""
    return CohereConfig(**{**COMMON, "logit_scale": 0.25, "use_qk_norm": True, **changes})


def gpt_neox_config(**changes: Any) -> GPTNeoXConfig:
    """A partial rotation, blocks in parallel, fused projections."""
    own = {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}
    peculiar = {"rotary_pct": 0.5, "use_parallel_residual": True, "initializer_range": 0.15}
    return GPTNeoXConfig(**{**own, **peculiar, **changes})


def opt_config(**changes: Any) -> OPTConfig:
    """The 350m kind: an embedding narrower than the layers, norms behind the blocks, none before the head."""
    own = {name: kit.COMMON[name] for name in kit.COMMON if name not in ("intermediate_size", "num_key_value_heads")}
    peculiar = {
        "init_std": 0.1,
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        "max_position_embeddings": 64,
        "dropout": 0.0,
    }
    return OPTConfig(**{**own, **peculiar, **changes})


def falcon_config(**changes: Any) -> FalconConfig:
    """Layers that return a tuple, blocks in parallel with norms of their own, groups of heads."""
    own = {name: COMMON[name] for name in COMMON if name not in ("intermediate_size", "num_key_value_heads")}
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
        "initializer_range": 0.2,
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


def longrope_config(original: int) -> Phi3Config:
    """Phi-3 with another rotary table for sequences of more than `original` tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5],
        "long_factor": [3.0, 5.0],
        "original_max_position_embeddings": original,
    }
    lengths = {"original_max_position_embeddings": original, "max_position_embeddings": 128}
    return phi3_config(rope_parameters=rope, **lengths)


# The other kind of families that have two.
VARIANTS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mistral without a window": lambda: mistral_config(sliding_window=None),
    "mixtral without a window": lambda: mixtral_config(sliding_window=None),
    "qwen2 without a window": lambda: qwen2_config(use_sliding_window=False),
    "phi3 within its original length": lambda: longrope_config(64),
    "phi3 past its original length": lambda: longrope_config(8),
    "smollm3 without a window": lambda: smollm3_config(use_sliding_window=False),
    "stablelm with blocks in sequence": lambda: stablelm_config(
        use_parallel_residual=False, qk_layernorm=False, use_qkv_bias=False
    ),
    "cohere without normed heads": lambda: cohere_config(use_qk_norm=False),
    "cohere with a tied head": lambda: cohere_config(tie_word_embeddings=True),
    "gpt_neox with blocks in sequence": lambda: gpt_neox_config(use_parallel_residual=False),
    "opt 125m": lambda: opt_config(do_layer_norm_before=True, word_embed_proj_dim=32),
    "opt with a tied head": lambda: opt_config(tie_word_embeddings=True),
    "falcon 7b": lambda: falcon_config(new_decoder_architecture=False, multi_query=True, bias=False),
    "falcon with blocks in sequence": lambda: falcon_config(
        new_decoder_architecture=False, multi_query=False, parallel_attn=False, num_kv_heads=4
    ),
    "falcon with one norm": lambda: falcon_config(num_ln_in_parallel_attn=1),
}
IMPLEMENTATIONS = [(family, attention) for family in CONFIGS for attention in FAMILIES[family].attention]
ROTATED = [family for family in CONFIGS if FAMILIES[family].learned_positions is None]
WINDOWED = [family for family in CONFIGS if "sliding_attention" in FAMILIES[family].layer_types(CONFIGS[family]())]


# Models that tests share, so that none may change them


@cache
def built(name: str, attention: str | None = None) -> PreTrainedModel:
    """A random model of a family or variant."""
    loading = {} if attention is None else {"attn_implementation": attention}
    if name in kit.CONFIGS:
        return kit.build(kit.CONFIGS[name](), **loading)
    # Another seed for variants, with which `some` makes varied outputs of them.
    seed = 5 if name in VARIANTS else 0
    return with_biases(kit.build({**CONFIGS, **VARIANTS}[name](), seed, spread=1.0, **loading))


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model biases other than 0, with which models are made, and norms that differ from one another."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@cache
def some(name: str, attention: str | None = None) -> PreTrainedModel:
    """A model of a family or variant of which a part of the drafts is accepted."""
    return kit.scale_late_layers(copy.deepcopy(built(name, attention)), 0.3)


@cache
def cut(name: str) -> PreTrainedModel:
    """The model of `some` that ends after the exit layer."""
    return kit.truncated(some(name), kit.EXIT_LAYER)


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Returns what the model's own forward gives, without a cache, `(rows, width, vocabulary)`."""
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits
