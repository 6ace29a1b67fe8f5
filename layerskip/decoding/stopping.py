"""When a row ends: end-of-sequence tokens, stop strings, lengths and any other stopping criterion, token by token."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from layerskip.decoding.state import Watch
from layerskip.decoding.transcript import Transcript

MUST_NOT_CHANGE = (
    "In a batch it is asked once for every row and token, at each row's own pace; compute this from input_ids, or "
    "decode one row at a time."
)
# They look at a row's own ids, or at the clock, and keep nothing.
OF_THEIR_ROW = frozenset({StopStringCriteria, MaxTimeCriteria})


@dataclass(frozen=True)
class Stops:
    """What ends a row.

    Attributes:
        max_new_tokens: the budget of every row, at least 1.
        eos_token_ids: tokens that end a row; they are part of the output.
        criteria: all other stopping criteria, called with ids and scores as `generate` calls them. Rows of a batch run
            at a pace of their own: there each must return one value per row, which depends on this row's ids and scores
            alone, and keep nothing between calls.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    criteria: tuple[Any, ...] = ()

    @classmethod
    def of(cls, criteria: Sequence[Any], width: int) -> Stops:
        """Returns the stops that a list of transformers' criteria amounts to.

        Args:
            criteria: among them at least one on the length.
            width: prompt tokens that the length counts, padding included.

        Raises:
            TypeError: a criterion that cannot be called with ids and scores.
        """
        for criterion in criteria:
            if not callable(criterion):
                raise TypeError(f"stopping_criteria holds {criterion!r}, which cannot be called.")
            try:
                inspect.signature(criterion).bind(None, None)
            except TypeError as error:
                raise TypeError(
                    f"stopping_criteria holds {criterion!r}, which cannot be called with (input_ids, scores): {error}."
                ) from error

        # Exact types, since a subclass may decide otherwise.
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        eos = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
        return cls(
            # `generate` asks its criteria after a token, so that one comes even where the prompt is too long.
            max_new_tokens=max(1, min(lengths) - width),
            eos_token_ids=frozenset(token for ids in eos for token in ids.flatten().tolist()),
            criteria=tuple(each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)),
        )

    def watches(self) -> tuple[Watch, ...]:
        """Returns a look at each criterion of the caller's own, for batches."""
        own = [criterion for criterion in self.criteria if type(criterion) not in OF_THEIR_ROW]
        return tuple(Watch(criterion, "stopping_criteria", MUST_NOT_CHANGE) for criterion in own)

    @property
    def ends_rows_early(self) -> bool:
        """Whether rows of a batch may end at different lengths."""
        return bool(self.eos_token_ids or self.criteria)

    def reason(
        self, row: int, tokens: Sequence[int], transcript: Transcript | None, scores: Sequence[torch.Tensor] | None
    ) -> str | None:
        """Returns why a row ends with its last token, or `None` where it goes on.

        Args:
            row: its place in the batch.
            tokens: its new tokens so far, which the transcript holds as well.
            transcript: what criteria see; `None` where there are none.
            scores: what each of its tokens was chosen from, where the call keeps that: `(rows, vocabulary)` each, as
                high as the batch, since a criterion may hold a value for each row.

        Returns:
            "stop" (an EOS token or a stop string), "criteria" (any other criterion) or "length".

        Raises:
            TypeError, ValueError: a criterion that returns something else than one truth value for each row.
        """
        if tokens[-1] in self.eos_token_ids:
            return "stop"
        reasons = set()
        if self.criteria and transcript is not None:
            ids = transcript.view(len(tokens))
            alone = ids[row : row + 1]
            shown = None if scores is None else tuple(scores)
            for criterion in self.criteria:
                is_simple = type(criterion) in OF_THEIR_ROW
                if _is_met(criterion, alone, None, 0) if is_simple else _is_met(criterion, ids, shown, row):
                    reasons.add("stop" if isinstance(criterion, StopStringCriteria) else "criteria")
        if len(tokens) >= self.max_new_tokens:
            reasons.add("length")
        return next((reason for reason in ("stop", "criteria", "length") if reason in reasons), None)


def _is_met(criterion: Any, ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, row: int) -> bool:
    answer = criterion(ids, scores)
    try:
        met = torch.as_tensor(answer)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"stopping_criteria: {type(criterion).__name__} returned a {type(answer).__name__}; return a bool tensor "
            f"of shape ({len(ids)},)."
        ) from error
    if met.numel() == len(ids):
        return bool(met.flatten()[row])
    raise ValueError(
        f"stopping_criteria: {type(criterion).__name__} returned a value of shape {tuple(met.shape)} for a batch of "
        f"{len(ids)} rows; rows end one by one here, so return a bool tensor of shape ({len(ids)},)."
    )
