"""Settings of a model that generate as ever, but with which training would not be what the recipe says."""

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
    """Checks that nothing in a model's configuration interferes with exit loss and layer dropout.

    Raises:
        ValueError: something does; the message says what to set it to.
    """
    settings = layered.config.to_dict()
    for name, (reason, wanted) in UNFIT.items():
        if settings.get(name):
            raise ValueError(
                f"{name}={settings[name]} in the model's configuration does not go with training here: {reason}. Set "
                f"model.config.{name} to {wanted}."
            )
