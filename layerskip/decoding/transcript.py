"""The token ids of a generation call as `generate` holds them: prompts with their padding, then what is new."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Transcript:
    """What logits processors and stopping criteria see: each row's prompt, padding included, and its new tokens.

    Attributes:
        ids: `(rows, width + capacity)`, int64, on the prompts' device; columns behind what was written hold `pad`.
        width: prompt tokens, padding included; 0 for prompts given as embeddings.
    """

    def __init__(self, prompts: torch.Tensor, capacity: int, pad: int) -> None:
        """Allocates room for `capacity` new tokens in each row behind `prompts`, `(rows, width)`, which are copied."""
        rows, self.width = prompts.shape
        self.ids = torch.full((rows, self.width + capacity), pad, dtype=torch.int64, device=prompts.device)
        self.ids[:, : self.width] = prompts
        self._pad = pad
        # How many new tokens were written at most, so that clearing touches no more than these.
        self._written = [0] * rows

    def write(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Writes `tokens` as the new tokens start, start + 1, … of a row; 0 is its first new token."""
        first = self.width + start
        self.ids[row, first : first + len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device=self.ids.device)
        self._written[row] = max(self._written[row], start + len(tokens))

    def clear(self, row: int, start: int) -> None:
        """Makes a row's new tokens from `start` on padding again: drafts that were rejected."""
        if start < self._written[row]:
            self.ids[row, self.width + start : self.width + self._written[row]] = self._pad
            self._written[row] = start

    def view(self, count: int) -> torch.Tensor:
        """Returns all prompts and the first `count` new tokens of each row, `(rows, width + count)`; no copy."""
        return self.ids[:, : self.width + count]
