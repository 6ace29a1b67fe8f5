"""Levers on a checkpoint: what its costs and answers advise, and figures prompt by prompt, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from layerskip import Engine
from layerskip.comparison.arms import Arm, Run
from layerskip.comparison.batches import Batch
from layerskip.comparison.checkpoint_levers import COMPILED, EAGER, CheckpointRun, CheckpointSettings
from layerskip.comparison.levers import BASELINE
from layerskip.comparison.prediction import predict
from layerskip.decoding.cost import CostTable
from layerskip.prompt_file import PromptRow
from tests import kit

QUICK = CheckpointSettings(max_new_tokens=8, repeats=2, cost_repeats=1, max_num_draft_tokens=3)
PROMPTS = ("w44 w3", "w1 w5 w9")


def run_of(prompts: Sequence[str] = PROMPTS, exit_layers: tuple[int, ...] = (2, 1)) -> CheckpointRun:
    """Returns a run of a model of which exits were trained, and which does not end its answers."""

    def load() -> tuple[Engine, list[PromptRow]]:
        model = kit.mixed()
        model.config.layerskip = {"format": 1, "exit_layers": list(exit_layers)}
        rows = [PromptRow(f"line {number}", prompt) for number, prompt in enumerate(prompts, 1)]
        return Engine(model, kit.word_tokenizer(kit.VOCAB)), rows

    return CheckpointRun(load, QUICK)


@pytest.fixture(scope="module")
def checkpoint() -> CheckpointRun:
    return run_of()


def test_the_cell_follows_from_the_costs_and_the_models_own_answers(checkpoint: CheckpointRun) -> None:
    found = checkpoint.measure_costs()
    table = CostTable.read(found["cost_table"], "the findings")
    assert (table.exit_layers, table.max_num_draft_tokens, table.measured_on["context"]) == ((1, 2), 3, 3)
    model = kit.mixed()
    matches: dict[int, list[list[bool]]] = {1: [], 2: []}
    for prompt in PROMPTS:
        ids = [int(word[1:]) for word in prompt.split()]
        tokens = kit.without_cache(model, ids, 8)
        for layer, rows in matches.items():
            choices = kit.truncated(model, layer)(torch.tensor([ids + tokens])).logits[0, len(ids) : -1].argmax(-1)
            rows.append((choices == torch.tensor(tokens[1:])).tolist())
    assert found["agreement"] == {layer: sum(map(sum, rows)) / 14 for layer, rows in matches.items()}
    best = max(predict(matches, table, 8), key=lambda cell: cell.predicted)
    assert (found["best_cell"]["exit_layer"], found["best_cell"]["num_draft_tokens"]) == best.place
    assert found["prompts"] == 2
    json.dumps(found)


def test_every_lever_answers_every_prompt_and_what_there_is_comes_after_each(checkpoint: CheckpointRun) -> None:
    *earlier, last = checkpoint.measure_levers(EAGER)
    assert [part.is_whole for part in (*earlier, last)] == [False, False, False, True]
    assert [len(part.figures["levers"]) for part in earlier] == [len(EAGER)] * 3
    assert last.figures["failed"] == {}
    levers = {each["name"]: each for each in last.figures["levers"]}
    assert tuple(levers) == EAGER
    for name, each in levers.items():
        assert (each["same_as_first"], each["answers"]) == (2, 2), name
        assert each["new_tokens"] == 2 * 2 * 8
        assert each["lowest_ratio"] <= each["ratio"] <= each["highest_ratio"]
    assert levers[BASELINE]["ratio"] == levers[BASELINE]["predicted"] == 1.0
    assert (levers["static"]["exit_layer"], levers["static"]["num_draft_tokens"]) == checkpoint.cell.place
    assert (levers["auto"]["exit_layer"], levers["auto"]["num_draft_tokens"]) == ("auto", 3)
    json.dumps(last.figures)


def test_levers_decide_by_the_costs_and_by_what_the_exits_are_expected_to_give(checkpoint: CheckpointRun) -> None:
    arms = {arm.name: arm for arm in checkpoint.lever_arms((*EAGER, *COMPILED))}
    assert [name for name, arm in arms.items() if arm.counted is not None] == list(COMPILED)
    assert (arms["compiled-static"].exit_layer, arms["compiled-static"].num_draft_tokens) == checkpoint.cell.place


def failing(batch: Batch, max_new_tokens: int) -> Run:
    raise RuntimeError("it cannot be compiled")


def test_a_lever_that_fails_is_told_and_the_others_go_on(
    checkpoint: CheckpointRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, static = checkpoint.lever_arms((BASELINE, "static"))
    monkeypatch.setattr(checkpoint, "lever_arms", lambda names: [plain, Arm("broken", failing), static])
    *_, last = checkpoint.measure_levers((BASELINE, "broken", "static"))
    assert last.figures["failed"] == {"broken": "RuntimeError: it cannot be compiled"}
    assert [each["name"] for each in last.figures["levers"]] == [BASELINE, "static"]


def test_without_plain_decoding_nothing_is_compared(checkpoint: CheckpointRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "lever_arms", lambda names: [Arm("broken", failing)])
    with pytest.raises(ValueError, match="broken, which all others are compared with, failed: RuntimeError"):
        next(checkpoint.measure_levers(("broken",)))


def test_prompts_that_need_another_graph_than_most_are_left_out() -> None:
    long = " ".join(["w7"] * 60)
    _, batches = run_of((long, *PROMPTS)).loaded
    assert [batch.ids.shape[1] for batch in batches] == [2, 3]


def test_a_checkpoint_without_exits_is_refused() -> None:
    with pytest.raises(ValueError, match="does not say which exits were trained"):
        run_of(exit_layers=()).measure_costs()
