"""Passes of tokens through spans of layers, counted where they happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.decoding.rows import Row
from layerskip.model.cache import SharedCache
from layerskip.model.layered import LayeredModel, RotaryTables
from layerskip.model.placement import Placement


@dataclass(frozen=True, eq=False)
class Passes:
    """Runs spans of layers over the tokens of one generation call.

    Attributes:
        model: whose layers run.
        cache: of the call; its first rows are the active ones.
        rotary: for all positions of the call.
        scratch: the slot and position of dead tokens, behind every live one.
    """

    model: LayeredModel
    cache: SharedCache
    rotary: RotaryTables
    scratch: int

    def place(self, starts: Sequence[int], live: Sequence[int], width: int) -> Placement:
        """Returns where `live[row]` tokens of each row stand, from position `starts[row]` on, in a pass of `width`."""
        return Placement.of(starts, live, width, self.scratch, self.model.device)

    def embed(self, tokens: Sequence[Sequence[int]], placement: Placement) -> torch.Tensor:
        """Returns the hidden state before layer 1 of tokens `(rows, width)`, `(rows, width, hidden)`."""
        return self.model.embed(torch.tensor(tokens, device=self.model.device), placement.positions)

    def run(
        self, rows: Sequence[Row], hidden: torch.Tensor, start: int, stop: int, placement: Placement
    ) -> torch.Tensor:
        """Runs layers `start + 1 .. stop`; counts early tokens where layer 1 runs, late ones where layer L does.

        Args:
            rows: the active rows, in the cache's order.
            hidden: the output of layer `start`, `(rows, width, hidden)`.

        Returns:
            The output of layer `stop`, `(rows, width, hidden)`.
        """
        if start == stop:
            return hidden
        for row, live, padding in zip(rows, placement.live, placement.padding, strict=True):
            if start == 0:
                row.tally.early_layer_tokens += live
                row.tally.padding_tokens += padding
            if stop == self.model.num_layers:
                row.tally.late_layer_tokens += live
        return self.model.run(hidden, start, stop, placement=placement, cache=self.cache, rotary=self.rotary)

    def run_through(
        self, rows: Sequence[Row], hidden: torch.Tensor, start: int, stops: Sequence[int], placement: Placement
    ) -> dict[int, torch.Tensor]:
        """Runs layers `start + 1 .. stops[-1]`; returns the output of each layer in `stops`, which rise; see `run`."""
        states = {}
        for stop in stops:
            hidden = states[stop] = self.run(rows, hidden, start, stop, placement)
            start = stop
        return states
