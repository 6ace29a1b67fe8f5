"""What tokens cost by context and rows: sums by hand, what a controller would choose, and which tables are measured."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip import Engine
from layerskip.comparison import scaling
from layerskip.comparison.scaling import (
    ScalingPoint,
    check_scaling,
    measure_scaling,
    pays_up_to,
    repeated,
    round_seconds_per_token,
    scaling_points,
    some_tokens,
)
from layerskip.decoding.cost import CostTable, expected_tokens
from tests import kit

# Of four rows: a draft step of a quarter of a plain one at exit 1, of half a one at exit 3.
COSTS = CostTable(
    exit_layers=(1, 3),
    draft_steps=(0.25, 0.5),
    verifications=((1.0, 1.25, 2.0), (1.0, 1.0, 1.0)),
    autoregressive_step=1.0,
    head=0.1,
    draft_head=0.1,
    rows=4,
)


def point(**changes: Any) -> ScalingPoint:
    parts: dict[str, Any] = {
        "context": 128,
        "rows": 1,
        "exit_layer": 2,
        "acceptance": 0.5,
        "autoregressive_seconds": 1.0,
        "self_speculative_seconds": 0.5,
        "num_draft_tokens": 3,
    }
    return ScalingPoint(**{**parts, **changes})


@pytest.mark.parametrize(
    ("acceptance", "drafts", "tokens"),
    [(0.0, 5, 1.0), (0.5, 0, 1.0), (0.5, 1, 1.5), (0.5, 3, 1.875), (1.0, 3, 4.0)],
)
def test_a_round_emits_accepted_drafts_and_the_token_that_follows(
    acceptance: float, drafts: int, tokens: float
) -> None:
    assert expected_tokens(acceptance, drafts) == tokens
    if acceptance < 1:
        assert expected_tokens(acceptance, drafts) == (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def test_each_row_of_a_round_adds_its_own_tokens() -> None:
    # A round of one draft takes 0.25 + 1.25, and gives 1.5 tokens for each of the four rows.
    assert round_seconds_per_token(COSTS, 1, 1, 0.5) == 1.5 / (4 * 1.5)
    assert round_seconds_per_token(COSTS, 3, 2, 1.0) == 2.0 / (4 * 3)
    with pytest.raises(ValueError, match="drafts=3 were not measured"):
        round_seconds_per_token(COSTS, 1, 3, 0.5)


def test_points_are_at_the_cheapest_draft_length_of_each_exit_and_acceptance() -> None:
    points = scaling_points(COSTS, 512, [0.5, 1.0])
    assert [(each.exit_layer, each.acceptance, each.num_draft_tokens) for each in points] == [
        (1, 0.5, 1),
        (1, 1.0, 1),
        (3, 0.5, 1),
        (3, 1.0, 2),
    ]
    assert {(each.context, each.rows, each.autoregressive_seconds) for each in points} == {(512, 4, 0.25)}
    # At exit 1: 1.5 or 2.5 for a round, and 1.5 or 1.75 tokens of a row, 2 or 3 where all are accepted.
    assert [each.self_speculative_seconds for each in points[:2]] == [1.5 / 6, 1.5 / 8]
    # At exit 3: 1.5 or 2 for a round.
    assert [each.self_speculative_seconds for each in points[2:]] == [1.5 / 6, 2.0 / 12]


def test_a_controller_chooses_plain_decoding_unless_drafting_is_faster() -> None:
    assert [each.chosen_num_draft_tokens for each in scaling_points(COSTS, 512, [0.25, 0.5, 1.0])] == [0, 0, 1, 0, 0, 2]
    assert point().speed_up == 2.0
    assert (point().pays, point().chosen_num_draft_tokens) == (True, 3)
    even = point(self_speculative_seconds=1.0)
    assert (even.speed_up, even.pays, even.chosen_num_draft_tokens) == (1.0, False, 0)
    assert even.to_dict()["chosen_num_draft_tokens"] == 0
    assert even.to_dict()["num_draft_tokens"] == 3


@pytest.mark.parametrize(
    ("seconds", "most"),
    [
        ({1: 0.5, 2: 0.9, 8: 0.5}, 8),
        ({8: 1.5, 1: 0.5, 2: 0.9}, 2),
        # What pays again at more rows is beyond the first number at which it does not.
        ({1: 0.5, 2: 1.1, 8: 0.5}, 1),
        ({1: 1.0, 2: 0.9}, None),
        ({}, None),
    ],
)
def test_drafting_pays_up_to_the_last_number_of_rows_before_it_does_not(
    seconds: dict[int, float], most: int | None
) -> None:
    assert pays_up_to([point(rows=rows, self_speculative_seconds=each) for rows, each in seconds.items()]) == most


def test_a_text_is_repeated_or_cut() -> None:
    assert repeated([1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert repeated([1, 2, 3], 2) == [1, 2]


@pytest.mark.parametrize("vocab_size", [3, kit.VOCAB, 50000])
def test_tokens_without_a_text_are_the_models_own_and_varied(vocab_size: int) -> None:
    tokens = some_tokens(vocab_size)
    assert 0 <= min(tokens) <= max(tokens) < vocab_size
    assert len(set(tokens)) == min(vocab_size, 997)


def test_every_context_is_measured_at_every_batch_size() -> None:
    engine = Engine(kit.mixed())
    found = list(measure_scaling(engine, [1, 2], 2, kit.PROMPT, [4, 12], [1, 3], 1))
    assert [(context, costs.rows, costs.measured_on["context"]) for context, costs in found] == [
        (4, 1, 4),
        (4, 3, 4),
        (12, 1, 12),
        (12, 3, 12),
    ]
    assert {(costs.exit_layers, costs.max_num_draft_tokens) for _, costs in found} == {((1, 2), 2)}


def test_contexts_hold_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(engine: Engine, exits: Any, drafts: int, context: Any, repeats: int, *, rows: int) -> CostTable:
        asked.append((context, rows, repeats))
        return COSTS

    monkeypatch.setattr(scaling, "measure_costs", noted)
    list(measure_scaling(Engine(kit.mixed()), [1], 2, [4, 5], [1, 3], [2], 7))
    assert asked == [([4], 2, 7), ([4, 5, 4], 2, 7)]


@pytest.mark.parametrize(
    ("exits", "drafts", "contexts", "message"),
    [
        ([1, 4], 2, [8], "exit_layer=4 is out of range"),
        ([1], 0, [8], "num_draft_tokens=0 is out of range"),
        ([1], 2, [8, 45], "context 45 with the 20 tokens of rounds behind it is too long .* only 64 positions"),
    ],
)
def test_what_the_model_cannot_be_measured_at_is_refused(
    exits: list[int], drafts: int, contexts: list[int], message: str
) -> None:
    engine = Engine(kit.build(kit.gpt2_config()))
    with pytest.raises(ValueError, match=message):
        check_scaling(engine, exits, drafts, contexts)


def test_the_longest_context_that_fits_is_not_refused_and_can_be_measured() -> None:
    """A control of the refusal above."""
    engine = Engine(kit.build(kit.gpt2_config()))
    check_scaling(engine, [1], 2, [44])
    assert len(list(measure_scaling(engine, [1], 2, kit.PROMPT, [44], [2], 1))) == 1
