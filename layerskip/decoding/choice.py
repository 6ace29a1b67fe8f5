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

    def verify(self, scores: torch.Tensor, drafts: Sequence[list[int]]) -> tuple[list[int], list[int | None]]:
        """Returns for each row how many drafts are accepted, and the token that follows them; never `None` here.

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

    def verify(self, scores: torch.Tensor, drafts: Sequence[list[int]]) -> tuple[list[int], list[int | None]]:
        """Returns for each row how many drafts are accepted, and the token that follows them; see `GreedyChoice`.

        The token is `None` where the scores leave none to choose from. That is no error behind the end of a row.
        """
        target = probabilities(scores)
        nothing = target[..., 0].isnan()
        # Any distribution may stand in: it bears on what follows alone, and NaN would refuse the drafts before it.
        target.masked_fill_(nothing.unsqueeze(-1), 1 / target.shape[-1])
        length = scores.shape[1] - 1
        # A step whose drafts were all dropped left a distribution behind that nothing was drawn from.
        source = torch.stack(self.drawn_from[:length], dim=1) if length else target[:, :0]
        self.drawn_from = []
        counts = torch.tensor([len(draft) for draft in drafts], device=scores.device)
        filled = torch.tensor([draft + [0] * (length - len(draft)) for draft in drafts], device=scores.device)
        uniforms = self._uniforms(target, length + 1)
        accepted, tokens = speculate(self.rule, target, source, filled.long(), counts, uniforms)
        possible = (~nothing).long().cumprod(-1).sum(-1)
        # One read for the whole round.
        read = torch.stack([accepted, tokens, possible]).tolist()
        rows = list(zip(*read, strict=True))
        return (
            [min(count, limit) for count, _, limit in rows],
            [token if count < limit else None for count, token, limit in rows],
        )

    def _uniforms(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Returns random numbers in [0, 1), `(rows, count)`."""
        device = torch.device("cpu") if self.generator is None else self.generator.device
        dtype = torch.float32 if device.type == "mps" else like.dtype
        drawn = torch.rand((like.shape[0], count), generator=self.generator, device=device, dtype=dtype)
        return drawn.to(like.device, like.dtype)
