"""One pass over prompts and given answers that stops at every exit on its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from layerskip.model.cache import SharedCache
from layerskip.model.layered import LayeredModel
from layerskip.model.placement import Placement

# Rows of logits that are held at a time.
LOGIT_ROWS = 256


@torch.inference_mode()
def answer_states(
    layered: LayeredModel, prompt_ids: Sequence[list[int]], new_tokens: Sequence[list[int]], exit_layers: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each exit, in rising order, with its states before all tokens of the answers but the first ones.

    Every layer up to the highest exit runs once.

    Args:
        layered: the model, in eval mode.
        prompt_ids: the prompts' tokens.
        new_tokens: the answers' tokens, at least one each.
        exit_layers: the exits, counted from 1; L for the last layer.

    Yields:
        The exit, and states `(tokens, hidden)`, answer after answer, of what `following(new_tokens)` follows.
    """
    device = layered.device
    # The last token is not followed by anything, so that it need not pass.
    inputs = [prompt + tokens[:-1] for prompt, tokens in zip(prompt_ids, new_tokens, strict=True)]
    placement = Placement.prompt([len(row) for row in inputs], device)
    padded = torch.tensor([row + [0] * (placement.width - len(row)) for row in inputs], device=device)
    places = [
        (row, len(prompt) + place)
        for row, (prompt, tokens) in enumerate(zip(prompt_ids, new_tokens, strict=True))
        for place in range(len(tokens) - 1)
    ]
    rows, columns = torch.tensor(places, dtype=torch.long, device=device).reshape(-1, 2).unbind(1)
    cache = SharedCache(max(exit_layers), len(inputs), placement.width)
    rotary = layered.rotary_tables(placement.width)
    hidden, passed = layered.embed(padded, placement.positions), 0
    for exit_layer in sorted(set(exit_layers)):
        hidden = layered.run(hidden, passed, exit_layer, placement=placement, cache=cache, rotary=rotary)
        passed = exit_layer
        yield exit_layer, hidden[rows.to(hidden.device), columns.to(hidden.device)]


def following(new_tokens: Sequence[list[int]]) -> torch.Tensor:
    """Returns all tokens of the answers but the first ones, answer after answer, `(tokens,)`."""
    return torch.tensor([token for tokens in new_tokens for token in tokens[1:]], dtype=torch.long)
