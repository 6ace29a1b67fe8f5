"""Which token ids a draft may choose from: the most frequent ones of the training data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from layerskip.training.exit_loss import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Rows that are counted at a time.
BLOCK = 1000


def kept_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the ids that are never left out of a draft vocabulary: those that end an answer, and special ones."""
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return list(dict.fromkeys([*ends, *tokenizer.all_special_ids]))


def draft_vocabulary(labels: Iterable[Sequence[int]], size: int, kept: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Returns token ids, `(size,)` int64, the most important first.

    First come those that are always kept, then those that count most often in `labels`. Where the data have fewer, the
    lowest ids follow: the earliest merges of a byte-pair vocabulary, which are its most frequent pieces.

    Args:
        labels: of each row its tokens, −100 where one does not count.
        size: how many ids to choose.
        kept: ids that are never left out, as from `kept_token_ids`.
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
    rows = iter(labels)
    while block := list(itertools.islice(rows, BLOCK)):
        ids = torch.tensor(list(itertools.chain.from_iterable(block)), dtype=torch.int64)
        counts += torch.bincount(ids[ids != IGNORED], minlength=vocab_size)
    # Above every count; ties go to the lower id.
    counts[torch.tensor(kept, dtype=torch.int64)] = int(counts.sum()) + 1
    return counts.sort(descending=True, stable=True).indices[:size]
