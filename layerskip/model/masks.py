"""Attention masks from the positions that tokens and cache slots hold."""

from __future__ import annotations

import torch

from layerskip.model.placement import Placement


def attention_mask(
    placement: Placement, window: int | None, dtype: torch.dtype, causal_by_flag: bool
) -> torch.Tensor | None:
    """Returns the additive mask of one pass, or `None` where attention sees just what it may without one.

    A token at position p sees the slots that hold positions s with p − window < s ≤ p, of a draft tree's nodes only
    those on its own path. The additive form serves `sdpa` and `eager` alike.

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
    elsewhere = placement.elsewhere
    if within_window and elsewhere is None and (sees_all or whole_prompt):
        return None
    positions = placement.positions.unsqueeze(-1)
    held = placement.held.unsqueeze(1)
    hidden = held > positions
    if window is not None:
        hidden |= held <= positions - window
    if elsewhere is not None:
        hidden |= elsewhere
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)
