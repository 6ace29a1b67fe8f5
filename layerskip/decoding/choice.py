"""How tokens are chosen from processed scores: greedily, or by speculative sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.decoding.acceptance import BLOCK_RULE, Rule, accept_greedy, draw, probabilities, speculate


class GreedyChoice:
    """The best token, for drafts and targets alike; draws no random numbers."""

    def draft(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns the drafts for processed scores `(rows, vocabulary)`: `(rows,)`."""
        return scores.argmax(-1)

    def verify(self, scores: torch.Tensor, drafts: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Returns for each row how many drafts are accepted, and the token that follows them.

        Args:
            scores: of the full model, processed, `(rows, width, vocabulary)`: after the row's last token and after
                each of its drafts.
            drafts: of each row, at most width − 1.
        """
        targets = scores.argmax(-1).tolist()
        accepted = [accept_greedy(draft, target) for draft, target in zip(drafts, targets, strict=True)]
        return accepted, [target[count] for target, count in zip(targets, accepted, strict=True)]


class SampledChoice:
    """Tokens drawn from the softmax of processed scores; what is emitted is distributed as the full model's own draws.

    Holds what the drafts of a round were drawn from, until `verify` uses it.
    """

    def __init__(self, generator: torch.Generator | None = None, rule: Rule = BLOCK_RULE) -> None:
        """Draws with `generator`, or with torch's global one; `rule` decides which drafts are accepted."""
        self.generator = generator
        self.rule = rule
        self.drawn_from: list[torch.Tensor] = []

    def draft(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns drafts drawn from processed scores `(rows, vocabulary)`: `(rows,)`."""
        weights = probabilities(scores)
        self.drawn_from.append(weights)
        return draw(weights, self._uniforms(weights, 1)[:, 0])

    def verify(self, scores: torch.Tensor, drafts: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Returns for each row how many drafts are accepted, and the token that follows them; see `GreedyChoice`.

        Raises:
            ValueError: the processors leave no token to choose from.
        """
        target = probabilities(scores)
        length = scores.shape[1] - 1
        # A step whose drafts were all dropped left a distribution behind that nothing was drawn from.
        source = torch.stack(self.drawn_from[:length], dim=1) if length else target[:, :0]
        self.drawn_from = []
        counts = torch.tensor([len(draft) for draft in drafts], device=scores.device)
        filled = torch.tensor([draft + [0] * (length - len(draft)) for draft in drafts], device=scores.device)
        uniforms = self._uniforms(target, length + 1)
        accepted, tokens = speculate(self.rule, target, source, filled.long(), counts, uniforms)
        chosen_from = target[torch.arange(len(counts), device=scores.device), accepted].sum(-1)
        # One read for the whole round.
        read = torch.stack([accepted, tokens, chosen_from.isfinite().long()]).tolist()
        if not all(read[2]):
            raise ValueError(
                "the logits processors leave no token to choose from: all scores of a row are -inf or NaN; loosen "
                "them, or pass remove_invalid_values=True."
            )
        return read[0], read[1]

    def _uniforms(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Returns random numbers in [0, 1), `(rows, count)`."""
        device = torch.device("cpu") if self.generator is None else self.generator.device
        shape = (like.shape[0], count)
        return torch.rand(shape, generator=self.generator, device=device, dtype=like.dtype).to(like.device)
