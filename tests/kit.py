"""Tiny random models with low, partial and full acceptance, and the two oracles that every engine test uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

VOCAB = 97
PROMPT = [1, 5, 9, 33, 7, 52, 18, 3, 3, 44]
NUM_LAYERS = 4
EXIT_LAYER = 2

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama_config(**changes: Any) -> LlamaConfig:
    """L4: four layers, grouped heads, untied head."""
    return LlamaConfig(**{**COMMON, **changes})


def qwen3_config(**changes: Any) -> Qwen3Config:
    """Normed queries and keys; sliding attention in the upper layers, with a window shorter than the prompt."""
    peculiar = {"head_dim": 16, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return Qwen3Config(**{**COMMON, **peculiar, **changes})


def gemma2_config(**changes: Any) -> Gemma2Config:
    """Scaled embedding, two kinds of layers, a window shorter than the prompt, a soft-cap that changes the softmax."""
    peculiar = {"head_dim": 16, "sliding_window": 6, "final_logit_softcapping": 1.0, "query_pre_attn_scalar": 16}
    return Gemma2Config(**{**COMMON, **peculiar, **changes})


def gemma3_config(**changes: Any) -> Gemma3TextConfig:
    """A rotary table for each layer type, a window shorter than the prompt, and a soft-cap."""
    layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    peculiar = {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": layer_types,
        "final_logit_softcapping": 1.0,
        "query_pre_attn_scalar": 16,
    }
    return Gemma3TextConfig(**{**COMMON, **peculiar, **changes})


def gpt2_config(**changes: Any) -> GPT2Config:
    """Module names of its own, learned positions, attention scaled by the layer's index."""
    peculiar = {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": NUM_LAYERS,
        "n_head": 4,
        "n_positions": 64,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return GPT2Config(**{**peculiar, **changes})


CONFIGS = {
    "llama": llama_config,
    "qwen3": qwen3_config,
    "gemma2": gemma2_config,
    "gemma3_text": gemma3_config,
    "gpt2": gpt2_config,
}
# How far the weights are blown up from their initial scale, so that greedy output does not repeat one token.
SPREAD = 8.0


def build(config: PreTrainedConfig, seed: int = 0, spread: float = SPREAD, **loading: Any) -> PreTrainedModel:
    """Returns a random fp32 model in eval mode whose greedy output is varied."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, **loading).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(spread)
    return model


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Returns the list of decoder layers, the first list of modules that there is."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def scale_late_layers(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Multiplies the outputs of the blocks after the exit by `factor`: 0 gives ID, where exit and model agree, and
    a fraction gives MIX, where they agree in part."""
    names = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "fc_out", "dense", "dense_4h_to_h")
    with torch.no_grad():
        for layer in layers_of(model)[EXIT_LAYER:]:
            for name, parameter in layer.named_parameters():
                if any(part in names for part in name.split(".")):
                    parameter.mul_(factor)
                # Some norm the output of their blocks, which undoes a factor before it; Gemma by 1 + weight.
                if "post_" in name and "layernorm" in name:
                    if model.config.model_type.startswith("gemma"):
                        parameter.copy_((1 + parameter) * factor - 1)
                    elif model.config.model_type == "olmo2":
                        parameter.mul_(factor)
    return model


def l4(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """L4: an exit that agrees with the model by chance only."""
    return build(llama_config(**changes), seed)


def identical(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """ID: exit 2 equals the full model, so that every draft is accepted."""
    return scale_late_layers(l4(seed, **changes), 0.0)


def mixed(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """MIX: a part of the drafts is accepted."""
    return scale_late_layers(l4(seed, **changes), 0.3)


def prompt_tensor(tokens: list[int] | None = None) -> torch.Tensor:
    """Returns one row of token ids, `(1, tokens)`."""
    return torch.tensor([PROMPT if tokens is None else tokens])


def reference(model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int = 24, **arguments: Any) -> torch.Tensor:
    """REF: what plain greedy `generate` returns, `(batch, tokens)`."""
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": max_new_tokens, **arguments}
    return model.generate(ids, **options)


@torch.no_grad()
def without_cache(model: PreTrainedModel, tokens: list[int], max_new_tokens: int = 24) -> list[int]:
    """NC: an argmax loop that keeps nothing, the second oracle; returns the new tokens."""
    ids = list(tokens)
    for _ in range(max_new_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(tokens) :]


@torch.no_grad()
def is_greedy(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether `without_cache` would give these tokens, by one pass over all of them."""
    logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist() == list(tokens)


@contextmanager
def counted_layers(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts, by hooks, the tokens (rows × width) that pass each layer while the block runs."""
    counts = [0] * NUM_LAYERS

    def count(index: int) -> Any:
        def hook(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            counts[index] += arguments[0].shape[0] * arguments[0].shape[1]

        return hook

    handles = [layer.register_forward_pre_hook(count(index)) for index, layer in enumerate(layers_of(model))]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def rejected(family: str) -> PreTrainedModel:
    """A Llama or Gemma2 of which no exit ever agrees with the full model."""
    seed = {"llama": 11, "gemma2": 10}[family]
    return scale_late_layers(build(CONFIGS[family](), seed), 3.0)


def graded(family: str, grade: str) -> PreTrainedModel:
    """Returns a model of a family whose exit 2 is right never ("none"), sometimes ("some") or always ("all")."""
    if grade == "none":
        return rejected(family)
    return scale_late_layers(build(CONFIGS[family]()), {"some": 0.3, "all": 0.0}[grade])


def truncated(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Returns a copy of a model that ends after `num_layers` layers, with the same norm and head."""
    settings = model.config.to_dict()
    settings[model.config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = num_layers
    for name in {"layer_types", "no_rope_layers"} & set(settings):
        settings[name] = settings[name][:num_layers]
    config = type(model.config).from_dict(settings)
    short = AutoModelForCausalLM.from_config(config, attn_implementation=model.config._attn_implementation).eval()
    short.load_state_dict({name: model.state_dict()[name] for name in short.state_dict()})
    return short


def word_tokenizer(words: int = 90) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one word, w0, w1, …, for each id; smaller than the model's vocabulary by default."""
    backend = Tokenizer(models.WordLevel({f"w{token}": token for token in range(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")


def spelled(pieces: dict[int, bytes]) -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer in which some tokens are given bytes; the others are "a", "b", … or "<id>"."""
    symbols = bytes_to_unicode()
    vocabulary = {"".join(symbols[byte] for byte in piece): token for token, piece in pieces.items()}
    letters = iter("abcdef")
    for token in sorted(set(range(VOCAB)) - set(pieces)):
        vocabulary[next(letters, f"<{token}>")] = token
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
