"""What drafts are chosen with: the exit head, or a part of it, and the logits processors behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.decoding.choice import GreedyChoice, SampledChoice
from layerskip.decoding.processors import Processors
from layerskip.model.draft_head import DraftHead
from layerskip.model.layered import LayeredModel


@dataclass(frozen=True)
class Candidates:
    """The exit's choice at some places.

    Attributes:
        tokens: what it would draft at each.
        alive: whether there is a token to draft at all: processors may leave none of those that can be drafted.
        confidences: the exit's largest probability at each; empty where nobody asked.
        sources: what each token was drawn from, `(n, vocabulary)`; `None` where none is drawn.
    """

    tokens: list[int]
    alive: list[bool]
    confidences: list[float]
    sources: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class ExitHead:
    """Chooses drafts from exit states.

    Attributes:
        model: whose final norm and head turn states into logits.
        draft_head: the rows of the head that drafts are chosen from; `None` for all.
        choice: how a token is chosen.
        processors: what logits pass before; `None` where nothing changes them.
    """

    model: LayeredModel
    draft_head: DraftHead | None
    choice: GreedyChoice | SampledChoice
    processors: Processors | None

    @property
    def _is_bare(self) -> bool:
        """Whether only the best of the logits is wanted, so that they need not be as wide as the vocabulary."""
        return self.processors is None and isinstance(self.choice, GreedyChoice)

    def candidates(
        self, states: torch.Tensor, rows: Sequence[int], counts: Sequence[int], with_confidence: bool = False
    ) -> Candidates:
        """Returns the drafts that follow exit states; one read from the device.

        Args:
            states: `(n, hidden)`.
            rows: of which row of the batch each is.
            counts: how many new tokens of its row come before each draft; they are in the transcript.
            with_confidence: give `confidences`.
        """
        if self._is_bare and self.draft_head is not None:
            scores = self.draft_head.logits(states.unsqueeze(1))[:, 0]
            tokens, sources = self.draft_head.token_ids[scores.argmax(-1)], None
            alive = None
        else:
            scores, alive = self.scores(states, rows, counts)
            tokens, sources = self.choice.draft(scores)
        read = [tokens.float()]
        if alive is not None:
            read.append(alive.to(tokens.device).float())
        if with_confidence:
            # A place that is not alive may have NaN here, which nobody looks at.
            read.append((scores.amax(-1).float() - scores.float().logsumexp(-1)).exp().to(tokens.device))
        # Token ids are below 2^24, so that float32, which every device has, holds them.
        values = torch.stack(read).tolist()
        return Candidates(
            tokens=[int(token) for token in values[0]],
            alive=[True] * len(values[0]) if alive is None else [bool(value) for value in values[1]],
            confidences=values[-1] if with_confidence else [],
            sources=sources,
        )

    def certain(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Returns what drafts count as drawn from that were not drawn at all: all weight on the token itself.

        Greedy decoding needs none, and gets none.
        """
        return self.choice.certain(tokens, self.model.vocab_size, self.model.device)

    def scores(
        self, states: torch.Tensor, rows: Sequence[int], counts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns what drafts are chosen from, `(n, vocabulary)`, and, behind processors, where that is a choice.

        Arguments are those of `candidates`. What the draft head does not know stands at −inf.
        """
        head = self.model.logits if self.draft_head is None else self.draft_head.full_logits
        # A token of each row, as modules and their hooks know it.
        logits = head(states.unsqueeze(1))[:, 0]
        if self.processors is None:
            return logits, None
        scores = logits.to(self.processors.device, torch.float32, copy=True)
        processed, alive = self.processors(scores, rows, counts)
        if self.draft_head is not None:
            # A processor may lift scores above −inf; what the head does not know stays out.
            processed = processed.masked_fill(scores == -torch.inf, -torch.inf)
            alive = (processed > -torch.inf).any(-1)
        return processed, alive

    def agreement(
        self,
        states: torch.Tensor,
        rows: Sequence[int],
        counts: Sequence[int],
        targets: torch.Tensor,
        settled: Sequence[int | None],
    ) -> list[float]:
        """Returns how likely the full model would have accepted a draft at each place; one read from the device.

        Args:
            states, rows, counts: of `candidates`.
            targets: the full model's processed scores at the same places, `(n, vocabulary)`.
            settled: what was emitted there.
        """
        if self._is_bare and self.draft_head is not None:
            chosen = self.draft_head.choose(states.unsqueeze(1))[:, 0]
            return self.choice.foreseen(chosen.tolist(), [], targets, settled)
        return self.choice.agreement(self.scores(states, rows, counts)[0], targets, settled)
