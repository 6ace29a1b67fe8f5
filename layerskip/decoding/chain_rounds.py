"""Rounds that draft a chain of tokens for each row, and the first tokens, which no round drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from layerskip.decoding.drafting import Draft, Drafting, RowDraft
from layerskip.decoding.exit_head import ExitHead
from layerskip.decoding.ngrams import NgramIndex
from layerskip.decoding.pace import Pace, Round
from layerskip.decoding.passes import Passes
from layerskip.decoding.rounds import Outcome, Scored, Verdict
from layerskip.decoding.rows import DecodeSettings, Row
from layerskip.decoding.transcript import Transcript
from layerskip.model.placement import Placement


class ChainRounds:
    """Drafts with the early layers, verifies with the rest, greedily or by speculative sampling."""

    def __init__(
        self,
        passes: Passes,
        head: ExitHead,
        settings: DecodeSettings,
        *,
        transcript: Transcript | None = None,
        copies: Sequence[NgramIndex] | None = None,
    ) -> None:
        """Makes ready for the rounds of one call.

        Args:
            head: what drafts are chosen with.
            settings: may be exchanged between rounds, but for what decides on exits and lengths by cost.
            transcript: what processors see.
            copies: the text of each row of the batch, to copy from.

        Raises:
            ValueError: settings that decide by cost and have none.
        """
        self.passes = passes
        self.head = head
        self.settings = settings
        self.pace = Pace(settings, head)
        self.drafting = Drafting(
            passes,
            head,
            settings.stops.eos_token_ids,
            transcript=transcript,
            copies=copies,
            trusts_copies=settings.trusts_copies,
            stop_rule=self.pace.stop_rule,
        )

    def prefill(self, rows: Sequence[Row], embedded: torch.Tensor, placement: Placement) -> Outcome:
        """Runs all layers over the prompts; the outcome is each row's first token.

        Args:
            embedded: the hidden state before layer 1, `(rows, width, hidden)`.
            placement: where the prompts stand.
        """
        plan = self.pace.prefill()
        draft = Draft(self.settings.depth, [RowDraft() for _ in rows], [0] * len(rows))
        states = self.passes.run_through(rows, embedded, 0, [*plan.scored, self.settings.depth], placement)
        for layer, output in states.items():
            last = torch.tensor(placement.live, device=output.device) - 1
            draft.states[layer] = output[torch.arange(len(rows), device=output.device), last].unsqueeze(1)
        return self._verify(rows, plan, draft, time.perf_counter())

    def run(self, rows: Sequence[Row]) -> Outcome:
        """Drafts and verifies; see `Rounds`."""
        plan = self.pace.next_round(self.settings)
        room = [self.settings.room(row) for row in rows]
        limits = [min(plan.num_draft_tokens, left) for left in room]
        copies = [min(plan.copies, left) for left in room]
        lower = [layer for layer in plan.scored if layer < plan.exit_layer]
        draft = self.drafting.draft(rows, limits, plan.exit_layer, lower, copies)
        drafted = time.perf_counter()
        self.drafting.finish(rows, draft, lower)
        if plan.exit_layer < self.settings.depth:
            self._run_late(rows, plan, draft)
        return self._verify(rows, plan, draft, drafted)

    def _run_late(self, rows: Sequence[Row], plan: Round, draft: Draft) -> None:
        """Runs the late layers over the exit states of each row's last token and of all its drafts."""
        live = [len(tokens) + 1 for tokens in draft.tokens]
        placement = self.passes.place([row.committed - 1 for row in rows], live, max(live))
        hidden = draft.states[plan.exit_layer][:, : max(live)]
        stops = [*(layer for layer in plan.scored if layer > plan.exit_layer), self.settings.depth]
        draft.states.update(self.passes.run_through(rows, hidden, plan.exit_layer, stops, placement))

    def _verify(self, rows: Sequence[Row], plan: Round, draft: Draft, drafted: float) -> Outcome:
        """Decides which drafts hold, from the states behind the last layer."""
        drafts = draft.tokens
        width = max(map(len, drafts)) + 1
        scored = self._score(rows, draft.states[self.settings.depth][:, :width], drafts)
        sources = [row.sources[: len(row.tokens)] for row in draft.rows]
        accepted, targets = self.head.choice.verify(scored.scores, drafts, sources)
        settled = [[*tokens[:count], target] for tokens, count, target in zip(drafts, accepted, targets, strict=True)]
        self.pace.learn(plan, rows, draft, settled, scored.scores)
        verdicts = [
            Verdict(len(tokens), len(tokens), tokens[:count], target, range(count + 1))
            for tokens, count, target in zip(drafts, accepted, targets, strict=True)
        ]
        return Outcome(plan.exit_layer, draft.steps, verdicts, scored, drafted)

    def _score(self, rows: Sequence[Row], hidden: torch.Tensor, drafts: list[list[int]]) -> Scored:
        """Returns the full head's output for states `(rows, width, hidden)`: after the last token and every draft."""
        logits = self.passes.model.logits(hidden)
        processors = self.head.processors
        if processors is None:
            return Scored(logits, logits)
        places = [(index, offset) for index, draft in enumerate(drafts) for offset in range(len(draft) + 1)]
        index, offset = torch.tensor(places, device=processors.device).unbind(1)
        scores = logits.to(processors.device, torch.float32, copy=True)
        scores[index, offset], _ = processors(
            scores[index, offset],
            [rows[place].index for place, _ in places],
            [len(rows[place].tokens) + offset for place, offset in places],
        )
        return Scored(logits, scores)
