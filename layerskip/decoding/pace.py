"""Which exit the next round drafts with, how far, and what is learned from a round for those that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.decoding.drafting import Draft, RowDraft
from layerskip.decoding.exit_controller import ExitController
from layerskip.decoding.exit_head import ExitHead
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.decoding.stop_rule import COPIED, StopRule


@dataclass(frozen=True)
class Round:
    """How the next round decodes.

    Attributes:
        exit_layer: E; the last layer for a step of plain decoding.
        num_draft_tokens: at most how many drafts of the exit it has.
        copies: at most how many tokens it copies.
        scored: exits that are compared with what the round settles, rising; their states are kept.
    """

    exit_layer: int
    num_draft_tokens: int
    copies: int
    scored: tuple[int, ...] = ()


class Pace:
    """Decides on the rounds of one call, from its settings and from what earlier rounds have shown.

    Attributes:
        stop_rule: ends drafts that no longer pay; `None` where their length is fixed.
    """

    def __init__(self, settings: DecodeSettings, head: ExitHead) -> None:
        """Begins with nothing learned.

        Args:
            settings: of the call.
            head: what drafts are chosen with, and what exits are scored with.

        Raises:
            ValueError: the settings ask for decisions by cost and have no costs, or not of rounds that long.
        """
        self._settings = settings
        self._head = head
        self._controller: ExitController | None = None
        self.stop_rule: StopRule | None = None
        if not settings.chooses_exit and not settings.stops_drafts_early:
            return
        if settings.costs is None:
            raise ValueError("costs=None, but exits are chosen, or drafts end, by what rounds cost; pass a CostTable.")
        if settings.chooses_exit:
            self._controller = ExitController(settings.costs, settings.num_draft_tokens)
        if settings.stops_drafts_early:
            self.stop_rule = StopRule(settings.costs)

    def prefill(self) -> Round:
        """Returns what to score in prefill, where nothing is drafted."""
        scored = () if self._controller is None else self._controller.first_scored()
        return Round(self._settings.depth, 0, 0, scored)

    def next_round(self, settings: DecodeSettings) -> Round:
        """Returns how the next round decodes; `settings` are the call's as they are now."""
        longest = settings.num_draft_tokens
        if self._controller is None:
            return Round(settings.exit_layer, longest, longest)
        plan = self._controller.next_round()
        if plan.exit_layer is None:
            # Copies that are trusted need no exit.
            return Round(settings.depth, 0, longest if settings.trusts_copies else 0, plan.scored)
        # Where a rule ends drafts, the length that is best on average is no limit.
        length = plan.num_draft_tokens if self.stop_rule is None else longest
        return Round(plan.exit_layer, length, longest if settings.trusts_copies else length, plan.scored)

    def learn(
        self,
        plan: Round,
        rows: Sequence[Row],
        draft: Draft,
        settled: Sequence[Sequence[int | None]],
        scores: torch.Tensor,
    ) -> None:
        """Takes in how well exits foresaw what a round has settled, before the rows take it in.

        Args:
            plan: of the round.
            rows: that were active in it.
            draft: with the states of the exits to be scored.
            settled: of each row, its accepted drafts and the token that follows them.
            scores: of the full model, processed, `(rows, width, vocabulary)`.
        """
        if self._controller is None and self.stop_rule is None:
            return
        is_foreseen = False
        for place, (drafted, tokens) in enumerate(zip(draft.rows, settled, strict=True)):
            foreseen = self._foreseen(drafted, scores[place, : len(tokens)], tokens)
            is_foreseen |= bool(foreseen)
            if self.stop_rule is not None:
                self._learn_of_copy(self.stop_rule, drafted, tokens)
                # Without drafts there are no confidences either.
                for confidence, held in zip(drafted.confidences, foreseen, strict=False):
                    self.stop_rule.observe(draft.exit_layer, confidence, held)
            if self._controller is not None and foreseen:
                self._controller.observe(draft.exit_layer, foreseen)
        # The exit that drafts is always to be scored, since its drafts tell; a head of its own would be beyond that.
        is_known = is_foreseen or plan.scored == (draft.exit_layer,)
        beside = [layer for layer in plan.scored if layer != draft.exit_layer or not is_known]
        head_rows = self._score(beside, rows, draft, settled, scores)
        self._book(plan, draft, sum(map(len, settled)) / len(rows), head_rows / len(rows))

    def _score(
        self,
        exit_layers: Sequence[int],
        rows: Sequence[Row],
        draft: Draft,
        settled: Sequence[Sequence[int | None]],
        scores: torch.Tensor,
    ) -> int:
        """Compares exits with what all rows have settled; returns how many rows of the head that took."""
        if self._controller is None or not exit_layers:
            return 0
        places = [(place, offset) for place, tokens in enumerate(settled) for offset in range(len(tokens))]
        place, offset = torch.tensor(places, device=scores.device).unbind(1)
        targets = scores[place, offset]
        emitted = [token for tokens in settled for token in tokens]
        for layer in exit_layers:
            states = draft.states[layer]
            agreement = self._head.agreement(
                states[place.to(states.device), offset.to(states.device)],
                [rows[place].index for place, _ in places],
                [len(rows[place].tokens) + offset for place, offset in places],
                targets,
                emitted,
            )
            self._controller.observe(layer, agreement)
        return len(places) * len(exit_layers)

    def _learn_of_copy(self, stop_rule: StopRule, drafted: RowDraft, settled: Sequence[int | None]) -> None:
        """Compares what the text offered with what came, whether it was drafted or not."""
        for copied, token in zip(drafted.copy.tokens, settled, strict=False):
            stop_rule.observe(COPIED, drafted.copy.confidence, float(copied == token))
            if copied != token:
                break

    def _foreseen(self, drafted: RowDraft, scores: torch.Tensor, settled: Sequence[int | None]) -> list[float]:
        """Returns how likely each draft of the exit was to be accepted, as far as all before it were."""
        if drafted.is_copied:
            return []
        left_out = [] if drafted.left_out is None else [drafted.left_out]
        tokens = [*drafted.tokens, *left_out][: len(settled)]
        if not tokens:
            return []
        known = len(tokens)
        return self._head.choice.foreseen(tokens, drafted.sources[:known], scores[:known], settled[:known])

    def _book(self, plan: Round, draft: Draft, tokens: float, head_rows: float) -> None:
        """Books a round by the cost table: what it emitted, and ran of the head beside, in the mean of its rows."""
        costs = self._settings.costs
        if costs is None:
            return
        verified = max(map(len, draft.tokens))
        seconds = costs.plain_seconds(verified)
        if plan.exit_layer < self._settings.depth:
            seconds = costs.seconds(plan.exit_layer, draft.steps, verified)
        if self.stop_rule is not None:
            self.stop_rule.book(seconds, tokens)
        if self._controller is not None:
            self._controller.book(seconds=seconds, tokens=tokens, head_rows=head_rows)
