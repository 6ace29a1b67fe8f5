"""What a generation call returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerskip.decoding.statistics import Statistics


@dataclass(frozen=True)
class GenerationResult:
    """The outcome of `Engine.generate`.

    Attributes:
        sequences: `(batch, tokens)`: prompt and new tokens; rows that finished early are filled with the padding token.
        texts: the new tokens of each row as text, without special tokens; `None` without a tokenizer.
        finish_reasons: "stop" (an EOS token) or "length", for each row.
        statistics: counted work, acceptance and time.
        scores: with `output_scores=True`, for each step the scores `(batch, vocabulary)` in fp32 that its tokens were
            chosen from, after processing; zeros for rows that had finished. Else `None`.
        logits: with `output_logits=True`, the same before processing.
    """

    sequences: torch.Tensor
    texts: list[str] | None
    finish_reasons: list[str]
    statistics: Statistics
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None


@dataclass(frozen=True)
class StreamEvent:
    """What prefill or one round of `Engine.stream` emitted.

    Attributes:
        text: the text that the tokens make known; characters are never split. "" without a tokenizer.
        token_ids: the new tokens.
        accepted: for each token: drafted and accepted (`True`), or the full model's own (`False`).
        result: the whole result, in the last event only.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    result: GenerationResult | None = None
