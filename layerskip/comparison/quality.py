"""Quality per exit: what every exit makes of the model's own greedy answers, token by token, and its sums."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.comparison.forced import LOGIT_ROWS, answer_states, following
from layerskip.model.layered import LayeredModel

# Places of an answer that are summed up together.
SPAN = 16


@dataclass(frozen=True)
class Reading:
    """What the exits make of one answer of N tokens, for each of them but the first, which prefill gives.

    Attributes:
        matches: of each exit, N − 1 flags: entry t tells whether it would have drafted new token t + 1 after the
            prompt and new tokens 0..t.
        choices: of each exit and last of layer L, N − 1 first choices of the whole head.
        losses: likewise, −log p of the token that follows, by the whole head.
        acceptances: of each exit, N − 1 values Σ min(p, q); see `Quality`.
    """

    matches: list[list[bool]]
    choices: list[list[int]]
    losses: list[list[float]]
    acceptances: list[list[float]]

    @property
    def tokens(self) -> int:
        """N − 1."""
        return len(self.choices[0])


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


@torch.inference_mode()
def read_answers(
    layered: LayeredModel,
    prompt_ids: Sequence[list[int]],
    new_tokens: Sequence[list[int]],
    exit_layers: Sequence[int],
    *,
    draft_token_ids: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> list[Reading]:
    """Returns what exits make of greedy answers of all layers, one reading for each.

    Every layer runs once over each token, and logits are held for some hundred tokens at a time.

    Args:
        layered: the model, in eval mode.
        prompt_ids: the prompts' tokens.
        new_tokens: the answers' tokens, at least one each.
        exit_layers: the exits, in rising order, counted from 1.
        draft_token_ids: what is drafted from, `(ids,)`, ascending; `None` for all ids.
        temperature: above 0, of the distributions that `acceptances` compares.

    Raises:
        ValueError: logits that are NaN.
    """
    layers = [*exit_layers, layered.num_layers]
    states = dict(answer_states(layered, prompt_ids, new_tokens, layers))
    follow = following(new_tokens).to(layered.device)
    ids = None if draft_token_ids is None else draft_token_ids.to(layered.device)
    chunks: list[list[torch.Tensor]] = []
    for start in range(0, len(follow), LOGIT_ROWS):
        part = slice(start, start + LOGIT_ROWS)
        chunks.append(_read_chunk(layered, [states[layer][part] for layer in layers], follow[part], ids, temperature))
    matches, choices, losses, acceptances = (
        torch.cat(parts, dim=1).tolist() if chunks else [[] for _ in layers]
        for parts in (zip(*chunks, strict=True) if chunks else [()] * 4)
    )
    readings, begin = [], 0
    for tokens in new_tokens:
        mine = slice(begin, begin + len(tokens) - 1)
        begin = mine.stop
        readings.append(
            Reading(
                [row[mine] for row in matches[:-1]],
                [row[mine] for row in choices],
                [row[mine] for row in losses],
                [row[mine] for row in acceptances[:-1]],
            )
        )
    return readings


def _read_chunk(
    layered: LayeredModel,
    states: Sequence[torch.Tensor],
    follow: torch.Tensor,
    ids: torch.Tensor | None,
    temperature: float,
) -> list[torch.Tensor]:
    """Returns matches, choices, losses and acceptances of some tokens, `(layers, tokens)` each, layer L last."""
    last = layered.logits(states[-1]).to(layered.device).float()
    wanted = (last / temperature).softmax(-1)
    wanted = wanted if ids is None else wanted[:, ids]
    found = []
    for state in states:
        logits = last if state is states[-1] else layered.logits(state).to(layered.device).float()
        drafted = logits if ids is None else logits[:, ids]
        draft = drafted.argmax(-1) if ids is None else ids[drafted.argmax(-1)]
        overlap = torch.minimum(wanted, (drafted / temperature).softmax(-1)).sum(-1)
        loss = torch.nn.functional.cross_entropy(logits, follow, reduction="none")
        found.append((draft == follow, logits.argmax(-1), loss, overlap))
        if loss.isnan().any() or overlap.isnan().any():
            raise ValueError("the model's logits are NaN, so that nothing can be compared; look for damaged weights.")
    return [torch.stack(values).cpu() for values in zip(*found, strict=True)]


def exit_quality(readings: Sequence[Reading], exit_layers: Sequence[int], num_layers: int) -> list[ExitQuality]:
    """Returns the figures of each exit, and last of layer L, over some answers; none where they have no tokens.

    Args:
        readings: of the answers.
        exit_layers: the exits, in the order of the readings.
        num_layers: L.
    """
    longest = max((reading.tokens for reading in readings), default=0)
    if not longest:
        return []
    qualities = []
    for row, layer in enumerate([*exit_layers, num_layers]):
        # Entry t of a reading is about new token t + 1.
        spans = [
            PositionQuality(*_sums(readings, row, start, start + SPAN), start=start + 1, stop=start + SPAN + 1)
            for start in range(0, longest, SPAN)
        ]
        qualities.append(ExitQuality(*_sums(readings, row, 0, longest), exit_layer=layer, by_position=tuple(spans)))
    return qualities


def _sums(readings: Sequence[Reading], row: int, start: int, stop: int) -> tuple[int, float, float, float]:
    """Returns the values of a `Quality` for one layer over entries `start .. stop − 1` of all readings."""
    losses, agreed, overlaps = [], 0, 0.0
    for reading in readings:
        losses += reading.losses[row][start:stop]
        pairs = zip(reading.choices[row][start:stop], reading.choices[-1][start:stop], strict=True)
        agreed += sum(choice == last for choice, last in pairs)
        is_last = row == len(reading.acceptances)
        overlaps += len(reading.losses[row][start:stop]) if is_last else math.fsum(reading.acceptances[row][start:stop])
    tokens = len(losses)
    mean = math.fsum(losses) / tokens
    # Beyond what a float holds.
    perplexity = math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf
    return tokens, perplexity, agreed / tokens, overlaps / tokens
