"""The loss of several exits at once, over token chunks, so that no exit ever holds logits for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from layerskip.model.layered import LayeredModel

IGNORED = -100


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """Returns Σ −log p(label) over tokens: logits `(tokens, vocabulary)`, labels `(tokens,)`; `target` is not used."""
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")


def self_distillation(logits: torch.Tensor, labels: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """Returns Σ KL(target ‖ exit) over tokens, at temperature 1; `target` are the last layer's logits, detached."""
    wanted = torch.log_softmax(_given(target).float(), dim=-1)
    return torch.nn.functional.kl_div(
        torch.log_softmax(logits.float(), dim=-1), wanted, reduction="sum", log_target=True
    )


def acceptance(logits: torch.Tensor, labels: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """Returns Σ −log Σ_x min(p(x), q(x)) over tokens: the log of the chance that a sampled draft is accepted."""
    wanted = torch.softmax(_given(target).float(), dim=-1)
    overlap = torch.minimum(torch.softmax(logits.float(), dim=-1), wanted).sum(dim=-1)
    return -overlap.clamp_min(torch.finfo(overlap.dtype).tiny).log().sum()


def _given(target: torch.Tensor | None) -> torch.Tensor:
    if target is None:
        raise ValueError("this loss compares an exit with the last layer, and no logits of that were given.")
    return target


ExitLoss = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
LOSSES: dict[str, ExitLoss] = {
    "cross_entropy": cross_entropy,
    "self_distillation": self_distillation,
    "acceptance": acceptance,
}


def chunked_exit_losses(
    model: LayeredModel,
    states: Sequence[torch.Tensor],
    last: torch.Tensor,
    labels: torch.Tensor,
    loss: ExitLoss,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the summed losses of some exits and of the last layer, and the number of tokens that count.

    The labels are shifted here, once: position i is judged by label i + 1. Logits are made for `chunk_tokens` tokens
    at a time and made again in the backward pass, so that memory holds one chunk's at any time.

    Args:
        model: gives norm, head and soft-cap.
        states: the output of each exit layer, `(batch, tokens, hidden)`.
        last: the output of the last layer, before the final norm.
        labels: `(batch, tokens)`; −100 where a token does not count.
        loss: of an exit; the last layer's is always cross entropy.
        chunk_tokens: tokens a chunk, at least 1.

    Returns:
        `(exits,)`, a scalar, and a count. All are 0 where no token counts, with gradients of 0.
    """
    targets = labels[:, 1:]
    counts = targets != IGNORED
    kept = targets[counts]
    hidden = [state[:, :-1][counts.to(state.device)] for state in (*states, last)]
    total = sum(state.sum() * 0.0 for state in hidden)
    exits = torch.zeros(len(states), device=last.device) + total
    final = torch.zeros((), device=last.device) + total

    def losses(chunk_labels: torch.Tensor, *chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.logits(chunk[-1])
        of_exits = [loss(model.logits(state), chunk_labels, logits.detach()) for state in chunk[:-1]]
        return torch.stack(of_exits) if of_exits else exits, cross_entropy(logits, chunk_labels, None)

    for begin in range(0, kept.numel(), chunk_tokens):
        part = slice(begin, begin + chunk_tokens)
        chunk_exits, chunk_final = checkpoint(
            losses, kept[part], *(state[part] for state in hidden), use_reentrant=False
        )
        exits, final = exits + chunk_exits, final + chunk_final
    return exits, final, kept.numel()
