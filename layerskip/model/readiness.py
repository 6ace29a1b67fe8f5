"""Whether a model, as it is now, makes of a token the same whenever and beside whatever it passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerskip.model.peft_models import check_adapters
from layerskip.model.quantization import check_quantization

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_layers(model: PreTrainedModel) -> None:
    """Checks what has been put into the layers of a model: adapters and quantised weights.

    Raises:
        ValueError: kinds with which drafts would be verified against other values than plain decoding gives.
    """
    check_adapters(model)
    check_quantization(model)


def check_mode(model: PreTrainedModel) -> None:
    """Checks that no part of a model is in train mode, where its outputs are random.

    Raises:
        ValueError: one is.
    """
    if any(module.training for module in model.modules()):
        raise ValueError(
            "the model, or a part of it, is in train mode, where its outputs are random; call model.eval()."
        )


def check_ready(model: PreTrainedModel) -> None:
    """Checks that a model can generate as it is now: its mode and its layers.

    Raises:
        ValueError: it cannot.
    """
    check_mode(model)
    check_layers(model)
