"""What a round comes to, however it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from layerskip.decoding.rows import Row


@dataclass(frozen=True)
class Scored:
    """The full model's output for one pass.

    Attributes:
        logits: `(rows, width, vocabulary)`, in the model's type.
        scores: what tokens are chosen from, in the same shape: processed, in fp32; without processors the logits.
    """

    logits: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """What the full model makes of one row's drafts.

    Attributes:
        drafted: how many tokens were drafted; of a tree its depth.
        verified: how many drafts passed the late layers; of a tree its nodes.
        accepted: those that hold.
        target: the full model's own token behind them; `None` where there is none to choose.
        places: where in the pass the output stands that each of these tokens was chosen from.
    """

    drafted: int
    verified: int
    accepted: list[int]
    target: int | None
    places: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """A round that has drafted and verified; what it emits is yet to be settled.

    Attributes:
        exit_layer: E; the last layer for a step of plain decoding.
        steps: how often the early layers ran, beside the once that verification needs.
        verdicts: of each active row.
        scored: the full model's output; `None` where it stays on the device.
        drafted_at: when drafting ended, by `time.perf_counter`.
    """

    exit_layer: int
    steps: int
    verdicts: list[Verdict]
    scored: Scored | None
    drafted_at: float


class Rounds(Protocol):
    """A way to run rounds."""

    def run(self, rows: Sequence[Row]) -> Outcome:
        """Drafts for the active rows, in the cache's order, and verifies; their tallies count what passes layers."""
