"""Exit logits of whole prompts, from a wrapper that is right or makes a mistake."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from layerskip.model.cache import SharedCache
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement
from tests import kit

Mistake = Callable[[LayeredModel], None]


def batch(rows: int) -> torch.Tensor:
    """Returns `rows` different prompts of the kit's length, `(rows, width)`."""
    return torch.stack([kit.prompt_tensor()[0].roll(row) for row in range(rows)])


def exit_state(layered: LayeredModel, ids: torch.Tensor, exit_layer: int) -> torch.Tensor:
    """Returns the output of layer `exit_layer` over whole prompts, `(rows, width, hidden)`."""
    rows, width = ids.shape
    placement = Placement.prompt([width] * rows, layered.device)
    return layered.run(
        layered.embed(ids, placement.positions),
        0,
        exit_layer,
        placement=placement,
        cache=SharedCache(layered.num_layers, rows, width + 1),
        rotary=layered.rotary_tables(width + 1),
    )


@torch.no_grad()
def exit_logits(
    model: PreTrainedModel, ids: torch.Tensor, exit_layer: int, mistake: Mistake | None = None
) -> torch.Tensor:
    """Returns the exit head's logits, `(rows, width, vocabulary)`, from a wrapper that makes `mistake`, if given."""
    layered = LayeredModel(model)
    if mistake is not None:
        mistake(layered)
    return layered.logits(exit_state(layered, ids, exit_layer))
