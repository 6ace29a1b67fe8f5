"""What a list of transformers' stopping criteria amounts to, and why a row ends with its last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList

from layerskip.decoding.stopping import Stops
from layerskip.decoding.transcript import Transcript

WIDTH = 3


def transcript(*rows: list[int]) -> Transcript:
    """Returns rows of three prompt tokens and these new ones."""
    written = Transcript(torch.arange(WIDTH).repeat(len(rows), 1), capacity=6, pad=0)
    for row, tokens in enumerate(rows):
        written.write(row, 0, tokens)
    return written


class Recorder:
    """A criterion that answers as told and keeps what it was shown."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.shown: list[tuple[list[list[int]], Any]] = []

    def __call__(self, ids: torch.Tensor, scores: Any) -> Any:
        self.shown.append((ids.tolist(), scores))
        return self.answer


class StricterLength(MaxLengthCriteria):
    """Not what its base class is."""


def test_lengths_and_eos_tokens_are_read_and_the_rest_is_kept_in_order() -> None:
    timed, stricter = MaxTimeCriteria(3.0), StricterLength(1)
    criteria = StoppingCriteriaList(
        [timed, MaxLengthCriteria(20), EosTokenCriteria(torch.tensor([5, 7])), stricter, EosTokenCriteria(9)]
    )
    stops = Stops.of(criteria, width=12)
    assert stops == Stops(8, frozenset({5, 7, 9}), (timed, stricter))


def test_the_smallest_length_counts_and_leaves_at_least_one_token() -> None:
    lengths = [MaxLengthCriteria(20), MaxLengthCriteria(15)]
    assert [Stops.of(lengths, width).max_new_tokens for width in (0, 14, 15, 40)] == [15, 1, 1, 1]


def test_only_lengths_end_all_rows_alike() -> None:
    assert not Stops(4).ends_rows_early
    assert Stops(4, frozenset({1})).ends_rows_early
    assert Stops(4, criteria=(Recorder(False),)).ends_rows_early


def test_a_row_goes_on_below_its_budget() -> None:
    stops = Stops(3, frozenset({9}))
    assert stops.reason(0, [9, 1], None, None) is None
    assert stops.reason(0, [9, 1, 2], None, None) == "length"
    assert stops.reason(0, [1, 2, 9], None, None) == "stop"


@pytest.mark.parametrize(
    ("token", "met", "count", "reason"),
    [
        (9, True, 3, "stop"),
        (1, True, 3, "criteria"),
        (1, True, 2, "criteria"),
        (1, False, 3, "length"),
        (1, False, 2, None),
    ],
)
def test_a_stop_goes_before_criteria_and_these_before_length(
    token: int, met: bool, count: int, reason: str | None
) -> None:
    tokens = [*[4] * (count - 1), token]
    stops = Stops(3, frozenset({9}), (Recorder(torch.tensor([met])),))
    assert stops.reason(0, tokens, transcript(tokens), None) == reason


def test_all_criteria_are_asked_once_with_the_ids_up_to_the_last_token() -> None:
    first, second = Recorder(torch.tensor([True])), Recorder(torch.tensor([False]))
    assert Stops(6, criteria=(first, second)).reason(0, [4, 5], transcript([4, 5, 6]), None) == "criteria"
    assert first.shown == second.shown == [([[0, 1, 2, 4, 5]], None)]


def test_a_row_reads_its_own_value_and_scores_are_as_high_as_the_batch() -> None:
    criterion = Recorder(torch.tensor([False, True, False]))
    stops = Stops(6, criteria=(criterion,))
    rows = transcript([4], [5], [6])
    scores = [torch.tensor([0.5, 1.5]).expand(3, -1)]
    assert [stops.reason(row, [4 + row], rows, scores) for row in range(3)] == [None, "criteria", None]
    shown = criterion.shown[0][1]
    assert isinstance(shown, tuple)
    assert torch.equal(shown[0], scores[0])


@pytest.mark.parametrize("answer", [True, torch.tensor(True), torch.tensor([True]), torch.ones(3)], ids=str)
def test_a_value_that_is_not_one_for_each_row_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"Recorder returned a value of shape \(.*\) for a batch of 2 rows"):
        Stops(6, criteria=(Recorder(answer),)).reason(0, [4], transcript([4], [5]), None)


@pytest.mark.parametrize("answer", [True, 1, torch.tensor(True), torch.tensor([True]), torch.ones(1, 1)], ids=str)
def test_one_row_takes_any_single_truth_value(answer: Any) -> None:
    assert Stops(6, criteria=(Recorder(answer),)).reason(0, [4], transcript([4]), None) == "criteria"


@pytest.mark.parametrize("answer", [None, "yes", {}])
def test_an_answer_that_is_no_truth_value_is_named(answer: Any) -> None:
    with pytest.raises(TypeError, match=rf"Recorder returned a {type(answer).__name__}; return a bool tensor"):
        Stops(4, criteria=(Recorder(answer),)).reason(0, [1], transcript([1]), None)


@pytest.mark.parametrize(
    ("criterion", "named"),
    [(5, "holds 5, which cannot be called"), (lambda ids: False, r"cannot be called with \(input_ids, scores\)")],
    ids=["number", "one argument"],
)
def test_what_cannot_be_asked_is_refused_before_work(criterion: Any, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        Stops.of([MaxLengthCriteria(20), criterion], width=12)
