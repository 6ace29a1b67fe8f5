"""PEFT models: which causal LM runs in them, and whether their adapters are a matter of its layers alone."""

from __future__ import annotations

import sys
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftConfig, PeftMixedModel, PeftModel
    from transformers import PreTrainedModel

# Kinds of adapters, by PEFT's name, that stand beside the layers even while they are off, and what they do.
BESIDE_THE_LAYERS = {
    "SHADOW": "carry a second state from layer to layer",
    "XLORA": "are scaled by a pass of their own before each pass of the model",
}
OWN_GENERATE = "the PEFT model's own generate, without custom_generate"


def causal_lm_beneath(model: PreTrainedModel | PeftModel | PeftMixedModel) -> PreTrainedModel:
    """Returns the causal LM around which a PEFT model stands, with the adapters in its modules; others as they are.

    Raises:
        ValueError: adapters that are virtual tokens beside the prompt, which the causal LM knows nothing of.
    """
    given: Any = model
    # This package does without peft; where it was never loaded there is no PEFT model.
    if "peft" not in sys.modules:
        return given
    from peft import PeftMixedModel, PeftModel

    if not isinstance(given, PeftModel | PeftMixedModel):
        return given
    if isinstance(given, PeftModel) and given.active_peft_config.is_prompt_learning:
        raise _virtual_tokens(given)
    beneath: Any = given.base_model
    return beneath.model


def check_adapters(model: PreTrainedModel) -> None:
    """Checks that what adapters add to a causal LM, as they are set now, depends on the inputs of its layers alone.

    Raises:
        ValueError: virtual tokens, adapters that need what a PEFT model does around a pass, that differ from row to
            row, or that draw random numbers.
    """
    if "peft" not in sys.modules:
        return
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    # A PEFT model lends its own to the causal LM while it generates.
    prepare = model.prepare_inputs_for_generation
    if isinstance(prepare, MethodType) and isinstance(prepare.__self__, PeftModel):
        raise _virtual_tokens(prepare.__self__)
    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer) and not layer.disable_adapters]
    for layer in layers:
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, partial) and "adapter_names" in hook.keywords:
                raise ValueError(
                    f"adapter_names={hook.keywords['adapter_names']!r} gives each row an adapter of its own, which is "
                    "not supported in self-speculative decoding; generate the rows of one adapter together, after "
                    "set_adapter."
                )
    active = {name for layer in layers for name in layer.active_adapters}
    # Where PEFT leaves its configurations; a model without adapters has none.
    for name, config in vars(model).get("peft_config", {}).items():
        obstacle = BESIDE_THE_LAYERS.get(config.peft_type) or (_obstacle(config) if name in active else None)
        if obstacle is not None:
            raise ValueError(
                f"the adapters {name!r} (peft_type={config.peft_type.value!r}) {obstacle}, which is not supported in "
                f"self-speculative decoding; use {OWN_GENERATE}."
            )


def _obstacle(config: PeftConfig) -> str | None:
    """Returns what adapters do, while they are on, that is no matter of the layers' inputs alone."""
    settings = config.to_dict()
    if config.peft_type == "POLY":
        return "are mixed by the task ids of each row"
    if settings.get("alora_invocation_tokens"):
        return "begin where alora_invocation_tokens stand in the prompt"
    if settings.get("sample_at_inference"):
        return "draw random numbers (sample_at_inference=True)"
    return None


def _virtual_tokens(model: PeftModel) -> ValueError:
    config = model.active_peft_config
    return ValueError(
        f"the adapters {model.active_adapter!r} (peft_type={config.peft_type.value!r}) are virtual tokens beside the "
        "prompt, which are not supported, since the causal LM runs here without them; take get_base_model() if that is "
        f"what you want, or {OWN_GENERATE}."
    )
