"""Summed losses of the last layer and of exits on given rows, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from layerskip.decoding.engine import Engine
from layerskip.decoding.prompts import longest_first
from layerskip.model.readiness import check_ready
from layerskip.training.clock import Clock
from layerskip.training.data import Collator
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.objective import exit_objective
from layerskip.training.trainer import exit_metrics


@dataclass(frozen=True)
class LossSums:
    """Summed losses, row by row, and what they mean.

    Attributes:
        exit_layers: the exits, in the order of the columns.
        tokens: tokens that count, `(rows,)`.
        last: the last layer's cross entropy, `(rows,)`.
        exits: each exit's cross entropy, `(rows, exits)`.
        agreements: for how many tokens an exit's first choice is the last layer's, `(rows, exits)`.
    """

    exit_layers: tuple[int, ...]
    tokens: np.ndarray
    last: np.ndarray
    exits: np.ndarray
    agreements: np.ndarray

    @classmethod
    def zeros(cls, rows: int, exit_layers: Sequence[int]) -> LossSums:
        """Returns sums of rows that have none yet."""
        shapes = ((), (), (len(exit_layers),), (len(exit_layers),))
        return cls(tuple(exit_layers), *(np.zeros((rows, *width)) for width in shapes))

    def put(self, rows: list[int], sums: LossSums) -> None:
        """Writes the sums of some rows in place of what stood there."""
        for name in ("tokens", "last", "exits", "agreements"):
            vars(self)[name][rows] = vars(sums)[name]

    def metrics(self, rows: Sequence[int] | None = None) -> dict[str, float]:
        """Returns `loss`, `perplexity`, and `loss_exit_E`, `perplexity_exit_E`, `agreement_exit_E` of every exit.

        Args:
            rows: which rows; all by default.
        """
        chosen = list(range(len(self.tokens)) if rows is None else rows)
        sums = (self.tokens, self.last, self.exits, self.agreements)
        return exit_metrics(self.exit_layers, *(values[chosen] for values in sums))


def batch_losses(
    engine: Engine,
    rows: Sequence[Mapping[str, Sequence[int]]],
    exit_layers: Sequence[int],
    batch_size: int,
    *,
    unit: str,
) -> Iterator[tuple[list[int], LossSums]]:
    """Yields, batch by batch, indices of rows and their summed losses; the longest rows come first.

    Logits are made for some tokens at a time, so that neither an exit nor the last layer holds those of a batch. A
    progress bar on standard error counts rows.

    Args:
        engine: the model.
        rows: `input_ids` and `labels` of each, as in training: −100 where nothing is to be predicted.
        exit_layers: the exits, counted from 1, rising; none for the last layer alone.
        batch_size: rows in a pass.
        unit: what the progress bar calls a row.

    Raises:
        ValueError: an exit that the model does not have, a model in train mode, or losses that are NaN.
    """
    check_ready(engine.model)
    order = longest_first([list(row["input_ids"]) for row in rows])
    # What fills up a row is hidden by the mask, so that any token does.
    collate = Collator(0)
    settings = ExitSettings(exit_layers=tuple(exit_layers), weights="equal")
    device = engine.layered.device
    with (
        tqdm(total=len(rows), desc="reading", unit=unit) as progress,
        exit_objective(engine.model, settings, Clock(total_steps=1)),
    ):
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            inputs = collate([rows[index] for index in batch])
            with torch.inference_mode():
                outputs = engine.model(**{name: values.to(device) for name, values in inputs.items()})
            found = (outputs.tokens, outputs.last, outputs.exits, outputs.agreements)
            sums = LossSums(tuple(exit_layers), *(values.double().cpu().numpy() for values in found))
            if np.isnan(sums.last).any() or np.isnan(sums.exits).any():
                raise ValueError("the model's losses are NaN; look for damaged weights.")
            yield batch, sums
            progress.update(len(batch))
