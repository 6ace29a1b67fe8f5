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
        scratch: the slot and position of dead tokens; `None` where all rows stand alike and every token's position
            follows from the start, dead ones' too.
        device: where `positions` is made.
    """

    starts: tuple[int, ...]
    live: tuple[int, ...]
    width: int
    view: int
    scratch: int | None
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
        return cls(tuple(starts), tuple(live), width, view, None if alike else scratch, device)

    @classmethod
    def prompt(cls, lengths: Sequence[int], device: torch.device) -> Placement:
        """Returns the placement of whole prompts of `lengths` tokens, each row filled up to the longest with padding.

        A prompt's padding lies behind its tokens, where causal attention hides it from them; the tokens that follow
        overwrite it.
        """
        width = max(lengths)
        return cls((0,) * len(lengths), tuple(lengths), width, width, None, device)

    @property
    def start(self) -> int | None:
        """The position of the first token where all rows stand alike, else `None`."""
        return self.starts[0] if self.scratch is None else None

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The length of each row once the pass is done."""
        return tuple(start + count for start, count in zip(self.starts, self.live, strict=True))

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of every token, its cache slot: `(rows, width)`, or `(1, width)` where all rows stand alike."""
        if self.scratch is None:
            return torch.arange(self.starts[0], self.starts[0] + self.width, device=self.device).unsqueeze(0)
        offsets = torch.arange(self.width, device=self.device)
        positions = torch.tensor(self.starts, device=self.device).unsqueeze(1) + offsets
        dead = offsets >= torch.tensor(self.live, device=self.device).unsqueeze(1)
        return positions.masked_fill(dead, self.scratch)

    @property
    def padding(self) -> tuple[int, ...]:
        """Dead tokens of each row."""
        return tuple(self.width - count for count in self.live)
