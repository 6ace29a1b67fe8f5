"""Models that generate as ever, but whose training would not be what the recipe says."""

from __future__ import annotations

from layerskip.model.devices import is_dispatched
from layerskip.model.layered import LayeredModel


def check_trainable(layered: LayeredModel) -> None:
    """Checks that nothing in a model's configuration or place interferes with exit loss and layer dropout.

    Raises:
        ValueError: something does; the message says what to do.
    """
    model, settings = layered.model, layered.config.to_dict()
    if is_dispatched(model) or len({weight.device for weight in model.parameters()}) > 1:
        raise ValueError(
            "the model is spread over several devices or offloaded (device_map), where its weights are not trained as "
            "a whole; load it onto one device, and shard it with FSDP where it is too large."
        )
    if settings.get("output_router_logits"):
        raise ValueError(
            "output_router_logits=True in the model's configuration asks for the experts' balancing loss, which is no "
            "part of the recipe's and knows nothing of dropped layers; set model.config.output_router_logits to False."
        )
    if settings.get("layerdrop"):
        raise ValueError(
            f"layerdrop={settings['layerdrop']} in the model's configuration lets the model skip layers by itself, "
            "unseen by the exits; set model.config.layerdrop to 0, and p_max to what is to be dropped."
        )
