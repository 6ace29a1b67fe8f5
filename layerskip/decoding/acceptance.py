"""Which drafted tokens the full model accepts."""

from __future__ import annotations

from collections.abc import Sequence


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
