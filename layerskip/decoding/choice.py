"""How tokens are chosen from processed scores: greedily, or by speculative sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layerskip.decoding.acceptance import BLOCK_RULE, Rule, accept_greedy, draw, probabilities, speculate

# Of each row, what each of its drafts was drawn from, `(vocabulary,)`; nothing where drafts are not drawn.
Sources = Sequence[Sequence[torch.Tensor]]


class GreedyChoice:
    """The best token, for drafts and targets alike; draws no random numbers."""

    def draft(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the drafts for processed scores `(n, vocabulary)`: `(n,)`, and `None`, since none is drawn."""
        return scores.argmax(-1), None

    def certain(self, tokens: Sequence[int], vocab_size: int, device: torch.device) -> list[torch.Tensor]:
        """Returns nothing, since no token is drawn here; see `SampledChoice`."""
        return []

    def verify(
        self, scores: torch.Tensor, drafts: Sequence[list[int]], sources: Sources
    ) -> tuple[list[int], list[int | None]]:
        """Returns for each row how many drafts are accepted, and the token that follows them; never `None` here.

        Args:
            scores: of the full model, processed, `(rows, width, vocabulary)`: after the row's last token and after
                each of its drafts.
            drafts: of each row, at most width − 1.
            sources: what each draft was drawn from; of no use here.
        """
        targets = scores.argmax(-1).tolist()
        accepted = [accept_greedy(draft, target) for draft, target in zip(drafts, targets, strict=True)]
        return accepted, [target[count] for target, count in zip(targets, accepted, strict=True)]

    def agreement(self, scores: torch.Tensor, targets: torch.Tensor, settled: Sequence[int | None]) -> list[float]:
        """Returns how likely the full model accepts a draft from `scores` at n places: 1 where both agree, else 0.

        Args:
            scores, targets: of an exit and of the full model at the same places, processed, `(n, vocabulary)`.
            settled: what was emitted at these places.
        """
        return self.foreseen(scores.argmax(-1).tolist(), [], targets, settled)

    def foreseen(
        self,
        tokens: Sequence[int],
        sources: Sequence[torch.Tensor],
        targets: torch.Tensor,
        settled: Sequence[int | None],
    ) -> list[float]:
        """Returns the same for drafts that were chosen already.

        Args:
            tokens: a draft at each place.
            sources: what each was drawn from; of no use here.
            targets, settled: of `agreement`; greedy decoding emits the full model's choice, so that nothing is read.
        """
        return [float(token == target) for token, target in zip(tokens, settled, strict=True)]


class SampledChoice:
    """Tokens drawn from the softmax of processed scores; what is emitted is distributed as the full model's own draws.

    Attributes:
        generator: what random numbers come from; torch's global one where it is `None`.
        rule: decides which drafts are accepted.
    """

    def __init__(self, generator: torch.Generator | None = None, rule: Rule = BLOCK_RULE) -> None:
        self.generator = generator
        self.rule = rule

    def draft(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns drafts drawn from processed scores `(n, vocabulary)`, `(n,)`, and what they were drawn from."""
        weights = probabilities(scores)
        return draw(weights, self._uniforms(weights, 1)[:, 0]), weights

    def certain(self, tokens: Sequence[int], vocab_size: int, device: torch.device) -> list[torch.Tensor]:
        """Returns, for tokens that were not drawn, the distributions that are certain of them, `(vocabulary,)` each."""
        ids = torch.tensor(tokens, device=device)
        certain = torch.nn.functional.one_hot(ids, vocab_size)
        return list(certain.to(torch.float32 if device.type == "mps" else torch.float64))

    def verify(
        self, scores: torch.Tensor, drafts: Sequence[list[int]], sources: Sources
    ) -> tuple[list[int], list[int | None]]:
        """Returns for each row how many drafts are accepted, and the token that follows them; see `GreedyChoice`.

        The token is `None` where the scores leave none to choose from. That is no error behind the end of a row.
        """
        target = probabilities(scores)
        nothing = target[..., 0].isnan()
        # Any distribution may stand in: it bears on what follows alone, and NaN would refuse the drafts before it.
        target.masked_fill_(nothing.unsqueeze(-1), 1 / target.shape[-1])
        length = scores.shape[1] - 1
        source = target.new_zeros((len(drafts), length, target.shape[-1]))
        for row, drawn_from in enumerate(sources):
            for offset, weights in enumerate(drawn_from):
                source[row, offset] = weights
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

    def agreement(self, scores: torch.Tensor, targets: torch.Tensor, settled: Sequence[int | None]) -> list[float]:
        """Returns how likely the full model accepts a draft from `scores` at n places; see `GreedyChoice`.

        It is Σ min(p, q), whatever was drawn, and 0 where either leaves no token to choose from.
        """
        return _shared(probabilities(targets), probabilities(scores))

    def foreseen(
        self,
        tokens: Sequence[int],
        sources: Sequence[torch.Tensor],
        targets: torch.Tensor,
        settled: Sequence[int | None],
    ) -> list[float]:
        """Returns the same for drafts that were drawn already, whatever came out; see `GreedyChoice`."""
        return _shared(probabilities(targets), torch.stack(list(sources)))

    def _uniforms(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Returns random numbers in [0, 1), `(rows, count)`."""
        device = torch.device("cpu") if self.generator is None else self.generator.device
        dtype = torch.float32 if device.type == "mps" else like.dtype
        drawn = torch.rand((like.shape[0], count), generator=self.generator, device=device, dtype=dtype)
        return drawn.to(like.device, like.dtype)


def _shared(p: torch.Tensor, q: torch.Tensor) -> list[float]:
    """Returns Σ min(p, q) of distributions `(n, vocabulary)`, 0 where one of them is none."""
    shared: list[float] = torch.minimum(p, q.to(p.device)).sum(-1).nan_to_num().tolist()
    return shared
