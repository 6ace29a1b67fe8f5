"""The exit controller: what it chooses, what it costs where nothing pays, and how soon it is where something does.

Whole calls are simulated on made-up tables of costs; an exit agrees with the model at the positions that a test says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from layerskip.decoding.cost import CostTable, expected_tokens
from layerskip.decoding.exit_controller import Agreement, ExitController, RoundPlan, best_round

LONGEST = 12
ALLOWED_SHARE = 0.03
"""Of the work of plain decoding: what "auto" may add where no exit helps."""
Agrees = Callable[[int, int], bool]
"""Whether an exit's first choice is the model's, by exit and position."""


def table(c: dict[int, float], growth: float, head: float, width_two: float = 1.0) -> CostTable:
    """Costs in plain steps: c by exit, and a verification that grows by so much a width."""
    verifications = (1.0, *(width_two + growth * width for width in range(1, LONGEST + 1)))
    return CostTable(tuple(c), tuple(c.values()), (verifications,) * len(c), 1.0, 0.1, head)


TABLES = [
    pytest.param(table(c, growth, head, width_two), id=f"{name}-{len(c)}-exits-head-{head}")
    for name, c, growth, width_two in [
        ("flat", {2: 0.05}, 0.0, 1.0),
        ("flat", {2: 0.05, 4: 0.075, 6: 0.1}, 0.0, 1.0),
        ("raised", {2: 0.1, 4: 0.15}, 0.0, 1.1),
        ("growing", {2: 0.1}, 0.4, 1.0),
        ("growing", {2: 0.1, 4: 0.15, 6: 0.2, 8: 0.25}, 0.4, 1.0),
    ]
    for head in (0.1, 0.015)
]
FLAT = table({2: 0.05, 4: 0.15}, 0.0, 0.1)


@dataclass(frozen=True)
class Done:
    """A finished round: its plan, the tokens before it, what it drafted and emitted, and its rows for scoring."""

    plan: RoundPlan
    start: int
    drafted: int
    emitted: int
    scoring_rows: int
    seconds: float


def decode(costs: CostTable, agrees: Agrees, tokens: int) -> list[Done]:
    """A call: prefill settles position 0, rounds the rest; an exit that drafts is scored by its drafts."""
    controller = ExitController(costs, LONGEST)
    for layer in controller.first_scored():
        controller.observe(layer, [float(agrees(layer, 0))])
    rounds: list[Done] = []
    start = 1
    while start < tokens:
        plan = controller.next_round()
        layer, drafted, accepted, rows = plan.exit_layer, min(plan.num_draft_tokens, tokens - start - 1), 0, 0
        while layer is not None and accepted < drafted and agrees(layer, start + accepted):
            accepted += 1
        for scored in plan.scored:
            is_drafting = drafted > 0 and scored == layer
            places = range(start, start + (min(accepted + 1, drafted) if is_drafting else accepted + 1))
            controller.observe(scored, [float(agrees(scored, place)) for place in places])
            rows += 0 if is_drafting else len(places)
        seconds = costs.autoregressive_step if layer is None else costs.round_seconds(layer, drafted)
        controller.book(seconds=seconds, tokens=accepted + 1, head_rows=rows)
        rounds.append(Done(plan, start, drafted, accepted + 1, rows, seconds))
        start += accepted + 1
    return rounds


def extra_work(costs: CostTable, rounds: list[Done]) -> float:
    """Rejected drafts, a step each, and the rows of the draft head, in plain steps."""
    rejected = sum(each.drafted + 1 - each.emitted for each in rounds)
    rows = len(costs.exit_layers) + sum(each.scoring_rows + each.drafted for each in rounds)
    return rejected + rows * costs.draft_head / costs.autoregressive_step


def coins(rates: dict[int, float], seed: int, length: int = 1000) -> Agrees:
    draws = random.Random(seed)
    tossed = {layer: [draws.random() < rate for _ in range(length)] for layer, rate in rates.items()}
    return lambda layer, place: tossed[layer][place]


def never(layer: int, place: int) -> bool:
    return False


def always(layer: int, place: int) -> bool:
    return True


# --- Formulas ---------------------------------------------------------------------------------------------------------


def test_expected_tokens_are_a_geometric_sum() -> None:
    assert expected_tokens(0.5, 3) == 1.875
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6


def test_the_best_round_has_most_tokens_per_second() -> None:
    # Of 1.9 / 1.15, 2.71 / 1.3, … the most is at 8 drafts; the low exit's best is 1.75 / 1.1.
    assert best_round(FLAT, {2: 0.5, 4: 0.9}, LONGEST) == (4, 8)
    assert best_round(FLAT, {2: 0.5, 4: 0.1}, LONGEST)[0] == 2
    assert best_round(FLAT, {2: 0.5, 4: 0.9}, 3) == (4, 3)


def test_nothing_beats_plain_decoding_where_acceptance_is_below_c() -> None:
    assert best_round(FLAT, {2: 0.049, 4: 0.149}, LONGEST) == (None, 0)
    assert best_round(FLAT, {2: 0.051, 4: 0.149}, LONGEST) == (2, 1)


def test_among_equals_the_lower_exit_and_the_shorter_draft_win() -> None:
    assert best_round(table({3: 0.5, 5: 0.5}, 0.0, 0.1), {5: 1.0, 3: 1.0}, LONGEST)[0] == 3
    # A second draft that is right half the time for half of a step: 1.5 a step either way.
    costs = CostTable((1,), (0.5,), ((1.0, 1.0, 1.0),), 2.0, 0.1, 0.1)
    assert expected_tokens(0.5, 1) / 1.5 == 1
    assert best_round(costs, {1: 0.5}, 2) == (1, 1)


def test_an_exit_that_is_never_right_does_not_pay_by_noise_of_the_table() -> None:
    assert best_round(table({2: 0.05}, 0.0, 0.1, width_two=0.9), {2: 0.0}, LONGEST) == (None, 0)


# --- What an exit is thought to be worth ------------------------------------------------------------------------------


def test_a_single_miss_forbids_drafts_and_a_single_hit_allows_few() -> None:
    miss, hit = Agreement(), Agreement()
    miss.observe(0.0)
    hit.observe(1.0)
    assert miss.cautious == 0
    assert 0.2 < hit.cautious < 0.5


def test_an_exit_that_is_always_right_is_believed_wholly() -> None:
    agreement = Agreement()
    for _ in range(64):
        agreement.observe(1.0)
    assert 0.99 < agreement.cautious <= 1


def test_a_lone_hit_among_many_counts_for_nothing() -> None:
    agreement = Agreement()
    for place in range(40):
        agreement.observe(float(place == 30))
    assert agreement.cautious == 0


def test_faded_evidence_gives_way_sooner() -> None:
    fresh, faded = Agreement(), Agreement()
    for agreement in (fresh, faded):
        for _ in range(30):
            agreement.observe(0.0)
    faded.fade(10_000)
    assert faded.cautious == 0
    for agreement in (fresh, faded):
        agreement.observe(1.0)
        agreement.observe(1.0)
    assert faded.cautious > 0.4 > 0.05 > fresh.cautious


# --- Calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [0, LONGEST + 1])
def test_draft_lengths_without_costs_are_refused(longest: int) -> None:
    with pytest.raises(ValueError, match=f"max_num_draft_tokens={longest} is not allowed.*1 to 12 drafts"):
        ExitController(FLAT, longest)


@pytest.mark.parametrize("costs", TABLES)
def test_exits_that_are_never_right_never_draft_and_cost_next_to_nothing(costs: CostTable) -> None:
    rounds = decode(costs, never, 256)
    assert {each.plan.exit_layer for each in rounds} == {None}
    assert extra_work(costs, rounds) <= ALLOWED_SHARE / 2 * 256
    assert sum(each.scoring_rows for each in rounds) > 0


@pytest.mark.parametrize("costs", TABLES)
def test_exits_that_are_right_by_chance_stay_within_the_allowed_work(costs: CostTable) -> None:
    for phase in range(97):
        rounds = decode(costs, lambda layer, place, phase=phase: (place + 31 * layer + phase) % 97 == 0, 256)
        assert extra_work(costs, rounds) <= ALLOWED_SHARE * 256


def test_the_work_of_failed_drafts_would_be_noticed() -> None:
    # Eight tokens right, eight wrong: the drafts behind each change fail.
    trusting = decode(FLAT, lambda layer, place: place % 16 < 8, 256)
    assert extra_work(FLAT, trusting) > ALLOWED_SHARE * 256


@pytest.mark.parametrize("costs", TABLES)
def test_an_exit_that_is_always_right_soon_drafts_the_longest_rounds(costs: CostTable) -> None:
    rounds = decode(costs, always, 300)
    early = [each for each in rounds if each.start < 64]
    late = [each for each in rounds if each.start >= 64]
    best = best_round(costs, dict.fromkeys(costs.exit_layers, 1.0), LONGEST)
    assert {(each.plan.exit_layer, each.plan.num_draft_tokens) for each in late} == {best}
    # The end of the call cuts the last round.
    assert all(each.emitted == LONGEST + 1 for each in late[:-1])
    assert sum(each.emitted for each in early) / len(early) > 0.4 * (LONGEST + 1)


@pytest.mark.parametrize("head", [0.1, 0.015])
@pytest.mark.parametrize("seed", range(5))
def test_of_two_exits_the_one_with_more_tokens_per_second_is_found(head: float, seed: int) -> None:
    costs = table({2: 0.05, 4: 0.15}, 0.0, head)
    late = [each for each in decode(costs, coins({2: 0.5, 4: 0.9}, seed), 600) if each.start >= 100]
    assert sum(each.plan.exit_layer == 4 for each in late) > 0.95 * len(late)
    # With the rates the other way round it is the lower one.
    late = [each for each in decode(costs, coins({2: 0.9, 4: 0.5}, seed), 600) if each.start >= 100]
    assert sum(each.plan.exit_layer == 2 for each in late) > 0.95 * len(late)


@pytest.mark.parametrize("costs", TABLES)
def test_it_goes_plain_where_the_text_changes_and_comes_back(costs: CostTable) -> None:
    rounds = decode(costs, lambda layer, place: not 150 <= place < 300, 600)
    drafting = [each.start for each in rounds if each.plan.exit_layer is not None]
    assert not [start for start in drafting if 200 <= start < 290]
    assert min(start for start in drafting if start >= 290) < 300 + 64
    late = [each for each in rounds if each.start >= 450]
    assert all(each.plan.num_draft_tokens == LONGEST for each in late)


@pytest.mark.parametrize("costs", TABLES)
def test_plain_rounds_score_within_their_budget(costs: CostTable) -> None:
    rounds = decode(costs, never, 2000)
    for end in (100, 500, len(rounds)):
        spent = sum(each.scoring_rows for each in rounds[:end]) * costs.draft_head
        assert spent <= 1 + 0.01 * sum(each.seconds for each in rounds[:end])
    assert spent > 0.01 * len(rounds)


def test_plans_name_the_exits_to_score() -> None:
    for each in decode(FLAT, coins({2: 0.6, 4: 0.7}, 1), 400):
        drafting = () if each.plan.exit_layer is None else (each.plan.exit_layer,)
        assert each.plan.scored in ((2, 4), drafting)
        assert (each.plan.num_draft_tokens == 0) == (each.plan.exit_layer is None)


def test_the_same_observations_give_the_same_plans() -> None:
    first, again, other = (decode(FLAT, coins({2: 0.6, 4: 0.7}, seed), 400) for seed in (1, 1, 2))
    assert first == again
    assert first != other
