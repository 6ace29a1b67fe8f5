"""Levers: predictions and figures by hand, speeds under a clock that is known, and what wider drafts could give."""

from __future__ import annotations

import pytest
import torch

from layerskip import Engine
from layerskip.comparison.arms import Arm, RoundCounts, Run, engine_arm
from layerskip.comparison.batches import Batch
from layerskip.comparison.benchmark import Sample, summarise, timed
from layerskip.comparison.latency import measure_costs
from layerskip.comparison.levers import (
    BASELINE,
    FullTree,
    LeverFigures,
    LeverSettings,
    best_trees,
    costs_table,
    full_tree,
    lever_names,
    lever_options,
    levers_table,
    needs_exit,
    predicted_speed,
    top_k_rates,
    top_k_table,
)
from layerskip.decoding.cost import CostTable
from tests import kit
from tests.comparison.test_latency import known_times

# A plain step takes 8 seconds; a draft 1 or 2; a verification 6 or 5 and another one for each draft.
TABLE = CostTable((1, 2), (1.0, 2.0), ((6.0, 7.0, 8.0, 9.0, 10.0), (5.0, 6.0, 7.0, 8.0, 9.0)), 8.0, 0.5, 0.5)
SETTINGS = LeverSettings(2, 3, longest=4, tree_nodes=(5,), tree_depth=2)
BATCHES = [Batch.of([kit.PROMPT]), Batch.of([kit.PROMPT[:4]])]


# Predicted and measured


def test_a_prediction_is_what_plain_steps_cost_over_what_the_rounds_did() -> None:
    """Two rounds of three drafts, 3 · 2 + 8 each; one that copied: one step for four; and a step of plain decoding."""
    work = {(2, 3, 3): 2, (1, 1, 4): 1, (4, 0, 0): 1}
    assert predicted_speed(work, TABLE, 9, 4) == 9 * 8 / (2 * 14 + 11 + 8)
    assert predicted_speed({(4, 0, 0): 7}, TABLE, 7, 4) == 1.0
    # Without an exit, three copied tokens cost what their verification does.
    assert predicted_speed({(4, 0, 3): 1}, TABLE, 4, 4) == 4 * 8 / TABLE.seconds(TABLE.exit_layers[0], 0, 3)


@pytest.mark.parametrize("work", [{}, {(2, 3, 3): 2, (2, 1, 5): 1}, {(3, 1, 1): 1}])
def test_what_was_not_measured_is_not_predicted(work: dict[tuple[int, int, int], int]) -> None:
    assert predicted_speed(work, TABLE, 9, 4) is None


def played(name: str, seconds: float, work: tuple[tuple[int, int, int, int], ...], drafted: int) -> tuple[Arm, Sample]:
    """Returns an arm and one recorded run of ten tokens after the first."""

    def unused(batch: Batch, max_new_tokens: int) -> Run:
        raise AssertionError("a summary runs nothing")

    rounds = RoundCounts(sum(entry[-1] for entry in work), drafted, 3, drafted, 0.1, 0.1, work)
    arm = Arm(name, unused, exit_layer="auto" if drafted else None)
    return arm, Sample(arm.label, 0, 0, Run([list(range(11))], 10, 0.1, seconds, rounds))


def test_figures_of_a_lever() -> None:
    (plain, first), (auto, second), (compiled, third) = (
        played(BASELINE, 8.0, ((4, 0, 0, 10),), 0),
        played("auto", 4.0, ((1, 2, 2, 3), (2, 4, 4, 1), (4, 0, 0, 1)), 12),
        played("compiled-static", 2.0, ((2, 3, 3, 4),), 12),
    )
    measured = summarise([plain, auto, compiled], [first, second, third])
    figures = [LeverFigures.of(each, TABLE, 4) for each in measured]
    assert [(each.lever, each.measured, each.predicted) for each in figures] == [
        (BASELINE, 1.0, 1.0),
        ("auto", 2.0, 10 * 8 / (3 * (2 * 1 + 8) + (4 * 2 + 9) + 8)),
        ("compiled-static", 4.0, None),
    ]
    found = figures[1]
    assert (found.exit_layer, found.tokens_per_round, found.draft_acceptance_rate) == ("auto", 10 / 5, 3 / 12)
    assert (found.verified_per_round, found.rounds_by_exit) == ((3 * 2 + 4) / 5, {1: 3, 2: 1, 4: 1})
    assert (found.same_as_first, found.answers) == (1, 1)
    lines = levers_table(figures).splitlines()
    assert "1:3 2:1 4:1" in lines[3] and "1 of 1" in lines[3]


def test_every_lever_has_options_in_the_order_of_its_names() -> None:
    options = lever_options(SETTINGS)
    assert list(options) == lever_names((5,), compile=False)
    assert options["adaptive+ngrams"] == {
        "exit_layer": 2,
        "num_draft_tokens": 4,
        "draft_stop": "adaptive",
        "copy_ngrams": "checked",
    }
    assert options["tree-5"] == {"exit_layer": 2, "num_draft_tokens": 2, "tree_nodes": 5}
    without = lever_options(LeverSettings(None, None, longest=4, tree_nodes=(5,), compile=True))
    assert list(without) == [BASELINE, "auto", "all", "all-trusted", "compiled-autoregressive"]
    assert not any(needs_exit(name) for name in without)


def test_every_lever_emits_the_models_own_tokens() -> None:
    model = kit.mixed()
    engine = Engine(model, cost_table=TABLE)
    arms = [engine_arm(name, engine, **options) for name, options in lever_options(SETTINGS).items()]
    expected = [kit.without_cache(model, tokens, 10) for tokens in (kit.PROMPT, kit.PROMPT[:4])]
    for sample in timed(arms, BATCHES, 10, 1):
        assert sample.run.token_ids == [expected[sample.batch]], sample.arm


def test_under_known_times_the_measured_speed_is_the_predicted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the levers whose rounds have no cost but what the table has; trees pass several tokens at once."""
    model = kit.mixed()
    with known_times(model) as clock:
        monkeypatch.setattr("layerskip.comparison.arms.time", clock)
        table = measure_costs(Engine(model), [1, 2], 5, kit.PROMPT, 1)
        engine = Engine(model, cost_table=table)
        options = lever_options(SETTINGS)
        arms = [engine_arm(name, engine, **options[name]) for name in (BASELINE, "static", "tree-5")]
        measured = summarise(arms, list(timed(arms, BATCHES, 12, 1)))
    plain, static, tree = (LeverFigures.of(each, table, kit.NUM_LAYERS) for each in measured)
    assert plain.predicted == plain.measured == 1.0
    assert static.predicted == pytest.approx(static.measured)
    assert static.rounds_by_exit.keys() == {2} and static.tokens_per_round != 1
    assert tree.predicted is not None and tree.predicted > tree.measured


# What wider drafts could give


@pytest.mark.parametrize("ids", [None, torch.arange(0, kit.VOCAB, 2)])
def test_rates_are_those_of_a_model_that_ends_at_the_exit(ids: torch.Tensor | None) -> None:
    model = kit.mixed()
    prompts = [kit.PROMPT, kit.PROMPT[:4], *([token] for token in range(8))]
    answers = [kit.without_cache(model, prompt, count) for prompt, count in zip(prompts, range(1, 11), strict=True)]
    rates = top_k_rates(Engine(model).layered, prompts, answers, [1, 3], ids)
    allowed = range(kit.VOCAB) if ids is None else ids.tolist()
    for exit_layer in (1, 3):
        short = kit.truncated(model, exit_layer)
        ranks = []
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.no_grad():
                logits = short(torch.tensor([prompt + answer])).logits[0].tolist()
            for place in range(1, len(answer)):
                scores = logits[len(prompt) + place - 1]
                order = sorted(allowed, key=lambda token: -scores[token])
                ranks.append(order.index(answer[place]) if answer[place] in order else kit.VOCAB)
        assert rates[exit_layer] == {k: sum(rank < k for rank in ranks) / len(ranks) for k in (1, 2, 4, 8)}
    assert rates[1][1] < rates[1][8]


def test_an_exit_that_is_the_model_has_every_token_first() -> None:
    model = kit.identical()
    answers = [kit.without_cache(model, kit.PROMPT, 6)]
    assert top_k_rates(Engine(model).layered, [kit.PROMPT], answers, [2]) == {2: dict.fromkeys((1, 2, 4, 8), 1.0)}
    with pytest.raises(ValueError, match="ends with its first token"):
        top_k_rates(Engine(model).layered, [kit.PROMPT], [answers[0][:1]], [2])


def test_a_full_tree_has_a_chance_at_every_depth() -> None:
    """Two levels of two children are six nodes, which the table does not have."""
    assert full_tree(TABLE, 1, 4, 0.5, 1) == FullTree(1, 4, 0.5, 1, 4, 1.5, 1.5 * 8 / (1 + 10))
    assert full_tree(TABLE, 2, 1, 0.5, 3) == FullTree(2, 1, 0.5, 3, 3, 1.875, 1.875 * 8 / (3 * 2 + 8))
    assert full_tree(TABLE, 2, 2, 0.5, 2) is None


def test_of_each_exit_and_width_the_fastest_depth_is_told() -> None:
    rates = {1: {1: 0.0, 2: 0.5, 8: 0.9}, 2: {1: 1.0, 2: 1.0, 8: 1.0}}
    best = best_trees(TABLE, rates)
    assert [(tree.exit_layer, tree.children, tree.depth) for tree in best] == [
        (1, 1, 1),
        (1, 2, 1),
        (2, 1, 4),
        (2, 2, 1),
    ]
    assert best[2].predicted == 5 * 8 / (4 * 2 + 9)
    lines = top_k_table({2: {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}}, best).splitlines()
    assert lines[2].split()[:8] == ["E=2", "1.00", "1.00", "1.00", "1.00", "2.35", "(4", "deep)"]
    assert lines[2].split()[-2:] == ["–", "–"]


def test_costs_are_shown_in_steps_of_plain_decoding() -> None:
    lines = costs_table(TABLE).splitlines()
    assert lines[0].split()[-5:] == ["c", "V=0", "V=1", "V=2", "V=4"]
    assert lines[3].split() == ["E=2", "0.25", "0.62", "0.75", "0.88", "1.12"]
