"""What the exits did between two logs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from layerskip.training.objective import ExitOutput

if TYPE_CHECKING:
    from accelerate import Accelerator


class Tally:
    """Sums over batches: for each layer its loss, its agreement with the last layer, and the tokens of both."""

    def __init__(self, num_layers: int) -> None:
        """Starts at nothing."""
        self._num_layers = num_layers
        self._begun = 0.0
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        # One row a layer: loss, agreement, tokens. One more row: tokens that passed the model.
        self._sums = torch.zeros(self._num_layers + 1, 3, dtype=torch.float64)
        self._seconds = 0.0

    def begin_step(self) -> None:
        """A step begins."""
        self._begun = time.perf_counter()

    def end_step(self) -> None:
        """A step ends; its time counts."""
        self._seconds += time.perf_counter() - self._begun

    def add(self, outputs: ExitOutput, exits: Sequence[int], inputs: Mapping[str, Any]) -> None:
        """Adds a batch whose exits were `exits`, the columns of `outputs`."""
        values = (outputs.tokens, outputs.last, outputs.exits, outputs.agreements)
        columns = [value.reshape(len(value), -1).float() for value in values if value is not None]
        tokens, last, *of_exits = torch.cat(columns, dim=1).sum(dim=0).tolist()
        self._sums[self._num_layers - 1] += torch.tensor([last, tokens, tokens])
        for column, layer in enumerate(exits):
            self._sums[layer - 1] += torch.tensor([of_exits[column], of_exits[len(exits) + column], tokens])
        mask = inputs.get("attention_mask")
        self._sums[-1, 0] += inputs["input_ids"].numel() if mask is None else int(mask.sum())

    def read(self, accelerator: Accelerator) -> dict[str, float]:
        """Returns the means over all ranks since the last time, and starts anew.

        The keys are `loss_last_layer`, `loss_exit_E`, `agreement_exit_E` and `tokens_per_second`; the last counts all
        tokens but the padding that an attention mask shows, and the time of steps, without evaluation and saving.
        """
        sums = accelerator.reduce(self._sums.float().to(accelerator.device), reduction="sum").tolist()
        seconds = self._seconds
        self.reset()
        logs = {}
        for layer, (loss, agreed, tokens) in enumerate(sums[:-1], start=1):
            if tokens > 0 and layer == self._num_layers:
                logs["loss_last_layer"] = loss / tokens
            elif tokens > 0:
                logs[f"loss_exit_{layer}"] = loss / tokens
                logs[f"agreement_exit_{layer}"] = agreed / tokens
        logs["tokens_per_second"] = sums[-1][0] / seconds if seconds else 0.0
        return logs
