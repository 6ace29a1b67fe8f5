"""Whether the answers of a benchmark's arms that differ from plain decoding's do so at near ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.comparison.audit import first_difference
from layerskip.comparison.batches import Batch
from layerskip.comparison.benchmark import Sample
from layerskip.decoding.engine import Engine


@dataclass(frozen=True)
class AnswerAudit:
    """Answers of one arm in its first pass over the prompts.

    Attributes:
        differing: how many are not plain decoding's, token by token.
        near_ties: how many of these first differ where rounding explains it, as `Difference.is_near_tie` has it.
    """

    differing: int
    near_ties: int


def audit_answers(
    engine: Engine, first: str, samples: Sequence[Sample], batches: Sequence[Batch], max_new_tokens: int, **how: Any
) -> dict[str, AnswerAudit]:
    """Returns an audit of every arm by its label.

    Prompts on which an arm differs are answered once more by plain decoding, for its logits.

    Args:
        engine: of plain decoding.
        first: the label of plain decoding's arm.
        samples: greedy runs.
        batches: the prompts.
        max_new_tokens: the budget of an answer.
        how: of `Engine.generate`, as plain decoding was run.
    """
    answers = {(sample.arm, sample.batch): sample.run.token_ids for sample in samples if sample.repeat == 0}
    counts = {label: [0, 0] for label, _ in answers if label != first}
    for index, batch in enumerate(batches):
        wanted = answers.get((first, index))
        others = {label: answers[label, index] for label in counts if (label, index) in answers}
        if wanted is None or all(rows == wanted for rows in others.values()):
            continue
        again = engine.generate(
            batch.ids,
            attention_mask=batch.mask,
            strategy="autoregressive",
            do_sample=False,
            max_new_tokens=max_new_tokens,
            output_logits=True,
            **how,
        )
        logits = torch.stack(again.logits or (), dim=1)
        for label, rows in others.items():
            for mine, plain, again_row, row_logits in zip(rows, wanted, again.new_token_ids, logits, strict=True):
                difference = first_difference(plain, mine, row_logits, engine.model.dtype)
                counts[label][0] += difference is not None
                # Without the same tokens again, the logits are not those that plain decoding chose from.
                counts[label][1] += difference is not None and again_row == plain and difference.is_near_tie
    return {label: AnswerAudit(*found) for label, found in counts.items()}
