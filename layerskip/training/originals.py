"""The model that training began with, for the guard of the last layer's quality."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from layerskip.model.layered import LayeredModel
from layerskip.training.exit_states import final_state

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class Original(Protocol):
    """The frozen original of a model in training."""

    def state(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Returns the last layer's output before the final norm, `(batch, tokens, hidden)`, without gradients."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the original's vocabulary logits for such states."""


class FrozenCopy:
    """A copy of the whole model as it is now; it takes the memory of its weights once more."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Copies `model`; make it before training begins and before weights are read from a checkpoint."""
        self._model = copy.deepcopy(model).requires_grad_(False).eval()
        self._layered = LayeredModel(self._model)

    def state(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """As `Original`."""
        # The model in training may have been moved to its device after this copy was made.
        self._model.to(inputs["input_ids"].device)
        return final_state(self._layered, inputs)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """As `Original`."""
        return self._layered.logits(states)


class AdaptersOff:
    """The same weights with the adapters off, which cost no memory."""

    def __init__(self, model: PeftModel) -> None:
        """Wraps a PEFT model, whose base weights are frozen.

        Raises:
            ValueError: it trains copies of whole modules as well, which take the originals' place even then.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        configs: Any = model.peft_config.values()
        copied = [name for config in configs for name in config.modules_to_save or ()]
        if copied:
            raise ValueError(f"modules_to_save={copied} cannot be combined with guard_weight; leave one of them out.")
        self._peft = model
        base: Any = model.get_base_model()
        self._layered = LayeredModel(base)
        if isinstance(self._layered.head, BaseTunerLayer):
            self._layered.head = self._layered.head.get_base_layer()

    def state(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """As `Original`."""
        # Turning adapters on again makes all of them trainable, even those that someone froze.
        trainable = [(weight, weight.requires_grad) for weight in self._peft.parameters()]
        with self._peft.disable_adapter(), evaluation(self._layered.model):
            state = final_state(self._layered, inputs)
        for weight, requires_grad in trainable:
            weight.requires_grad_(requires_grad)
        return state

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """As `Original`."""
        return self._layered.logits(states)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Puts every module into eval mode while the block runs, and back into the mode that each was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
