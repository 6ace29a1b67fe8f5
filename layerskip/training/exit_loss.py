"""The losses of several exits at once, over token chunks, so that no exit ever holds logits for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import kl_div
from torch.utils.checkpoint import checkpoint

IGNORED = -100

Logits = Callable[[torch.Tensor], torch.Tensor]
ExitLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns −log p(label) for each token: logits `(tokens, vocabulary)`, labels `(tokens,)`; `target` is not used."""
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def self_distillation(logits: torch.Tensor, labels: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns KL(target ‖ exit) for each token, at temperature 1; `target` are logits like `logits`."""
    wanted = torch.log_softmax(target.float(), dim=-1)
    return kl_div(torch.log_softmax(logits.float(), dim=-1), wanted, reduction="none", log_target=True).sum(dim=-1)


def acceptance(logits: torch.Tensor, labels: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns −log Σ_x min(p(x), q(x)) for each token: the log of the chance that a sampled draft is accepted."""
    wanted = torch.softmax(target.float(), dim=-1)
    overlap = torch.minimum(torch.softmax(logits.float(), dim=-1), wanted).sum(dim=-1)
    return -overlap.clamp_min(torch.finfo(overlap.dtype).tiny).log()


LOSSES: dict[str, ExitLoss] = {
    "cross_entropy": cross_entropy,
    "self_distillation": self_distillation,
    "acceptance": acceptance,
}


@dataclass(frozen=True)
class Teacher:
    """A distribution to learn from: `logits(states)`, without gradients.

    Attributes:
        states: the last layer's output for each token, before the final norm, `(tokens, hidden)`.
        logits: norm, head and soft-cap of the model they come from.
    """

    states: torch.Tensor
    logits: Logits


@dataclass(frozen=True)
class TokenLosses:
    """Losses token by token.

    Attributes:
        exits: of each exit, `(exits, tokens)`.
        last: the last layer's cross entropy, `(tokens,)`.
        guard: KL(original ‖ last layer), `(tokens,)`; zeros without an original.
        agreements: whether an exit's first choice is the last layer's, `(exits, tokens)`, bool.
    """

    exits: torch.Tensor
    last: torch.Tensor
    guard: torch.Tensor
    agreements: torch.Tensor


def chunked_token_losses(
    logits: Logits,
    states: Sequence[torch.Tensor],
    last: torch.Tensor,
    labels: torch.Tensor,
    loss: ExitLoss,
    *,
    logit_rows: int,
    target: Teacher | None = None,
    original: Teacher | None = None,
) -> TokenLosses:
    """Returns the losses of some exits and of the last layer, for tokens that count; at least one.

    Logits are made for a chunk of tokens at a time and made again in the backward pass, so that memory never holds
    those of all tokens. Those of the last chunk are kept, since the backward pass begins with them.

    Args:
        logits: the model's norm, head and soft-cap.
        states: the output of each exit layer, `(tokens, hidden)`.
        last: the output of the last layer, before the final norm, `(tokens, hidden)`.
        labels: the token that follows each, `(tokens,)`.
        loss: of an exit; the last layer's is always cross entropy.
        logit_rows: rows of logits held at a time, of all distributions together; at least one token's.
        target: what `loss` compares the exits with; without it the last layer as it is in this pass, detached.
        original: what the last layer is held to.
    """
    teachers = [teacher for teacher in (target, original) if teacher is not None]

    def losses(chunk_labels: torch.Tensor, *chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_teachers = chunk[len(states) + 1 :]
        # One product with the head for all: its gradient, as large as the head, is then made once a chunk.
        *of_exits, last_logits = logits(torch.cat(chunk[: len(states) + 1])).chunk(len(states) + 1)
        choice = last_logits.argmax(dim=-1)
        with torch.no_grad():
            goal = last_logits.detach() if target is None else target.logits(of_teachers[0])
        rows, agreements = [], []
        for exit_logits in of_exits:
            rows.append(loss(exit_logits, chunk_labels, goal))
            agreements.append(exit_logits.argmax(dim=-1) == choice)
        rows.append(cross_entropy(last_logits, chunk_labels, goal))
        if original is not None:
            with torch.no_grad():
                held_to = original.logits(of_teachers[-1])
            rows.append(self_distillation(last_logits, chunk_labels, held_to))
        return torch.stack(rows), torch.stack(agreements) if agreements else choice.new_empty(0, len(choice)).bool()

    chunk_tokens = max(1, logit_rows // (len(states) + 1 + len(teachers)))
    whole_states = (labels, *states, last, *(teacher.states for teacher in teachers))
    per_token, agreed = [], []
    # Split at once: the gradient of a slice is a tensor of the whole's size, for every chunk anew.
    *earlier, final = zip(*(whole.split(chunk_tokens) for whole in whole_states), strict=True)
    for chunk in (*earlier, final):
        if torch.is_grad_enabled() and chunk is not final:
            chunk_losses, chunk_agreements = checkpoint(losses, *chunk, use_reentrant=False)
        else:
            chunk_losses, chunk_agreements = losses(*chunk)
        per_token.append(chunk_losses)
        agreed.append(chunk_agreements)
    whole = torch.cat(per_token, dim=1)
    guard = whole[-1] if original is not None else torch.zeros_like(whole[0])
    return TokenLosses(whole[: len(states)], whole[len(states)], guard, torch.cat(agreed, dim=1))
