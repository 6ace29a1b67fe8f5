"""Layer dropout: in training, a layer is skipped for some samples, which cost it nothing (arXiv 2404.16710, 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerskip.model.layered import LayeredModel
from layerskip.model.peft_models import causal_lm_beneath
from layerskip.training.clock import Clock
from layerskip.training.dropout_rates import depth_factor, kept_samples, schedule_factor
from layerskip.training.strict import UNKNOWN_KEYS_FAIL
from layerskip.training.trainable import check_trainable

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DropoutSettings:
    """How layers are dropped: layer l of sample s is skipped with probability S(t) · D(l) · p_max.

    Attributes:
        p_max: the rate of the last layer at full strength; 0 ≤ p_max < 1, and 0 drops nothing.
        schedule: S(t): "constant" for fine-tuning and continual pre-training, "exponential" for training from scratch.
    """

    __pydantic_config__ = UNKNOWN_KEYS_FAIL

    p_max: float = 0.0
    schedule: str = "constant"

    def __post_init__(self) -> None:
        """Checks the settings; raises ValueError for a rate or schedule that cannot be."""
        if not 0.0 <= self.p_max < 1.0:
            raise ValueError(f"p_max={self.p_max} is out of range; allowed is 0 ≤ p_max < 1.")
        schedule_factor(self.schedule, 0, 1)


@contextmanager
def layer_dropout(
    model: PreTrainedModel | PeftModel, settings: DropoutSettings, clock: Clock, seed: int
) -> Iterator[None]:
    """Drops layers of `model` in train mode while the block runs; in eval mode nothing changes.

    The `forward` of each decoder layer object is wrapped, and the wrapper taken off at the end: module names,
    state-dict keys and hooks stay as they are. Gradient checkpointing recomputes what is inside the wrapper, and draws
    nothing anew. A layer that is skipped for the whole batch leaves its parameters without gradients.

    Args:
        model: any supported causal LM, or a PEFT model around one.
        settings: the rates.
        clock: where training stands.
        seed: of the draws; the same on every rank.

    Raises:
        ValueError: a setting of the model that does not go with it, see `check_trainable`.
    """
    layered = LayeredModel(causal_lm_beneath(model))
    check_trainable(layered)
    # A layer may carry a forward of its own, as accelerate's hooks put there; it is wrapped and comes back.
    own = [vars(layer).get("forward") for layer in layered.layers]
    for index, layer in enumerate(layered.layers, start=1):
        layer.forward = _dropping(layer, index, layered, settings, clock, seed)
    try:
        yield
    finally:
        for layer, forward in zip(layered.layers, own, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _dropping(
    layer: nn.Module, index: int, layered: LayeredModel, settings: DropoutSettings, clock: Clock, seed: int
) -> Callable[..., Any]:
    """Returns the wrapped forward of one layer."""
    run, family = layer.forward, layered.family

    # A compiled graph would keep the draws of its first step; what is inside the layer compiles all the same.
    @torch.compiler.disable(recursive=False)
    def forward(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if not layer.training:
            return run(hidden, *arguments, **named)
        strength = schedule_factor(settings.schedule, clock.step, clock.total_steps)
        rate = settings.p_max * strength * depth_factor(index, layered.num_layers)
        samples = hidden.shape[0]
        kept = kept_samples(rate, samples, seed=seed, step=clock.step, micro_step=clock.micro_step, layer=index)
        if kept.all():
            return run(hidden, *arguments, **named)
        if not kept.any():
            return family.skipped(hidden)
        rows = kept.nonzero().squeeze(1).to(hidden.device)
        sliced = [_rows(argument, rows, samples) for argument in arguments]
        sliced_named = {name: _rows(argument, rows, samples) for name, argument in named.items()}
        output = run(hidden[rows], *sliced, **sliced_named)
        return family.with_state(output, hidden.index_copy(0, rows, family.state(output)))

    return forward


def _rows(argument: Any, rows: torch.Tensor, samples: int) -> Any:
    """Returns the rows of whatever holds one for each sample; tables that all samples share stay whole."""
    if isinstance(argument, torch.Tensor) and argument.dim() > 1 and argument.shape[0] == samples:
        return argument[rows.to(argument.device)]
    if isinstance(argument, tuple):
        return tuple(_rows(part, rows, samples) for part in argument)
    return argument
