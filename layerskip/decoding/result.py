"""What a generation call returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from layerskip.decoding.loop import DecodeLoop
from layerskip.decoding.options import GenerationOptions
from layerskip.decoding.plan import Plan
from layerskip.decoding.statistics import Statistics
from layerskip.model.cache import CachedTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class GenerationResult:
    """The outcome of `Engine.generate`.

    Attributes:
        sequences: `(batch, tokens)`: prompt and new tokens; rows that finished early are filled with the padding token.
        texts: the new tokens of each row as text, without special tokens; `None` without a tokenizer.
        finish_reasons: "stop" (an EOS token or a stop string), "length" or "criteria" (max_time and any other stopping
            criterion), for each row.
        statistics: counted work, acceptance and time.
        scores: with `output_scores=True`, for each step the scores `(batch, vocabulary)` in fp32 that its tokens were
            chosen from, after processing; zeros for rows that had finished. Else `None`.
        logits: with `output_logits=True`, the same before processing.
        cache: with `return_cache=True`, what the call has cached, for the next one of a conversation. Else `None`.
    """

    sequences: torch.Tensor
    texts: list[str] | None
    finish_reasons: list[str]
    statistics: Statistics
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    cache: CachedTokens | None = None

    @property
    def new_token_ids(self) -> list[list[int]]:
        """The new tokens of each row, without what fills up rows that finished early."""
        counts = [row.emitted for row in self.statistics.per_row]
        filled = self.sequences[:, -max(counts) :].tolist()
        return [tokens[:count] for tokens, count in zip(filled, counts, strict=True)]

    @classmethod
    def of(
        cls,
        loop: DecodeLoop,
        prompts: torch.Tensor,
        plan: Plan,
        options: GenerationOptions,
        tokenizer: PreTrainedTokenizerBase | None,
        cache: CachedTokens | None = None,
    ) -> GenerationResult:
        """Returns the result of a loop that has run to its end.

        Args:
            prompts: `(batch, tokens)`, as they come back in `sequences`.
            cache: what the loop has cached, where the caller asked for it.
        """
        rows = loop.rows
        steps = max(len(row.tokens) for row in rows)
        # Rows end at different steps only where there is a padding token; see `Call.prepare`.
        pad = 0 if options.pad_token_id is None else options.pad_token_id
        filled = torch.tensor([row.tokens + [pad] * (steps - len(row.tokens)) for row in rows])
        texts = None
        if tokenizer is not None:
            texts = [str(tokenizer.decode(row.tokens, skip_special_tokens=True)) for row in rows]
        settings = (plan.strategy, plan.exit_layer, plan.num_draft_tokens)
        per_row = tuple(Statistics.of([row.tally], row.tally.seconds, *settings) for row in rows)
        return cls(
            sequences=torch.cat([prompts.long(), filled.to(prompts.device)], dim=1),
            texts=texts,
            finish_reasons=[row.finish_reason for row in rows if row.finish_reason is not None],
            statistics=Statistics.of([row.tally for row in rows], loop.seconds, *settings, per_row),
            scores=_stack_steps([row.scores for row in rows], steps) if options.output_scores else None,
            logits=_stack_steps([row.logits for row in rows], steps) if options.output_logits else None,
            cache=cache,
        )


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


def _stack_steps(rows: list[list[torch.Tensor]], steps: int) -> tuple[torch.Tensor, ...]:
    """Returns per-step `(batch, vocabulary)` tensors of per-row lists; zeros where a row has finished."""
    nothing = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[step] if step < len(row) else nothing for row in rows]) for step in range(steps))
