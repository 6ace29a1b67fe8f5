"""What a comparison finds, on readings and costs that are made up: sums, predictions, advice, and prompts to run."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.comparison.arms import Arm, RoundCounts, Run
from layerskip.comparison.batches import Batch, spread
from layerskip.comparison.benchmark import Sample, summarise
from layerskip.comparison.comparison_folder import ReadAnswer
from layerskip.comparison.exit_comparison import CSV_HEADER, ExitComparison, Recommendation
from layerskip.comparison.quality import Reading
from layerskip.decoding.cost import CostTable

# Of exits 1 and 2 of 3 layers: a draft costs a quarter and a half of a step of plain decoding.
COSTS = CostTable((1, 2), (0.25, 0.5), ((1.0, 1.25, 1.5), (1.0, 1.0, 1.25)), 1.0, 0.25, 0.25)


def read(index: int, first: list[int], second: list[int], last: list[int]) -> ReadAnswer:
    """An answer of which only the choices of exits 1 and 2 and of layer 3 matter; its first token is 9."""
    matches = [[mine == own for mine, own in zip(choices, last, strict=True)] for choices in (first, second)]
    reading = Reading(matches, [first, second, last], [[math.log(2)] * len(last)] * 3, [[0.5] * len(last)] * 2)
    return ReadAnswer(index, [1, 2], [9, *last], "length", reading)


# Exit 1 is right for 2 of 4 tokens, exit 2 for 3 of 4.
ANSWERS = {1: read(1, [4], [5], [5]), 0: read(0, [4, 5, 0], [4, 0, 6], [4, 5, 6])}
FOUND = ExitComparison((1, 2), 3, 4, ("chat", "code"), ANSWERS, COSTS)


def unused(batch: Batch, max_new_tokens: int) -> Run:
    raise AssertionError("these runs are made up")


def real(speeds: dict[tuple[int, int], list[float]], predicted: float | None = None) -> ExitComparison:
    """Returns the comparison with real runs of cells, each given with its speeds over plain decoding, one a repeat.

    They are predicted as they are, or at another speed.
    """
    cells = [cell for cell in FOUND.cells() if cell.place in speeds]
    cells = [cell if predicted is None else replace(cell, predicted=predicted) for cell in cells]
    arms = [Arm("plain", unused), *(Arm("drafting", unused, *cell.place) for cell in cells)]
    rounds = RoundCounts(
        rounds=2, drafted=3, accepted=1, draft_tokens_processed=3, draft_seconds=0.1, verify_seconds=0.2
    )
    samples = [
        Sample(each.label, 0, repeat, Run([[9, 4, 5, 6]], 3, 0.5, 3 / speed, rounds))
        for each, row in zip(arms, [[1.0] * 3, *(speeds[cell.place] for cell in cells)], strict=True)
        for repeat, speed in enumerate(row)
    ]
    return FOUND.with_measured(cells, summarise(arms, samples))


# Figures


def test_figures_are_of_all_answers_and_of_each_category() -> None:
    quality = FOUND.quality()
    assert {name: [each.agreement for each in exits] for name, exits in quality.items()} == {
        "all": [2 / 4, 3 / 4, 1.0],
        "chat": [2 / 3, 2 / 3, 1.0],
        "code": [0.0, 1.0, 1.0],
    }
    assert [each.exit_layer for each in quality["all"]] == [1, 2, 3]
    assert [each.expected_acceptance for each in quality["all"]] == [0.5, 0.5, 1.0]
    assert quality["all"][0].perplexity == pytest.approx(2.0)


def test_tokens_are_decided_where_every_later_exit_agrees() -> None:
    """Token 5 of the first answer is exit 1's choice, but not exit 2's."""
    assert FOUND.decided() == {
        "all": {1: 1, 2: 2, 3: 1},
        "chat": {1: 1, 2: 1, 3: 1},
        "code": {1: 0, 2: 1, 3: 0},
    }


def test_prompts_without_a_category_count_to_all_alone() -> None:
    found = replace(FOUND, categories=(None, "code"))
    assert list(found.quality()) == ["all", "code"]
    assert found.quality()["all"] == FOUND.quality()["all"]


def test_a_category_that_is_called_all_is_not_counted_twice() -> None:
    assert replace(FOUND, categories=("all", "code")).quality()["all"] == FOUND.quality()["all"]


def test_an_answer_without_drafts_changes_no_figure() -> None:
    more = replace(FOUND, categories=("chat", "code", "empty"), answers={**ANSWERS, 2: read(2, [], [], [])})
    assert more.quality() == {**FOUND.quality(), "empty": []}
    assert more.cells() == FOUND.cells()


def test_predictions_are_replayed_rounds_times_costs() -> None:
    """By hand: exit 1 with γ = 2 has rounds (2 drafts, 2 accepted) and (1, 0) in the two answers."""
    cells = {cell.place: cell for cell in FOUND.cells()}
    assert list(cells) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert cells[1, 2].tokens_per_round == 4 / 2
    assert cells[1, 2].draft_acceptance_rate == 2 / 4
    assert cells[1, 2].predicted == 4 / (2 * (2 * 0.25 + 1.5))


def test_predictions_on_some_prompts_are_of_these_alone() -> None:
    (chosen,) = [cell for cell in FOUND.cells([1]) if cell.place == (2, 1)]
    assert (chosen.tokens_per_round, chosen.draft_acceptance_rate) == (1.0, 1.0)


def test_without_costs_there_are_no_predictions() -> None:
    assert replace(FOUND, costs=None).cells() == []


# Advice


def test_the_fastest_of_the_cells_that_pay_is_recommended() -> None:
    found = real({(1, 1): [1.5, 1.25, 2.0], (1, 2): [0.5, 0.5, 0.5], (2, 1): [1.25, 1.75, 1.75]}, 1.5)
    assert found.recommendation(True) == Recommendation(
        2, 1, 1.75, "E=2, γ=1 runs at 1.75 times the speed of plain decoding."
    )
    assert [each.measured for each in found.measured] == [1.5, 0.5, 1.75]
    assert [(each.lowest, each.highest) for each in found.measured] == [(1.25, 2.0), (0.5, 0.5), (1.25, 1.75)]


def test_a_cell_that_was_once_slower_is_not_recommended() -> None:
    found = real({(1, 1): [1.125, 1.125, 1.125], (2, 1): [2.0, 2.0, 0.875]}, 1.5)
    best = found.recommendation(True)
    assert (best.exit_layer, best.num_draft_tokens, best.speed_up) == (1, 1, 1.125)


@pytest.mark.parametrize("predicted", [0.5, 1.0])
def test_a_cell_that_was_predicted_to_be_no_faster_is_not_recommended(predicted: float) -> None:
    assert real({(1, 1): [1.5, 1.5, 1.5]}, predicted).recommendation(True).exit_layer is None


def test_as_fast_as_plain_decoding_is_not_faster() -> None:
    assert real({(1, 1): [1.0, 2.0, 2.0]}, 1.5).recommendation(True).exit_layer is None


@pytest.mark.parametrize(
    ("is_trained", "advice"),
    [
        (False, "no exit pays here: its exits were never trained: fine-tune first (training/finetune.py)"),
        (True, "no exit pays here: train its exits further, or compare on prompts like those they were trained on"),
    ],
)
def test_where_no_cell_pays_none_is_recommended_and_what_to_do_is_said(is_trained: bool, advice: str) -> None:
    best = real({(1, 1): [0.5, 0.5, 0.5], (2, 1): [0.75, 0.75, 2.0]}).recommendation(is_trained)
    assert (best.exit_layer, best.num_draft_tokens, best.speed_up) == (None, None, 0.75)
    assert best.reason.startswith(f"{advice}. ")
    assert "E=2, γ=1 runs at 0.75 times its speed" in best.reason


def test_predictions_alone_recommend_nothing() -> None:
    with pytest.raises(ValueError, match="predictions alone recommend none"):
        FOUND.recommendation(True)


def test_the_error_of_a_prediction_is_relative_to_what_was_measured() -> None:
    (run,) = real({(1, 2): [0.5, 0.5, 0.5]}).measured
    assert (run.cell.predicted, run.error) == (1.0, 1.0)
    assert (run.same_as_plain, run.answers, run.tokens_per_round) == (1, 1, 1.5)


# Files


def test_a_row_of_the_csv_is_an_exit_and_a_draft_length() -> None:
    rows = [dict(zip(CSV_HEADER, row, strict=True)) for row in real({(1, 2): [0.5, 0.25, 2.0]}).csv_rows()]
    assert [(row["exit_layer"], row["num_draft_tokens"]) for row in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    expected = {
        "exit_layer": 1,
        "num_draft_tokens": 2,
        "perplexity": rows[0]["perplexity"],
        "agreement": 0.5,
        "expected_acceptance": 0.5,
        "c": 0.25,
        "verify_cost": 1.5,
        "tokens_per_round": 2.0,
        "draft_acceptance_rate": 0.5,
        "predicted": 1.0,
        "predicted_run": 1.0,
        "measured": 0.5,
        "lowest": 0.25,
        "highest": 2.0,
        "error": 1.0,
    }
    assert rows[1] == expected
    assert [rows[2][name] for name in ("measured", "lowest", "highest", "error")] == [None] * 4


def test_before_costs_a_row_of_the_csv_is_an_exit() -> None:
    rows = replace(FOUND, costs=None).csv_rows()
    assert [row[:2] + row[3:5] for row in rows] == [[1, None, 0.5, 0.5], [2, None, 0.75, 0.5]]
    assert all(row[5:] == [None] * (len(CSV_HEADER) - 5) for row in rows)


def test_before_answers_the_csv_has_no_rows() -> None:
    assert replace(FOUND, answers={}, costs=None).csv_rows() == []


@pytest.mark.parametrize("found", [FOUND, replace(FOUND, answers={}, costs=None)], ids=["found", "nothing"])
def test_everything_found_is_plain_json(found: ExitComparison) -> None:
    stored = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert stored["answered"] == len(found.answers)
    assert len(stored["cells"]) == len(found.cells())
    assert stored["cost_table"] == (None if found.costs is None else json.loads(json.dumps(COSTS.to_dict())))


# Prompts to run


def test_prompts_are_spread_over_categories_and_within_each_evenly() -> None:
    categories = ["a"] * 6 + ["b"] * 3 + ["c"]
    assert spread(categories, 5) == [0, 3, 6, 7, 9]


def test_prompts_without_categories_are_spread_evenly() -> None:
    assert spread([None] * 9, 3) == [0, 3, 6]


def test_fewer_prompts_than_categories_are_of_the_first_ones() -> None:
    assert spread(["a", "b", "c", "a"], 2) == [0, 1]


@given(st.lists(st.sampled_from(["a", "b", "c", None])), st.integers(0, 30))
def test_spread_gives_different_prompts_as_many_as_there_are_and_no_category_more_than_its_share(
    categories: list[str | None], count: int
) -> None:
    chosen = spread(categories, count)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, len(categories))
    assert set(chosen) <= set(range(len(categories)))
    shares = Counter(categories[index] for index in chosen)
    open_ones = [shares[name] for name, there in Counter(categories).items() if shares[name] < there]
    # Only a category that has run out may have fewer than another one.
    assert not open_ones or min(open_ones) >= max(shares.values(), default=0) - 1
