"""Reading the outputs of chosen layers while the model's own decoder runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from layerskip.model.layered import LayeredModel

# Of no use to a decoder, or replaced here.
_NOT_FOR_THE_DECODER = ("labels", "guard", "num_items_in_batch", "logits_to_keep", "use_cache", "return_dict")


class ExitStates:
    """Forward hooks on all layers of a model; one records only while `run` is active and its layer is wanted.

    They stay installed from call to call, since a compiled decoder is compiled anew when hooks come or go. They stand
    outside what gradient checkpointing recomputes, and see what layer dropout passed on.
    """

    def __init__(self, layered: LayeredModel) -> None:
        """Wraps a model; nothing is installed yet."""
        self._layered = layered
        self._wanted: Collection[int] = ()
        self._states: dict[int, torch.Tensor] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Keeps the hooks on the layers while the block runs."""
        handles = [
            layer.register_forward_hook(self._recorder(number))
            for number, layer in enumerate(self._layered.layers, start=1)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recorder(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if number in self._wanted:
                self._states[number] = self._layered.family.state(output)

        return hook

    def run(self, layers: Collection[int], inputs: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """Runs the decoder and returns the output of each of `layers`, `(batch, tokens, hidden)`, before any norm.

        Args:
            layers: counted from 1; L is the last.
            inputs: what the causal LM was called with; labels and what concerns logits or the cache is left out.
        """
        given = {name: value for name, value in inputs.items() if name not in _NOT_FOR_THE_DECODER}
        decoder = self._layered.model.get_submodule(self._layered.family.decoder)
        self._wanted = layers
        try:
            decoder(use_cache=False, **given)
            return dict(self._states)
        finally:
            self._wanted, self._states = (), {}


@torch.no_grad()
def final_state(layered: LayeredModel, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Returns the last layer's output before the final norm, `(batch, tokens, hidden)`, without gradients."""
    states = ExitStates(layered)
    with states.installed():
        return states.run((layered.num_layers,), inputs)[layered.num_layers]
