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
        accepted: Sequence[int],
        targets: Sequence[int | None],
        scores: torch.Tensor,
    ) -> None:
        """Takes in how well exits foresaw what a round has settled, before the rows take it in.

        Args:
            plan: of the round.
            rows: that were active in it.
            draft: with the states of the exits to be scored.
            accepted: how many drafts of each row are.
            targets: the token that follows them.
            scores: of the full model, processed, `(rows, width, vocabulary)`.
        """
        if self._controller is None and self.stop_rule is None:
            return
        head_rows = 0
        for place, (row, drafted, count, target) in enumerate(zip(rows, draft.rows, accepted, targets, strict=True)):
            self._learn_of_copy(drafted, [*drafted.tokens[:count], target])
            foreseen = self._foreseen(drafted, scores[place, : count + 1])
            if self.stop_rule is not None:
                # Without drafts there are no confidences either.
                for confidence, held in zip(drafted.confidences, foreseen, strict=False):
                    self.stop_rule.observe(draft.exit_layer, confidence, held)
            if self._controller is not None and foreseen:
                self._controller.observe(draft.exit_layer, foreseen)
            for layer in plan.scored:
                if self._controller is None or (layer == draft.exit_layer and foreseen):
                    continue
                agreement = self._head.agreement(
                    draft.states[layer][place, : count + 1],
                    [row.index] * (count + 1),
                    [len(row.tokens) + offset for offset in range(count + 1)],
                    scores[place, : count + 1],
                )
                self._controller.observe(layer, agreement)
                head_rows += count + 1
        self._book(plan, draft, (sum(accepted) + len(rows)) / len(rows), head_rows / len(rows))

    def _learn_of_copy(self, drafted: RowDraft, settled: Sequence[int | None]) -> None:
        """Compares what the text offered with what came, whether it was drafted or not."""
        for copied, token in zip(drafted.copy.tokens, settled, strict=False):
            if self.stop_rule is not None:
                self.stop_rule.observe(COPIED, drafted.copy.confidence, float(copied == token))
            if copied != token:
                break

    def _foreseen(self, drafted: RowDraft, scores: torch.Tensor) -> list[float]:
        """Returns how likely each draft of the exit was to be accepted, as far as all before it were."""
        if drafted.is_copied:
            return []
        left_out = [] if drafted.left_out is None else [drafted.left_out]
        tokens = [*drafted.tokens, *left_out][: len(scores)]
        if not tokens:
            return []
        return self._head.choice.foreseen(tokens, drafted.sources[: len(tokens)], scores[: len(tokens)])

    def _book(self, plan: Round, draft: Draft, tokens: float, head_rows: float) -> None:
        """Books a round by the cost table: what it emitted, and ran of the head beside, in the mean of its rows."""
        costs = self._settings.costs
        if costs is None:
            return
        verified = max(map(len, draft.tokens))
        seconds = costs.autoregressive_step
        if plan.exit_layer < self._settings.depth or verified:
            exit_layer = plan.exit_layer if plan.exit_layer < self._settings.depth else costs.exit_layers[0]
            seconds = costs.seconds(exit_layer, draft.steps, verified)
        if self.stop_rule is not None:
            self.stop_rule.book(seconds, tokens)
        if self._controller is not None:
            self._controller.book(seconds=seconds, tokens=tokens, head_rows=head_rows)
