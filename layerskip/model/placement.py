"""Where the tokens of one pass through a span of layers stand: their positions, and the cache slots they fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """The place of `width` tokens in each row of a batch.

    In a row the live tokens come first and stand at consecutive positions; the rest of the row is dead: padding that
    keeps the batch a rectangle, written to a scratch slot that no live token ever sees.

    Attributes:
        width: tokens per row.
        live: the number of live tokens of each row.
        ends: the length of each row once the pass is done.
        view: cache slots that the attention of this pass reads: 0 .. view − 1.
        start: the position of the first token where all rows stand alike and none is dead, else `None`.
        positions: `(rows, width)`, the position of every token, which is also its cache slot; `(1, width)` where
            `start` is given.
    """

    width: int
    live: tuple[int, ...]
    ends: tuple[int, ...]
    view: int
    start: int | None
    positions: torch.Tensor

    @classmethod
    def of(
        cls, starts: Sequence[int], live: Sequence[int], width: int, scratch: int, device: torch.device
    ) -> Placement:
        """Returns the placement of rows whose first token stands at `starts[row]`, `live[row]` of `width` being live.

        Args:
            scratch: the slot (and position) of dead tokens; it must lie behind every live one.
        """
        ends = tuple(start + count for start, count in zip(starts, live, strict=True))
        first = starts[0]
        if all(start == first for start in starts) and all(count == width for count in live):
            positions = torch.arange(first, first + width, device=device).unsqueeze(0)
            return cls(width, tuple(live), ends, first + width, first, positions)
        offsets = torch.arange(width, device=device)
        positions = torch.tensor(starts, device=device).unsqueeze(1) + offsets
        dead = offsets >= torch.tensor(live, device=device).unsqueeze(1)
        return cls(width, tuple(live), ends, max(ends), None, positions.masked_fill(dead, scratch))

    @classmethod
    def prompt(cls, lengths: Sequence[int], device: torch.device) -> Placement:
        """Returns the placement of whole prompts of `lengths` tokens, each row filled up to the longest with padding.

        A prompt's padding lies behind its tokens, where causal attention hides it from them; the tokens that follow
        overwrite it.
        """
        width = max(lengths)
        positions = torch.arange(width, device=device).unsqueeze(0)
        return cls(width, tuple(lengths), tuple(lengths), width, 0, positions)

    @property
    def padding(self) -> tuple[int, ...]:
        """Dead tokens of each row."""
        return tuple(self.width - count for count in self.live)
