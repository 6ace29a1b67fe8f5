"""The exit and the draft length of the next round, chosen while decoding from how well each exit agrees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerskip.decoding.cost import CostTable, expected_tokens

# What an exit is worth before it was seen: one observation, so that the first real one weighs as much.
PRIOR_MEAN = 0.3
PRIOR_TRIALS = 1.0
# The same where the exits of the checkpoint were compared, on other texts than the one at hand.
MEASURED_TRIALS = 4.0
# What evidence keeps with each token that follows it: some twenty tokens count, about a sentence.
DECAY = 0.95
# How many standard errors are taken off. With 1.5 an exit that is right by chance is hardly ever drafted with, and a
# good one drafts from its second hit on.
CAUTION = 1.5
# What drafting must promise over plain decoding: of several exits the one that looks best is partly so by chance.
MARGIN = 0.05
# Of the table's seconds, what plain rounds may spend on looking whether an exit pays again: where none ever does, that
# is what "auto" costs. The other exits beside rounds that draft may cost more, since drafting saves more than that.
PLAIN_SHARE = 0.01
DRAFT_SHARE = 0.02
# Spent ahead, in autoregressive steps: with a dear head, an exit that missed the first token, or needs a second hit,
# would otherwise wait for tens of tokens.
ADVANCE = 1.0


@dataclass(frozen=True)
class RoundPlan:
    """What the next round does.

    Attributes:
        exit_layer: E; `None` for plain decoding.
        num_draft_tokens: at most how many tokens it drafts; 0 for plain decoding.
        scored: the exits to score on the tokens that it settles, ascending. An exit that drafts is always among them
            and needs no rows of the head, since its drafts are its choices.
    """

    exit_layer: int | None
    num_draft_tokens: int
    scored: tuple[int, ...]


def best_round(
    table: CostTable, acceptance: Mapping[int, float], max_num_draft_tokens: int, margin: float = 0.0
) -> tuple[int | None, int]:
    """Returns the exit and the draft length with most expected tokens per second of the table.

    They are `(None, 0)` where none beats one token per autoregressive step by more than the margin. Among equals the
    lower exit and the shorter draft win.

    Args:
        table: what rounds cost.
        acceptance: α by exit.
        max_num_draft_tokens: the longest draft allowed, within the table.
        margin: what drafting must gain, as a share of plain decoding's speed.

    Raises:
        ValueError: an exit or a draft length that was not measured.
    """
    best: tuple[int | None, int] = (None, 0)
    most = (1 + margin) / table.autoregressive_step
    for exit_layer in sorted(acceptance):
        # A round whose drafts all fail can only seem faster than a plain step, by noise of the measurement.
        if acceptance[exit_layer] <= 0:
            continue
        for drafts in range(1, max_num_draft_tokens + 1):
            rate = expected_tokens(acceptance[exit_layer], drafts) / table.round_seconds(exit_layer, drafts)
            if rate > most:
                best, most = (exit_layer, drafts), rate
    return best


class Agreement:
    """How often an exit agrees with the full model: a running mean that forgets, its prior too."""

    def __init__(self, expected: float = PRIOR_MEAN, trials: float = PRIOR_TRIALS) -> None:
        """Starts with what is expected, which counts as that many observations."""
        self._hits = expected * trials
        self._trials = trials

    def observe(self, agreement: float) -> None:
        """Adds one observation, in [0, 1]."""
        self._hits = self._hits * DECAY + agreement
        self._trials = self._trials * DECAY + 1

    def fade(self, tokens: float) -> None:
        """Lets tokens pass unseen: the mean stays and weighs less, at the least as much as the prior.

        So an exit that is seldom looked at is soon believed again, or no longer.
        """
        weight = max(DECAY**tokens, PRIOR_TRIALS / self._trials)
        self._hits *= weight
        self._trials *= weight

    @property
    def cautious(self) -> float:
        """The mean, less what chance may have lent it: 0 after a lone hit in many, the mean itself where it is 1.

        Off comes the relative error of a count, 1/√hits, times the misses' share: about a standard error at low rates,
        and less at high ones, where it would only shorten the drafts.
        """
        mean = min(self._hits / self._trials, 1.0)
        return max(mean - CAUTION * (1 - mean) * math.sqrt(mean / self._trials), 0.0)


class ExitController:
    """Chooses exit and draft length of each round, or plain decoding where nothing pays; one for each generation call.

    Call `first_scored` and `observe` after prefill, then for each round `next_round`, `observe` for each exit scored,
    and `book`. Everything follows from the frozen table and from what was observed.
    """

    def __init__(self, table: CostTable, max_num_draft_tokens: int) -> None:
        """Starts without observations.

        Args:
            table: what rounds cost, on the machine that decodes; its exits are the candidates.
            max_num_draft_tokens: at most how many tokens a round drafts.

        Raises:
            ValueError: draft lengths that the table has no costs for.
        """
        if not 1 <= max_num_draft_tokens <= table.max_num_draft_tokens:
            raise ValueError(
                f"max_num_draft_tokens={max_num_draft_tokens} is not allowed; the table of costs has rounds of 1 to "
                f"{table.max_num_draft_tokens} drafts: stay within, or measure wider verifications."
            )
        self._table = table
        self._longest = max_num_draft_tokens
        self._agreements = {exit_layer: Agreement() for exit_layer in table.exit_layers}
        if table.acceptance:
            known = zip(table.exit_layers, table.acceptance, strict=True)
            self._agreements = {exit_layer: Agreement(rate, MEASURED_TRIALS) for exit_layer, rate in known}
        self._plan = RoundPlan(None, 0, table.exit_layers)
        self._seconds = 0.0
        # By whether the round drafts.
        self._scoring = {False: 0.0, True: 0.0}

    def first_scored(self) -> tuple[int, ...]:
        """Returns the exits to score on the token that prefill emits: all."""
        return self._table.exit_layers

    def next_round(self) -> RoundPlan:
        """Returns what the next round does."""
        acceptance = {exit_layer: each.cautious for exit_layer, each in self._agreements.items()}
        exit_layer, drafts = best_round(self._table, acceptance, self._longest, MARGIN)
        drafting = () if exit_layer is None else (exit_layer,)
        passes = len(acceptance) - len(drafting)
        share = DRAFT_SHARE if drafting else PLAIN_SHARE
        spent = self._scoring[bool(drafting)] + passes * self._table.draft_head
        affordable = spent <= ADVANCE * self._table.autoregressive_step + share * self._seconds
        self._plan = RoundPlan(exit_layer, drafts, self._table.exit_layers if affordable else drafting)
        return self._plan

    def observe(self, exit_layer: int, agreements: Sequence[float]) -> None:
        """Learns how an exit agreed with the full model.

        Args:
            exit_layer: one of the exits to score.
            agreements: of the settled tokens that it was scored on, in their order: 1.0 or 0.0, or the probability that
                the exit's choice is accepted.
        """
        for agreement in agreements:
            self._agreements[exit_layer].observe(agreement)

    def book(self, *, seconds: float, tokens: float, head_rows: float) -> None:
        """Counts a finished round.

        Args:
            seconds: what it took by the table, without scoring.
            tokens: that it emitted, at least one; of several rows the mean.
            head_rows: the rows of the draft head that were run for scoring alone, likewise.
        """
        self._seconds += seconds
        # The tokens that a round settles pass the head beside each other, which takes about what one does.
        self._scoring[self._plan.exit_layer is not None] += head_rows / tokens * self._table.draft_head
        for exit_layer, agreement in self._agreements.items():
            if exit_layer not in self._plan.scored:
                agreement.fade(tokens)
