"""Prompts as batches: which of a file's are asked, and together with which others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerskip.decoding.engine import Engine
from layerskip.decoding.prompts import Prompts, read_prompts
from layerskip.prompt_file import PromptRow, as_chat, naming


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


def token_rows(rows: Sequence[PromptRow], engine: Engine) -> list[list[int]]:
    """Returns the tokens of each prompt; strings go through the chat template where the tokenizer has one.

    Raises:
        ValueError: a prompt that is empty or that the chat template refuses, which it names, or text without a
            tokenizer.
    """
    tokens = []
    for row in rows:
        asked = as_chat([row.prompt], engine.tokenizer)
        with naming(row.where):
            tokens += read_prompts(asked, engine.tokenizer, None, engine.layered.vocab_size).rows
    return tokens


def make_batches(rows: Sequence[PromptRow], engine: Engine, size: int) -> tuple[list[Batch], list[str | None]]:
    """Returns prompts in batches of `size` rows of one category, and the category of each batch.

    A batch stands where its last row stood; what does not fill one comes last.

    Raises:
        ValueError: as `token_rows`.
    """
    waiting: dict[str | None, list[list[int]]] = {}
    full: list[tuple[str | None, list[list[int]]]] = []
    for row, ids in zip(rows, token_rows(rows, engine), strict=True):
        waiting.setdefault(row.category, []).append(ids)
        if len(waiting[row.category]) == size:
            full.append((row.category, waiting.pop(row.category)))
    full += waiting.items()
    return [Batch.of(ids, engine.layered.device) for _, ids in full], [category for category, _ in full]


def spread(categories: Sequence[str | None], count: int) -> list[int]:
    """Returns `count` indices at most, spread over the categories in turn and within each evenly, in rising order."""
    by_category: dict[str | None, list[int]] = {}
    for index, category in enumerate(categories):
        by_category.setdefault(category, []).append(index)
    shares = dict.fromkeys(by_category, 0)
    for _ in range(min(count, len(categories))):
        open_ones = [name for name, indices in by_category.items() if shares[name] < len(indices)]
        shares[min(open_ones, key=lambda name: shares[name])] += 1
    return sorted(
        indices[place * len(indices) // shares[name]]
        for name, indices in by_category.items()
        for place in range(shares[name])
    )
