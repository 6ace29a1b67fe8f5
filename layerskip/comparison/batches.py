"""Prompts as batches: which of a file's are asked, and together with which others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.decoding.engine import Engine
from layerskip.decoding.prompts import Prompts, read_prompts
from layerskip.program import as_chat
from layerskip.prompt_file import PromptRow


@dataclass(frozen=True)
class Batch:
    """Prompts that are answered together: ids, padded on the left, and their mask, `(rows, tokens)` each."""

    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[list[int]], device: torch.device | str = "cpu") -> Batch:
        """Returns some rows of token ids as a batch."""
        return cls(*Prompts(list(rows)).left_padded(0, torch.device(device)))


def first_rows(rows: Sequence[PromptRow], limit: int | None, category_limit: int | None) -> list[PromptRow]:
    """Returns the first prompts of each category, at most `category_limit`, and of these the first `limit`."""
    seen: Counter[str | None] = Counter()
    kept = []
    for row in rows:
        seen[row.category] += 1
        if category_limit is None or seen[row.category] <= category_limit:
            kept.append(row)
    return kept[:limit]


def make_batches(rows: Sequence[PromptRow], engine: Engine, size: int) -> tuple[list[Batch], list[str | None]]:
    """Returns prompts in batches of `size` rows of one category, and the category of each batch.

    A batch stands where its last row stood; what does not fill one comes last. Strings go through the chat template
    where the tokenizer has one.

    Raises:
        ValueError: a prompt that is empty or that the chat template refuses, or text without a tokenizer.
    """
    asked = as_chat([row.prompt for row in rows], engine.tokenizer)
    tokens = read_prompts(asked, engine.tokenizer, None, engine.layered.vocab_size).rows
    waiting: dict[str | None, list[list[int]]] = {}
    full: list[tuple[str | None, list[list[int]]]] = []
    for row, ids in zip(rows, tokens, strict=True):
        waiting.setdefault(row.category, []).append(ids)
        if len(waiting[row.category]) == size:
            full.append((row.category, waiting.pop(row.category)))
    full += waiting.items()
    return [Batch.of(ids, engine.layered.device) for _, ids in full], [category for category, _ in full]
