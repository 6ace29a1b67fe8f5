"""The families of models that can be run in spans of layers: everything in which they differ, in one table.

A family stands in `FAMILIES` because `tests/model/test_families.py` shows, on a tiny configuration that turns on its
peculiarity, that the exit logits at E equal those of the same model cut to E layers. Everything else is refused by
name.

To bring a new family in, read its `modeling_*.py` in transformers and answer the questions that the attributes of
`Family` ask: what do embedding, layers, norm and head do beyond Llama's? Granite, for one, multiplies its embedding and
divides its logits; what its layers do by themselves needs no entry:

    "granite": Family(scale_embedding=_multiplied, finish_logits=_divided),

Then add a tiny configuration that turns all of it on to `CONFIGS` in `tests/families_kit.py`. The tests that go over
`CONFIGS` will say what was missed, in generation and in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

# transformers.modeling_utils imports accelerate, which `import layerskip` must not load.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
ALIBI = "its attention adds a bias for every distance (ALiBi), which masks here do not carry"
# Stands for a norm or projection that a model does not have; one for all, so that it is the same at every look.
ABSENT = nn.Identity()


def _unchanged(values: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    return values


def _soft_capped(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _multiplied(embedded: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    return embedded * config.embedding_multiplier


def _divided(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    return logits / config.logits_scaling


def _scaled(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    return logits * config.logit_scale


def _all_full(config: PreTrainedConfig) -> tuple[str, ...]:
    return (FULL_ATTENTION,) * config.num_hidden_layers


def _all_alike(config: PreTrainedConfig) -> tuple[str, ...]:
    return (FULL_ATTENTION if config.sliding_window is None else SLIDING_ATTENTION,) * config.num_hidden_layers


def _from_config(config: PreTrainedConfig) -> tuple[str, ...]:
    return tuple(config.layer_types)


def _at(module: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module(positions)
    return found


def _behind_a_mask(module: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    # Positions come instead of the mask that the module would count them in.
    found: torch.Tensor = module(None, position_ids=positions)
    return found


def _nothing_refused(config: PreTrainedConfig) -> None:
    return None


def _refuse_bidirectional(config: PreTrainedConfig) -> str | None:
    return (
        "use_bidirectional_attention=True (tokens see what follows them)"
        if config.use_bidirectional_attention
        else None
    )


def _refuse_cross_attention(config: PreTrainedConfig) -> str | None:
    return "add_cross_attention=True (there is no encoder to attend to)" if config.add_cross_attention else None


def _refuse_alibi(config: PreTrainedConfig) -> str | None:
    return f"alibi=True ({ALIBI})" if config.alibi else None


def _refuse_no_scale(config: PreTrainedConfig) -> str | None:
    return "logit_scale=None (transformers multiplies with it)" if config.logit_scale is None else None


@dataclass(frozen=True)
class Family:
    """Where a family keeps its parts, and what it does beyond embedding, layers, norm and head.

    Attributes:
        decoder: attribute of the causal LM that holds the embedding, the layers and the final norm.
        layers: attribute of the decoder with the list of decoder layers.
        norm: attribute of the decoder with the final norm; a model may have none there.
        project_in: attribute of the decoder with a projection from the embedding's width to the layers'; `None` for
            none, and a model may have none there.
        project_out: the same between the final norm and the head.
        scale_embedding: what is done to embedded tokens outside of the embedding module.
        learned_positions: attribute of the decoder with an embedding of positions that is added to the tokens', or
            `None` where positions are rotary.
        embed_positions: calls that embedding.
        rotary_by_layer_type: the rotary module takes the layer type as a third argument.
        rotary_ends: the rotary module holds a table of `max_position_embeddings` positions and knows none behind it.
        layer_types: the attention type of each layer, from the configuration.
        cache_argument: what the layers call the cache.
        layer_arguments: what the layers want named besides.
        returns_tuple: the layers return their output as the first of several values.
        finish_logits: what follows the head (a soft-cap or a scale); it belongs to the exit head as well.
        attention: the attention implementations that give the family's values.
        keeps_packed_apart: in training, rows that are packed into one are told apart by their position ids.
        refuses: the setting of the configuration that cannot be run, as `name=value (reason)`, or `None`.
    """

    decoder: str = "model"
    layers: str = "layers"
    norm: str = "norm"
    project_in: str | None = None
    project_out: str | None = None
    scale_embedding: Callable[[torch.Tensor, PreTrainedConfig], torch.Tensor] = _unchanged
    learned_positions: str | None = None
    embed_positions: Callable[[nn.Module, torch.Tensor], torch.Tensor] = _at
    rotary_by_layer_type: bool = False
    rotary_ends: bool = False
    layer_types: Callable[[PreTrainedConfig], tuple[str, ...]] = _all_full
    cache_argument: str = "cache"
    layer_arguments: Mapping[str, Any] = field(default_factory=dict)
    returns_tuple: bool = False
    finish_logits: Callable[[torch.Tensor, PreTrainedConfig], torch.Tensor] = _unchanged
    attention: tuple[str, ...] = ("sdpa", "eager")
    keeps_packed_apart: bool = True
    refuses: Callable[[PreTrainedConfig], str | None] = _nothing_refused

    def part(self, model: PreTrainedModel, name: str | None) -> nn.Module:
        """Returns the module `name` of the decoder of `model`; `ABSENT` where family or model has none."""
        if name is None:
            return ABSENT
        found: nn.Module | None = getattr(model.get_submodule(self.decoder), name)
        return ABSENT if found is None else found

    def run_layer(
        self,
        layer: nn.Module,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """Returns the output of one decoder layer, `(rows, width, hidden)`.

        Args:
            layer: the module.
            hidden: the output of the layer before, `(rows, width, hidden)`.
            mask: additive, or `None`.
            cache: that the layer updates.
            rotary: the rows of the rotary tables for these tokens; `None` where positions are learned.
        """
        arguments = {"attention_mask": mask, self.cache_argument: cache, "use_cache": True, **self.layer_arguments}
        if rotary is not None:
            arguments["position_embeddings"] = rotary
        return self.state(layer(hidden, **arguments))

    def state(self, output: Any) -> torch.Tensor:
        """Returns the hidden state in what a layer returns."""
        state: torch.Tensor = output[0] if self.returns_tuple else output
        return state

    def skipped(self, state: torch.Tensor) -> Any:
        """Returns what a layer would return that passes on what it was given."""
        return (state, None) if self.returns_tuple else state

    def with_state(self, output: Any, state: torch.Tensor) -> Any:
        """Returns what a layer would return with another hidden state in it."""
        return (state, *output[1:]) if self.returns_tuple else state


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(layer_types=_all_alike),
    "mixtral": Family(layer_types=_all_alike),
    "qwen2": Family(layer_types=_from_config),
    "qwen3": Family(layer_types=_from_config),
    "qwen3_moe": Family(layer_types=_all_alike),
    "phi3": Family(layer_types=_all_alike),
    "olmo2": Family(),
    "smollm3": Family(layer_types=_from_config),
    "stablelm": Family(),
    "granite": Family(scale_embedding=_multiplied, finish_logits=_divided),
    "cohere": Family(finish_logits=_scaled, refuses=_refuse_no_scale),
    # sdpa has no soft-cap on attention scores.
    "gemma2": Family(layer_types=_from_config, finish_logits=_soft_capped, attention=("eager",)),
    "gemma3_text": Family(
        layer_types=_from_config,
        finish_logits=_soft_capped,
        rotary_by_layer_type=True,
        refuses=_refuse_bidirectional,
    ),
    "gpt2": Family(
        decoder="transformer",
        layers="h",
        norm="ln_f",
        learned_positions="wpe",
        refuses=_refuse_cross_attention,
    ),
    "gptj": Family(decoder="transformer", layers="h", norm="ln_f", rotary_ends=True),
    "gpt_neox": Family(decoder="gpt_neox", norm="final_layer_norm", cache_argument="layer_past"),
    "opt": Family(
        decoder="model.decoder",
        norm="final_layer_norm",
        project_in="project_in",
        project_out="project_out",
        learned_positions="embed_positions",
        embed_positions=_behind_a_mask,
        keeps_packed_apart=False,
    ),
    "falcon": Family(
        decoder="transformer",
        layers="h",
        norm="ln_f",
        cache_argument="layer_past",
        layer_arguments={"alibi": None},
        returns_tuple=True,
        # Its eager attention wants a mask where nothing is masked.
        attention=("sdpa",),
        refuses=_refuse_alibi,
    ),
}


def family_of(config: PreTrainedConfig) -> Family:
    """Returns the `Family` of a model configuration.

    Raises:
        ValueError: an encoder-decoder model, a family that is not in the table, or a setting that its family cannot
            run here; the message lists what is supported.
    """
    supported = ", ".join(sorted(FAMILIES))
    if config.is_encoder_decoder:
        raise ValueError(
            f"model_type={config.model_type!r} is an encoder-decoder model; early exit needs a decoder-only causal "
            f"language model of one of these families: {supported}."
        )
    if config.to_dict().get("is_causal") is False:
        raise ValueError("is_causal=False in the model's configuration: text cannot be generated token by token.")
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} is not supported{_reason(config)}; supported families: {supported}."
        )
    refused = family.refuses(config)
    if refused is not None:
        raise ValueError(f"{refused} is not supported for model_type={config.model_type!r}; use model.generate.")
    found: Any = config
    if SLIDING_ATTENTION in family.layer_types(config) and found.sliding_window is None:
        raise ValueError(
            f"layer_types of model_type={config.model_type!r} has {SLIDING_ATTENTION!r}, but sliding_window=None; set "
            f"sliding_window, or layer_types to {FULL_ATTENTION!r}."
        )
    unknown = set(family.layer_types(config)) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown:
        raise ValueError(
            f"layer_types={sorted(unknown)} of model_type={config.model_type!r} are not supported; allowed are "
            f"{FULL_ATTENTION!r} and {SLIDING_ATTENTION!r}."
        )
    return family


def _reason(config: PreTrainedConfig) -> str:
    """Returns why a family is not just missing in the table but cannot stand there as it is; empty where it might."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    settings = config.get_text_config().to_dict()
    if settings.get("num_kv_shared_layers"):
        return (
            f", since its upper layers read the keys and values of lower ones (num_kv_shared_layers="
            f"{settings['num_kv_shared_layers']})"
        )
    if config.model_type in ("bloom", "mpt"):
        return f", since {ALIBI}"
    if type(config) in classes and classes[type(config)]._is_stateful:
        return ", since its layers keep a recurrent state, which cannot be rolled back when a draft is rejected"
    return ""
