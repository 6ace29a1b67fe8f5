"""Figures of some rows are those of their answers, whatever the order of the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerskip.comparison.evaluation import Evaluation, Row
from layerskip.comparison.losses import LossSums
from layerskip.comparison.own_answers import OwnAnswer


def answer(text: str, flags: list[bool], finish_reason: str = "stop") -> OwnAnswer:
    """An answer whose tokens are 1, 2, … and of which exit 2 is right where `flags` say so."""
    tokens = list(range(1, len(flags) + 2))
    return OwnAnswer([0], tokens, text, finish_reason, {2: (flags, [False] * len(flags))})


@pytest.fixture
def evaluation() -> Evaluation:
    """Four rows, of which the first and the last two have completions; the third's losses are twice the others'."""
    rows = [
        Row("row 1", "a", "yes", category="short"),
        Row("row 2", "b"),
        Row("row 3", "c", " yes\n", category="long"),
        Row("row 4", "d", "no", category="short"),
    ]
    answers = [
        answer("yes", [True, True]),
        answer("?", [False]),
        answer("yes", [True, False], "length"),
        answer("yes", []),
    ]
    losses = np.array([2.0, 4.0, 2.0])
    references = LossSums((2,), np.array([2.0, 2.0, 2.0]), losses, 2 * losses[:, None], losses[:, None])
    vocabularies = {None: None, 1: torch.tensor([2])}
    return Evaluation(rows, answers, references, [2], vocabularies, [1, 4], 3)


def test_figures_of_all_rows(evaluation: Evaluation) -> None:
    found = evaluation.summary()
    assert (found["rows"], found["new_tokens"], found["finished"]) == (4, 9, 3)
    assert (found["completions"], found["exact"], found["loss"]) == (3, 2, 8 / 6)
    whole, trimmed = found["exits"]
    assert (whole["draft_vocab_size"], whole["coverage"]) == (None, None)
    assert (whole["agreement"], whole["loss"]) == (0.6, 16 / 6)
    assert (trimmed["draft_vocab_size"], trimmed["coverage"], trimmed["agreement"]) == (1, 0.6, 0.0)
    assert trimmed["loss"] is None
    assert list(whole["mean_acceptance_length"]) == ["1", "4"]
    assert trimmed["mean_acceptance_length"]["4"] == 1.0


def test_each_category_has_its_own_rows(evaluation: Evaluation) -> None:
    found = evaluation.by_category()
    assert list(found) == ["long", "short"]
    assert (found["long"]["rows"], found["long"]["exact"], found["long"]["loss"]) == (1, 1, 2.0)
    assert (found["short"]["rows"], found["short"]["exact"], found["short"]["loss"]) == (2, 1, 1.0)
    assert found["short"]["exits"][0]["agreement"] == 1.0


def test_rows_without_completions_have_no_losses(evaluation: Evaluation) -> None:
    found = evaluation.summary([1])
    assert (found["completions"], found["exact"], found["loss"]) == (0, None, None)
    assert found["exits"][0]["loss"] is None
