"""Predictions are what real rounds give; and which cells are worth running."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from layerskip import Engine
from layerskip.comparison.latency import measure_costs
from layerskip.comparison.prediction import Cell, MeasuredCell, best_cell, cells_to_run, predict
from layerskip.comparison.quality import read_answers
from layerskip.comparison.replay import replay, replay_row
from layerskip.decoding.cost import CostTable
from layerskip.decoding.statistics import Statistics
from tests import kit
from tests.comparison.test_latency import known_times

EXITS = [1, 2, 3]
LONGEST = 6
LENGTHS = (1, 3, LONGEST)
BUDGET = 16
PROMPTS = [kit.PROMPT, [44, 3], [30, 31, 32, 33, 34], [2]]
SOME_IDS = torch.arange(1, kit.VOCAB, 2)
# Lower exits draft faster; a verification costs more the wider it is.
COSTS = CostTable(
    exit_layers=(1, 2, 3),
    draft_steps=(0.125, 0.25, 0.5),
    verifications=tuple(tuple(1 + drafts / 16 for drafts in range(LONGEST + 1)) for _ in EXITS),
    autoregressive_step=1.0,
    head=0.125,
    draft_head=0.125,
)


GRADES = [(kit.l4, None), (kit.mixed, 35), (kit.identical, 35)]


@cache
def engine_of(build: Callable[..., PreTrainedModel], eos: int | None) -> Engine:
    return Engine(build(eos_token_id=eos, pad_token_id=0))


@cache
def plainly(engine: Engine, budget: int) -> list[Any]:
    """Returns the results of plain decoding, one for each prompt."""
    return [
        engine.generate(kit.prompt_tensor(prompt), strategy="autoregressive", max_new_tokens=budget)
        for prompt in PROMPTS
    ]


@cache
def matches_of(engine: Engine, budget: int, draft_token_ids: torch.Tensor | None = None) -> dict[int, Any]:
    """Returns the matches of each exit on the answers."""
    answers = [result.new_token_ids[0] for result in plainly(engine, budget)]
    readings = read_answers(engine.layered, PROMPTS, answers, EXITS, draft_token_ids=draft_token_ids)
    return {exit_layer: [reading.matches[row] for reading in readings] for row, exit_layer in enumerate(EXITS)}


def speculate(engine: Engine, exit_layer: int, num_draft_tokens: int, budget: int) -> Statistics:
    """Returns the figures of real rounds over all prompts, each on its own."""
    calls = [
        engine.generate(
            kit.prompt_tensor(prompt), exit_layer=exit_layer, num_draft_tokens=num_draft_tokens, max_new_tokens=budget
        )
        for prompt in PROMPTS
    ]
    return Statistics.total([call.statistics for call in calls])


@cache
def speculate_together(engine: Engine, exit_layer: int, num_draft_tokens: int) -> Statistics:
    """Returns the figures of real rounds over all prompts in one batch, where rows go at a pace of their own."""
    width = max(map(len, PROMPTS))
    result = engine.generate(
        torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS]),
        attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]),
        exit_layer=exit_layer,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=BUDGET,
    )
    return result.statistics


def decode_seconds(statistics: Statistics) -> float:
    return sum(statistics.seconds.values()) - statistics.seconds["prefill"]


def no_draft_is_an_eos_after_a_wrong_one(real: Statistics, matches: list[list[bool]], budget: int) -> bool:
    """Tells whether a replay counts drafts as the engine does; see `replay`."""
    assert real.num_draft_tokens is not None
    return real.draft_tokens_processed == replay(matches, real.num_draft_tokens, budget).draft_tokens_processed


# Predictions


def test_a_prediction_by_hand() -> None:
    # γ = 2 and a budget that does not bind: (2, 1), (2, 2), (2, 0), and EOS as the target's own token: (2, 1).
    matches = {2: [[True, False, True, True, True, False, True, False]]}
    cell = predict(matches, COSTS, 100)[1]
    assert cell.place == (2, 2)
    assert (cell.tokens_per_round, cell.draft_acceptance_rate) == (8 / 4, 4 / 8)
    assert cell.predicted == 8 / (4 * (2 * 0.25 + 1.125))


def test_every_exit_and_draft_length_has_a_cell_in_its_order() -> None:
    cells = predict({1: [[True]], 3: [[False]]}, COSTS, 9)
    assert [cell.place for cell in cells] == [(exit_layer, drafts) for exit_layer in (1, 3) for drafts in range(1, 7)]


def test_without_rounds_there_are_no_cells() -> None:
    assert predict({2: [[], []]}, COSTS, 9) == []


def test_a_budget_of_two_leaves_no_room_for_drafts() -> None:
    cell = predict({2: [[True]]}, COSTS, 2)[3]
    assert (cell.tokens_per_round, cell.draft_acceptance_rate, cell.predicted) == (1.0, None, 1.0)


@pytest.mark.parametrize(("build", "eos"), GRADES)
def test_every_cell_has_the_acceptance_of_the_engines_rounds(
    build: Callable[..., PreTrainedModel], eos: int | None
) -> None:
    engine = engine_of(build, eos)
    matches = matches_of(engine, BUDGET)
    cells = predict(matches, COSTS, BUDGET)
    assert len(cells) == len(EXITS) * LONGEST
    for cell in (cell for cell in cells if cell.num_draft_tokens in LENGTHS):
        real = speculate_together(engine, *cell.place)
        assert cell.tokens_per_round == real.mean_acceptance_length
        if eos is None or no_draft_is_an_eos_after_a_wrong_one(real, matches[cell.exit_layer], BUDGET):
            assert cell.draft_acceptance_rate == real.draft_acceptance_rate


def test_a_draft_vocabulary_has_the_acceptance_of_its_own_rounds() -> None:
    engine = Engine(kit.mixed(pad_token_id=0), draft_token_ids=SOME_IDS)
    cells = predict(matches_of(engine, BUDGET, SOME_IDS), COSTS, BUDGET)
    for cell in (cell for cell in cells if cell.num_draft_tokens in LENGTHS):
        real = speculate_together(engine, *cell.place)
        found = (cell.tokens_per_round, cell.draft_acceptance_rate)
        assert found == (real.mean_acceptance_length, real.draft_acceptance_rate)
    # A control: the whole head's rounds are others.
    assert predict(matches_of(engine, BUDGET), COSTS, BUDGET) != cells


@cache
def known_table() -> CostTable:
    """Returns the costs under known times, which are alike for all of these models."""
    model = kit.l4()
    with known_times(model):
        return measure_costs(Engine(model), EXITS, LONGEST, kit.PROMPT, 1)


KNOWN = [
    (kit.l4, 35, 16),
    (kit.mixed, None, 7),
    (kit.mixed, 13, 16),
    (kit.identical, 35, 16),
]


@pytest.mark.parametrize(("build", "eos", "budget"), KNOWN)
def test_under_known_times_predictions_are_the_speeds_of_real_runs(
    build: Callable[..., PreTrainedModel], eos: int | None, budget: int
) -> None:
    model = build(eos_token_id=eos, pad_token_id=0)
    engine = Engine(model)
    ratios: dict[tuple[int, int], float] = {}
    table = known_table()
    with known_times(model):
        plain = plainly(engine, budget)
        plain_seconds = sum(decode_seconds(result.statistics) for result in plain)
        matches = matches_of(engine, budget)
        for cell in predict(matches, table, budget):
            if cell.num_draft_tokens in LENGTHS:
                real = speculate(engine, *cell.place, budget)
                ratio = plain_seconds / decode_seconds(real)
                if no_draft_is_an_eos_after_a_wrong_one(real, matches[cell.exit_layer], budget):
                    ratios[cell.place] = ratio
                    assert cell.predicted == pytest.approx(ratio, rel=1e-9)
                else:
                    # The replay pays for drafts behind an EOS token that are never made.
                    assert eos is not None
                    assert ratio * 0.9 < cell.predicted < ratio
    assert len(ratios) >= 6 and len(set(ratios.values())) >= 6
    assert any(exit_layer == 2 for exit_layer, _ in ratios)


def test_the_known_runs_end_in_the_middle_and_at_the_budget_with_and_without_gain() -> None:
    """A control: the test above sees all of these."""
    model = kit.identical(eos_token_id=35, pad_token_id=0)
    engine = Engine(model)
    with known_times(model):
        plain = plainly(engine, BUDGET)
        fast, slow = (speculate(engine, exit_layer, LONGEST, BUDGET) for exit_layer in (2, 1))
    assert {result.finish_reasons[0] for result in plain} == {"stop", "length"}
    assert fast.cut > 0
    plain_seconds = sum(decode_seconds(result.statistics) for result in plain)
    assert decode_seconds(fast) < plain_seconds < decode_seconds(slow)


# What counts as accepted and emitted


def test_accepted_drafts_stop_at_the_first_wrong_one() -> None:
    """Right drafts behind a wrong one count for nothing: of these four one is accepted."""
    tally = replay_row([True, False, True, True, False, False, False], 4, 100)
    assert next(iter(tally.outcomes)) == (4, 1)
    assert tally.outcomes[4, 1] == 1


def test_an_eos_token_as_the_third_of_five_drafts_ends_a_round_of_three() -> None:
    model = kit.identical(pad_token_id=0)
    plain = kit.without_cache(model, kit.PROMPT, 10)
    eos = plain[3]
    assert eos not in plain[:3]
    result = Engine(model).generate(
        kit.prompt_tensor(), exit_layer=2, num_draft_tokens=5, max_new_tokens=10, eos_token_id=eos
    )
    real, replayed = result.statistics, replay([[True] * 3], 5, 10)
    assert result.new_token_ids == [plain[:4]]
    for found in (real, replayed):
        assert (found.rounds, found.drafted, found.accepted, found.cut, found.emitted) == (1, 3, 3, 1, 1 + 3)
        assert (found.mean_acceptance_length, found.draft_acceptance_rate) == (3.0, 1.0)


def test_a_bonus_token_is_emitted_and_not_accepted() -> None:
    real = speculate(Engine(kit.identical()), 2, 4, 11)
    assert (real.rounds, real.drafted, real.accepted, real.emitted) == (2 * 4, 8 * 4, 8 * 4, 11 * 4)
    replayed = replay([[True] * 10] * 4, 4, 11)
    assert (replayed.rounds, replayed.accepted, replayed.emitted) == (real.rounds, real.accepted, real.emitted)


@pytest.mark.parametrize(("build", "eos"), GRADES)
def test_what_is_emitted_is_what_is_accepted_and_a_target_each_round_but_those_cut(
    build: Callable[..., PreTrainedModel], eos: int | None
) -> None:
    engine = engine_of(build, eos)
    matches = matches_of(engine, BUDGET)
    for exit_layer in EXITS:
        for drafts in LENGTHS:
            real = speculate_together(engine, exit_layer, drafts)
            for found in (real, replay(matches[exit_layer], drafts, BUDGET)):
                assert found.emitted - len(PROMPTS) == found.accepted + found.rounds - found.cut
                assert found.emitted == real.emitted


# Which cells to run


def grid(speeds: dict[tuple[int, int], float]) -> list[Cell]:
    return [Cell(*place, 1.0, 0.5, speed) for place, speed in speeds.items()]


def places(cells: list[Cell]) -> list[tuple[int, int]]:
    return [cell.place for cell in cells]


# Exits 2, 5 and 7; the best is (5, 2), its neighbours are (2, 2), (5, 1), (5, 3) and (7, 2).
GRID = grid(
    {
        (2, 1): 1.9,
        (2, 2): 1.1,
        (2, 3): 1.0,
        (5, 1): 1.4,
        (5, 2): 2.0,
        (5, 3): 1.3,
        (7, 1): 1.8,
        (7, 2): 1.2,
        (7, 3): 0.9,
    }
)


def test_the_best_cell_is_the_fastest_one() -> None:
    assert best_cell(GRID).place == (5, 2)


def test_of_equal_cells_the_lowest_exit_and_then_the_shortest_drafts_win() -> None:
    assert best_cell(grid({(5, 1): 2.0, (2, 4): 2.0, (2, 3): 2.0, (2, 1): 1.0})).place == (2, 3)


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (1, [(5, 2)]),
        # Neighbours come before faster cells elsewhere, the faster neighbours first.
        (2, [(5, 1), (5, 2)]),
        (4, [(5, 1), (5, 2), (5, 3), (7, 2)]),
        (5, [(2, 2), (5, 1), (5, 2), (5, 3), (7, 2)]),
        (6, [(2, 1), (2, 2), (5, 1), (5, 2), (5, 3), (7, 2)]),
        (7, [(2, 1), (2, 2), (5, 1), (5, 2), (5, 3), (7, 1), (7, 2)]),
        (99, places(GRID)),
    ],
)
def test_the_best_cell_its_neighbours_and_then_the_next_best_are_run(count: int, chosen: list[tuple[int, int]]) -> None:
    assert places(cells_to_run(GRID, count)) == chosen


def test_a_single_exit_has_neighbours_in_length_alone() -> None:
    cells = grid({(5, 1): 1.9, (5, 2): 1.1, (5, 3): 2.0, (5, 4): 0.7})
    assert places(cells_to_run(cells, 3)) == [(5, 2), (5, 3), (5, 4)]


def test_a_single_length_has_neighbours_in_exit_alone() -> None:
    cells = grid({(2, 1): 2.0, (5, 1): 0.5, (7, 1): 1.9})
    assert places(cells_to_run(cells, 2)) == [(2, 1), (5, 1)]


def test_a_single_cell_is_run_alone() -> None:
    assert places(cells_to_run(grid({(2, 1): 0.5}), 6)) == [(2, 1)]


def test_of_equal_neighbours_the_lower_exit_and_the_shorter_drafts_come_first() -> None:
    cells = grid({(2, 1): 1.0, (2, 2): 1.0, (5, 1): 1.0, (5, 2): 2.0, (5, 3): 1.0})
    assert places(cells_to_run(cells, 2)) == [(2, 2), (5, 2)]
    assert places(cells_to_run(cells, 3)) == [(2, 2), (5, 1), (5, 2)]


def test_the_error_is_predicted_over_measured_minus_one() -> None:
    cell = Cell(2, 4, 3.0, 0.5, 1.5)
    assert MeasuredCell(cell, 1.25, 1.0, 1.5, 3.0, 7, 8).error == pytest.approx(0.2)
