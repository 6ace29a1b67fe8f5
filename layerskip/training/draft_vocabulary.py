"""Which token ids a draft may choose from: the most frequent ones of the training data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from layerskip.training.exit_loss import IGNORED


def draft_vocabulary(labels: Iterable[Sequence[int]], size: int, kept: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Returns token ids, `(size,)` int64, the most important first.

    First come those that are always kept, then those that count most often in `labels`. Where the data have fewer, the
    lowest ids follow: the earliest merges of a byte-pair vocabulary, which are its most frequent pieces.

    Args:
        labels: of each row its tokens, −100 where one does not count.
        size: how many ids to choose.
        kept: ids that are never left out: those that end an answer, and the tokenizer's special ones.
        vocab_size: of the model.

    Raises:
        ValueError: a size that is below the number of ids to keep or above the vocabulary's.
    """
    kept = list(dict.fromkeys(kept))
    if not len(kept) <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size={size} is out of range; allowed are {len(kept)} (the tokenizer's special tokens are "
            f"always kept) to {vocab_size}, the model's vocabulary."
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in labels:
        ids = torch.as_tensor(row)
        counts += torch.bincount(ids[ids != IGNORED], minlength=vocab_size)
    # Above every count; ties go to the lower id.
    counts[torch.tensor(kept, dtype=torch.int64)] = int(counts.sum()) + 1
    return counts.sort(descending=True, stable=True).indices[:size]
