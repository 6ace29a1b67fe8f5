"""Where the tokens of one pass through a span of layers stand: their positions, and the cache slots they fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Placement:
    """The place of `width` tokens in each row of a batch.

    In a row the live tokens come first and stand at consecutive positions; the rest of the row is dead: padding that
    keeps the batch a rectangle, written to a scratch slot that no live token ever sees.

    Attributes:
        starts: the position of the first token of each row.
        live: the number of live tokens of each row.
        width: tokens per row.
        view: cache slots that the attention of this pass reads: 0 .. view − 1.
        start: the position of the first token where all rows stand alike, else `None`.
        scratch: the slot and position of dead tokens where rows do not stand alike.
        device: where `positions` is made.
    """

    starts: tuple[int, ...]
    live: tuple[int, ...]
    width: int
    view: int
    start: int | None
    scratch: int
    device: torch.device

    @classmethod
    def of(
        cls, starts: Sequence[int], live: Sequence[int], width: int, scratch: int, device: torch.device
    ) -> Placement:
        """Returns the placement of rows whose first token stands at `starts[row]`, `live[row]` of `width` being live.

        Args:
            scratch: the slot (and position) of dead tokens; it must lie behind every live one.
        """
        alike = all(start == starts[0] for start in starts) and all(count == width for count in live)
        view = max(start + count for start, count in zip(starts, live, strict=True))
        return cls(tuple(starts), tuple(live), width, view, starts[0] if alike else None, scratch, device)

    @classmethod
    def prompt(cls, lengths: Sequence[int], device: torch.device) -> Placement:
        """Returns the placement of whole prompts of `lengths` tokens, each row filled up to the longest with padding.

        A prompt's padding lies behind its tokens, where causal attention hides it from them; the tokens that follow
        overwrite it.
        """
        width = max(lengths)
        return cls((0,) * len(lengths), tuple(lengths), width, width, 0, width, device)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The length of each row once the pass is done."""
        return tuple(start + count for start, count in zip(self.starts, self.live, strict=True))

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of every token, its cache slot: `(rows, width)`, or `(1, width)` where all rows stand alike."""
        if self.start is not None:
            return torch.arange(self.start, self.start + self.width, device=self.device).unsqueeze(0)
        offsets = torch.arange(self.width, device=self.device)
        positions = torch.tensor(self.starts, device=self.device).unsqueeze(1) + offsets
        dead = offsets >= torch.tensor(self.live, device=self.device).unsqueeze(1)
        return positions.masked_fill(dead, self.scratch)

    @property
    def padding(self) -> tuple[int, ...]:
        """Dead tokens of each row."""
        return tuple(self.width - count for count in self.live)
