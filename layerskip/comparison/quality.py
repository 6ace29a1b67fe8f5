"""Quality per exit: what every exit makes of the model's own greedy answers, token by token, and its sums."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    """Figures of one exit, or of the last layer, over some tokens.

    Attributes:
        tokens: how many.
        perplexity: exp of the mean −log p of the answers' tokens, by the whole head.
        agreement: share of tokens for which its first choice is the last layer's.
        expected_acceptance: mean of Σ min(p, q): p the last layer's distribution and q the exit's, from the ids that
            are drafted from, both at the temperature asked for. 1 for the last layer.
    """

    tokens: int
    perplexity: float
    agreement: float
    expected_acceptance: float


@dataclass(frozen=True)
class PositionQuality(Quality):
    """The same over the tokens at some places of the answers.

    Attributes:
        start, stop: tokens `start .. stop − 1` of an answer, counted from 0.
    """

    start: int
    stop: int


@dataclass(frozen=True)
class ExitQuality(Quality):
    """The same of one exit, all tokens together and by place.

    Attributes:
        exit_layer: E, counted from 1; L for the last layer.
        by_position: for spans of places, in their order; those without tokens are left out.
    """

    exit_layer: int
    by_position: tuple[PositionQuality, ...]
