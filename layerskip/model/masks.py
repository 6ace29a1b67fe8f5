"""Attention masks from the positions that tokens and cache slots hold."""

from __future__ import annotations

import torch

from layerskip.model.placement import Placement


def attention_mask(
    placement: Placement, window: int | None, dtype: torch.dtype, causal_by_flag: bool
) -> torch.Tensor | None:
    """Returns the additive mask of one pass, or `None` where attention sees just what it may without one.

    A token at position p sees the slots s with p − window < s ≤ p. The additive form serves `sdpa` and `eager` alike.

    Args:
        window: how many positions a token sees, itself included; `None` for all.
        dtype: of the queries.
        causal_by_flag: without a mask, the attention implementation masks a whole prompt causally by itself (`sdpa`).

    Returns:
        `(rows or 1, 1, width, view)`: 0 where a slot is seen, the lowest finite value elsewhere; or `None`.
    """
    within_window = window is None or placement.view <= window
    sees_all = placement.start is not None and placement.width == 1
    whole_prompt = placement.start == 0 and causal_by_flag
    if within_window and (sees_all or whole_prompt):
        return None
    positions = placement.positions.unsqueeze(-1)
    slots = torch.arange(placement.view, device=positions.device)
    hidden = slots > positions
    if window is not None:
        hidden |= slots <= positions - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)
