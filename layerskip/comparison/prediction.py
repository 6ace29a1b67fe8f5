"""What every exit and draft length would give: replayed rounds times measured costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """An exit and a draft length, and what they are predicted to give.

    Attributes:
        exit_layer: E.
        num_draft_tokens: γ.
        tokens_per_round: the mean acceptance length of the replayed rounds.
        draft_acceptance_rate: accepted over drafted, likewise.
        predicted: speed over plain decoding.
    """

    exit_layer: int
    num_draft_tokens: int
    tokens_per_round: float
    draft_acceptance_rate: float
    predicted: float


@dataclass(frozen=True)
class MeasuredCell:
    """A cell that was run for real.

    Attributes:
        cell: what was predicted.
        measured: speed over plain decoding in the same run, the median over repeats.
        lowest, highest: the same, of the slowest and the fastest repeat.
        tokens_per_round: of the real rounds.
        same_as_plain: answers whose every token is plain decoding's.
        answers: how many answers there are.
    """

    cell: Cell
    measured: float
    lowest: float
    highest: float
    tokens_per_round: float
    same_as_plain: int
    answers: int

    @property
    def error(self) -> float:
        """The relative error of the prediction: predicted over measured, minus 1."""
        return self.cell.predicted / self.measured - 1
