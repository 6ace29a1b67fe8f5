"""The families of models that can be run in spans of layers: everything in which they differ, in one table.

A family stands in `FAMILIES` because `tests/model/test_families.py` shows, on a tiny configuration that turns on its
peculiarity, that the exit logits at E equal those of the same model cut to E layers. Everything else is refused by
name. To bring a new family in, add its entry here and its configuration to that test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

# transformers.modeling_utils imports accelerate, which `import layerskip` must not load.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


def _same_logits(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    return logits


def _soft_capped(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _all_full(config: PreTrainedConfig) -> tuple[str, ...]:
    return (FULL_ATTENTION,) * config.num_hidden_layers


def _from_config(config: PreTrainedConfig) -> tuple[str, ...]:
    return tuple(config.layer_types)


def _nothing_refused(config: PreTrainedConfig) -> None:
    return None


def _refuse_bidirectional(config: PreTrainedConfig) -> str | None:
    return "use_bidirectional_attention=True" if config.use_bidirectional_attention else None


def _refuse_cross_attention(config: PreTrainedConfig) -> str | None:
    return "add_cross_attention=True" if config.add_cross_attention else None


@dataclass(frozen=True)
class Family:
    """Where a family keeps its parts, and what it does beyond embedding, layers, norm and head.

    Attributes:
        decoder: attribute of the causal LM that holds the embedding, the layers and the final norm.
        layers: attribute of the decoder with the list of decoder layers.
        norm: attribute of the decoder with the final norm.
        learned_positions: attribute of the decoder with an embedding of positions that is added to the tokens', or
            `None` where positions are rotary.
        rotary_by_layer_type: the rotary module takes the layer type as a third argument.
        layer_types: the attention type of each layer, from the configuration.
        finish_logits: what follows the head (a soft-cap or a scale); it belongs to the exit head as well.
        attention: the attention implementations that give the family's values.
        refuses: the setting of the configuration that cannot be run, as `name=value`, or `None`.
    """

    decoder: str = "model"
    layers: str = "layers"
    norm: str = "norm"
    learned_positions: str | None = None
    rotary_by_layer_type: bool = False
    layer_types: Callable[[PreTrainedConfig], tuple[str, ...]] = _all_full
    finish_logits: Callable[[torch.Tensor, PreTrainedConfig], torch.Tensor] = _same_logits
    attention: tuple[str, ...] = ("sdpa", "eager")
    refuses: Callable[[PreTrainedConfig], str | None] = _nothing_refused

    def part(self, model: PreTrainedModel, name: str) -> nn.Module:
        """Returns the module `name` of the decoder of `model`."""
        return model.get_submodule(f"{self.decoder}.{name}")


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen3": Family(layer_types=_from_config),
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
        raise ValueError(f"model_type={config.model_type!r} is not supported; supported families: {supported}.")
    refused = family.refuses(config)
    if refused is not None:
        raise ValueError(f"{refused} is not supported for model_type={config.model_type!r}.")
    unknown = set(family.layer_types(config)) - {FULL_ATTENTION, SLIDING_ATTENTION}
    if unknown:
        raise ValueError(
            f"layer_types={sorted(unknown)} of model_type={config.model_type!r} are not supported; allowed are "
            f"{FULL_ATTENTION!r} and {SLIDING_ATTENTION!r}."
        )
    return family
