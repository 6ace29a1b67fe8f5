"""A checkpoint measured on rows of data: its own answers, what exits and draft lengths give there, and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layerskip.comparison.losses import LossSums
from layerskip.comparison.own_answers import OwnAnswer, coverage, own_answers, reference_sums
from layerskip.comparison.replay import replay
from layerskip.decoding.engine import Engine
from layerskip.prompt_file import Prompt


@dataclass(frozen=True)
class Row:
    """A row of data.

    Attributes:
        where: what messages call it.
        prompt: a string, tokenised as it stands, or a list of messages.
        completion: what it should be answered with, or `None`.
        finish_reason: "length" for a completion that does not end.
        category: what kind of row it is, or `None`.
    """

    where: str
    prompt: Prompt
    completion: str | None = None
    finish_reason: str | None = None
    category: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Rows with their answers, and how they are summed up.

    Attributes:
        rows: the data.
        answers: one for each row.
        references: losses on the rows that have a completion, in their order; `None` where none has.
        exit_layers: the exits.
        vocabularies: draft vocabularies by size, `(ids,)` each, or `{None: None}` for all ids, in the order of the
            answers' matches.
        num_draft_tokens: draft lengths, in rising order.
        max_new_tokens: the budget of the answers.
    """

    rows: Sequence[Row]
    answers: Sequence[OwnAnswer]
    references: LossSums | None
    exit_layers: Sequence[int]
    vocabularies: Mapping[int | None, torch.Tensor | None]
    num_draft_tokens: Sequence[int]
    max_new_tokens: int

    def is_exact(self, index: int) -> bool | None:
        """Returns whether a row's answer is its completion, but for blanks at its ends; `None` without a completion."""
        completion = self.rows[index].completion
        return None if completion is None else completion.strip() == (self.answers[index].text or "").strip()

    def by_category(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of each category's rows, by name."""
        indices: dict[str, list[int]] = {}
        for index, row in enumerate(self.rows):
            if row.category is not None:
                indices.setdefault(row.category, []).append(index)
        return {category: self.summary(indices[category]) for category in sorted(indices)}

    def summary(self, indices: Sequence[int] | None = None) -> dict[str, Any]:
        """Returns the figures of some rows, all by default, as JSON takes them.

        `rows`, `new_tokens`, `finished` (answers that ended with EOS), `completions` (rows that have one), `exact`
        (answers that equal theirs), `loss` and `perplexity` of the last layer on completions, and `exits`: for each
        draft vocabulary and exit its `exit_layer`, `draft_vocab_size`, `coverage` (share of the answers' tokens in the
        vocabulary), `agreement` (share that the exit would have drafted), `loss`, `perplexity`,
        `mean_acceptance_length` and `draft_acceptance_rate` by draft length, and `acceptance_by_position` for the
        largest. What there is nothing to divide for is `None`.
        """
        chosen = range(len(self.rows)) if indices is None else indices
        answers = [self.answers[index] for index in chosen]
        with_completion = (index for index, row in enumerate(self.rows) if row.completion is not None)
        place_of = {index: place for place, index in enumerate(with_completion)}
        places = [place_of[index] for index in chosen if index in place_of]
        losses = self.references.metrics(places) if self.references is not None and places else {}
        return {
            "rows": len(answers),
            "new_tokens": sum(len(answer.token_ids) for answer in answers),
            "finished": sum(answer.finish_reason == "stop" for answer in answers),
            "completions": len(places),
            "exact": sum(bool(self.is_exact(index)) for index in chosen) if places else None,
            "loss": losses.get("loss"),
            "perplexity": losses.get("perplexity"),
            "exits": [
                self._exit(answers, exit_layer, column, losses)
                for column in range(len(self.vocabularies))
                for exit_layer in self.exit_layers
            ],
        }

    def _exit(
        self, answers: Sequence[OwnAnswer], exit_layer: int, column: int, losses: Mapping[str, float]
    ) -> dict[str, Any]:
        """Returns the figures of one exit with one draft vocabulary."""
        size, ids = list(self.vocabularies.items())[column]
        rows = [answer.matches[exit_layer][column] for answer in answers]
        flags = [flag for row in rows for flag in row]
        replays = [replay(rows, drafts, self.max_new_tokens) for drafts in self.num_draft_tokens]
        whole = ids is None
        return {
            "exit_layer": exit_layer,
            "draft_vocab_size": size,
            "coverage": None if ids is None else coverage(answers, ids),
            "agreement": sum(flags) / len(flags) if flags else None,
            "loss": losses.get(f"loss_exit_{exit_layer}") if whole else None,
            "perplexity": losses.get(f"perplexity_exit_{exit_layer}") if whole else None,
            "mean_acceptance_length": {str(made.num_draft_tokens): made.mean_acceptance_length for made in replays},
            "draft_acceptance_rate": {str(made.num_draft_tokens): made.draft_acceptance_rate for made in replays},
            "acceptance_by_position": list(replays[-1].acceptance_by_position),
        }


def evaluate(
    engine: Engine,
    rows: Sequence[Row],
    exit_layers: Sequence[int],
    vocabularies: Mapping[int | None, torch.Tensor | None],
    num_draft_tokens: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
) -> Evaluation:
    """Runs the model on some rows; `batch_size` of them pass together, the other arguments are as in `Evaluation`.

    Raises:
        ValueError: no tokenizer or EOS token, or rows that the model cannot take.
    """
    wanted = {
        row.where: {"prompt": row.prompt, "completion": row.completion, "finish_reason": row.finish_reason}
        for row in rows
        if row.completion is not None
    }
    # Losses first, since they take less time and tell about rows that are no good.
    references = reference_sums(engine, wanted, exit_layers, batch_size) if wanted else None
    prompts = [row.prompt for row in rows]
    answers = own_answers(engine, prompts, exit_layers, max_new_tokens, batch_size, list(vocabularies.values()))
    return Evaluation(rows, answers, references, exit_layers, vocabularies, num_draft_tokens, max_new_tokens)
