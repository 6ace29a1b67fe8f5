"""Models that generate as ever, but whose training would not be what the recipe says."""

from __future__ import annotations

from typing import Any

from layerskip.model.layered import LayeredModel

# What each would do beside the recipe, and what to set it to.
UNFIT: dict[str, tuple[str, Any]] = {
    "output_router_logits": (
        "the experts' balancing loss is no part of the recipe's, and dropped layers route none",
        False,
    ),
    "layerdrop": ("the model would skip layers by itself, unseen by the exits; p_max is layer dropout here", 0),
}


def check_trainable(layered: LayeredModel) -> None:
    """Checks that nothing in a model's configuration or place interferes with exit loss and layer dropout.

    Raises:
        ValueError: something does; the message says what to do.
    """
    parts = layered.model
    if len({weight.device for weight in parts.parameters()}) > 1 or any(
        "_hf_hook" in vars(part) for part in parts.modules()
    ):
        raise ValueError(
            "the model is spread over several devices or offloaded (device_map), where its weights are not trained as "
            "a whole; load it onto one device, and shard it with FSDP where it is too large."
        )
    settings = layered.config.to_dict()
    for name, (reason, wanted) in UNFIT.items():
        if settings.get(name):
            raise ValueError(
                f"{name}={settings[name]} in the model's configuration does not go with training here: {reason}. Set "
                f"model.config.{name} to {wanted}."
            )
