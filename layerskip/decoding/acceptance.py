"""Which drafted tokens the full model accepts, and the token that follows them.

Greedy decoding keeps the longest matching prefix. Sampling uses speculative sampling: what comes out is distributed
exactly as the full model's own samples, whatever the drafts were drawn from. Random numbers are arguments here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def accept_greedy(drafts: Sequence[int], targets: Sequence[int]) -> int:
    """Returns how many drafts are accepted: the length of the longest prefix that equals the targets'.

    Args:
        drafts: the drafted tokens.
        targets: the full model's own choices; `targets[i]` follows the first i drafts, so that there is one more of
            them than drafts, and `targets[result]` is the token that the round emits after the accepted drafts.
    """
    for accepted, (draft, target) in enumerate(zip(drafts, targets, strict=False)):
        if draft != target:
            return accepted
    return len(drafts)


@dataclass(frozen=True)
class Rule:
    """A way to accept drafts that leaves the target's distribution as it is; `TOKEN_RULE` and `BLOCK_RULE` are such.

    Attributes:
        chances: called as `chances(p, q, drafts, counts)`, returns how likely the test at each draft is to pass,
            `(rows, drafts)`, 0 behind a row's last real draft; and the scale, `(rows, drafts + 1)`: what p counts in
            the `residual` when exactly i drafts are accepted. The arguments are those of `speculate`.
        accepted: called with which tests passed, bool `(rows, drafts)`, returns how many drafts are accepted, int64
            `(rows,)`.
    """

    chances: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    accepted: Callable[[Tensor], Tensor]


def probabilities(scores: Tensor) -> Tensor:
    """Returns the softmax of scores `(..., vocabulary)`, in float64 where the device has it, else in float32.

    A row that has NaN in it, or no finite score, becomes NaN throughout.
    """
    return scores.softmax(-1, dtype=torch.float32 if scores.device.type == "mps" else torch.float64)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns one token per distribution, int64 `(...)`, by inverting the cumulative weights; never one of weight 0.

    Args:
        weights: `(..., vocabulary)`, not negative; they need not sum to 1. Where all are 0 or any is NaN, the
            result is some token of the vocabulary and means nothing.
        uniforms: `(...)`, in [0, 1). float32 has steps of 6e-8 at best: float64 draws rare tokens more truly.
    """
    grows = weights > 0
    cumulative = weights.cumsum(-1)
    threshold = (uniforms * cumulative[..., -1]).unsqueeze(-1)
    tokens = torch.arange(weights.shape[-1], device=weights.device)
    # Rounding can lift the threshold to the total, and a parallel sum need not even be monotone: hence the weights
    # themselves say which tokens qualify, and the last of them stands in where none is above the threshold.
    last = torch.where(grows, tokens, 0).amax(-1, keepdim=True)
    return torch.where(grows & (cumulative > threshold), tokens, last).amin(-1)


def residual(p: Tensor, q: Tensor, counts: Tensor, accepted: Tensor, scale: Tensor) -> Tensor:
    """Returns the weights of the token that follows the accepted drafts, `(rows, vocabulary)`.

    They are max(scale·p − q, 0) at that position; q is 0 behind a row's last draft, which leaves p. Where p and q agree
    so well that nothing is left, they are p. They need not sum to 1.

    Args:
        p, q, counts: as for `speculate`.
        accepted: how many drafts of each row are accepted, int64 `(rows,)`, at most `counts`.
        scale: `(rows, drafts + 1)`, from `Rule.chances`.
    """
    target = _at(p, accepted)
    weights = scale.gather(1, accepted.unsqueeze(1)) * target
    if q.shape[1]:
        source = _at(q, accepted.clamp(max=q.shape[1] - 1))
        weights = (weights - torch.where((accepted < counts).unsqueeze(1), source, 0)).clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, target)


def speculate(
    rule: Rule, p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns how many drafts each row accepts, int64 `(rows,)`, and the token that follows them, int64 `(rows,)`.

    Nothing is read back to the host.

    Args:
        rule: `TOKEN_RULE` or `BLOCK_RULE`.
        p: `(rows, drafts + 1, vocabulary)`, the target's probabilities after each prefix of the drafts.
        q: `(rows, drafts, vocabulary)`, the probabilities that each draft was really drawn from, one-hot for a draft
            that was not drawn. Both p and q sum to 1 at every real position.
        drafts: int64 `(rows, drafts)`; there may be none.
        counts: int64 `(rows,)`, how many drafts of each row are real. What lies behind them is never looked at. A count
            may depend on the drafts before it and on q, never on the chance of a draft that it leaves out.
        uniforms: `(rows, drafts + 1)`, independent and uniform in [0, 1): one for each draft, the last for the token.
    """
    chances, scale = rule.chances(p, q, drafts, counts)
    # Strictly below: a chance of 0 never passes, and one of 1 always does.
    accepted = rule.accepted(uniforms[:, :-1] < chances)
    return accepted, draw(residual(p, q, counts, accepted, scale), uniforms[:, -1])


def _token_chances(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The chances min(1, p/q), each for itself; p counts fully in the residual."""
    return _ratios(p, q, drafts, counts).clamp(max=1), torch.ones_like(p[..., 0])


def _block_chances(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The chances h_i of block verification, and as scale the p_i, the joint chance of the first i drafts.

    p_0 = 1 and p_i = min(1, p_{i-1}·p/q); s_i sums max(p_i·p − q, 0); h_i = s_i / (s_i + 1 − p_i). With q = 0 behind
    the last draft, s_n = p_n and h_n = p_n.
    """
    joint = [torch.ones_like(p[:, 0, 0])]
    for ratio in _ratios(p, q, drafts, counts).unbind(1):
        joint.append((joint[-1] * ratio).clamp(max=1))
    scale = torch.stack(joint, dim=1)
    kept = scale[:, 1:]
    real = _is_real(drafts, counts)
    source = torch.where(real[:, 1:].unsqueeze(-1), q[:, 1:], 0)
    inner = (kept[:, :-1].unsqueeze(-1) * p[:, 1:-1] - source).clamp(min=0).sum(-1)
    left = torch.cat([inner, kept[:, -1:]], dim=1)
    total = left + 1 - kept
    # 0/0 is p equal to q behind drafts that are certain: later ones are certain too, and any value is right.
    chances = torch.where(total == 0, 1, left / total)
    return torch.where(real, chances, 0), scale


def _leading_run(passed: Tensor) -> Tensor:
    """How many tests passed before the first that failed."""
    return passed.long().cumprod(-1).sum(-1)


def _last_pass(passed: Tensor) -> Tensor:
    """The 1-based place of the last test that passed, 0 if none did."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    # The empty prefix always passes, and the maximum has something to run over where nothing is drafted.
    return torch.nn.functional.pad(passed * places, (1, 0)).amax(-1)


def _ratios(p: Tensor, q: Tensor, drafts: Tensor, counts: Tensor) -> Tensor:
    """p/q at each draft, `(rows, drafts)`, and 0 behind the last real one."""
    real = _is_real(drafts, counts)
    tokens = torch.where(real, drafts, 0).unsqueeze(-1)
    target, draft = (table.gather(2, tokens).squeeze(2) for table in (p[:, :-1], q))
    # A draft of chance 0 cannot be drawn; the bound merely keeps NaN and infinity out.
    return torch.where(real, target / draft.clamp(min=torch.finfo(q.dtype).tiny), 0)


def _is_real(drafts: Tensor, counts: Tensor) -> Tensor:
    """Which drafts are no filler, bool `(rows, drafts)`."""
    return torch.arange(drafts.shape[1], device=drafts.device) < counts.unsqueeze(1)


def _at(table: Tensor, position: Tensor) -> Tensor:
    """Picks a position `(rows,)` of each row of a table `(rows, positions, vocabulary)`: `(rows, vocabulary)`."""
    return table.gather(1, position.view(-1, 1, 1).expand(-1, 1, table.shape[2])).squeeze(1)


TOKEN_RULE = Rule(_token_chances, _leading_run)
"""Each draft is accepted with chance min(1, p/q), up to the first that is not (Leviathan et al., 2023, arXiv
2211.17192; Chen et al., 2023, arXiv 2302.01318)."""

BLOCK_RULE = Rule(_block_chances, _last_pass)
"""Block verification: all drafts up to the last whose test passes are accepted, on average at least as many as with
`TOKEN_RULE` (Sun et al., 2024, arXiv 2403.10444)."""
