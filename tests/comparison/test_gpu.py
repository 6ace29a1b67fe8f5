"""What is measured on a device: shapes, exactness that can fail, and speeds by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from layerskip.comparison.arms import Arm, RoundCounts, Run
from layerskip.comparison.batches import Batch
from layerskip.comparison.gpu import SHAPES, Exactness, ShapeRun, measure_speed, random_llama
from layerskip.comparison.levers import BASELINE
from layerskip.comparison.time_limit import Task, TimeLimit, run_tasks
from layerskip.decoding.cost import CostTable
from tests import kit

CPU = torch.device("cpu")
EAGER = ["hf_generate", "static", "adaptive", "ngrams", "trusted", "adaptive+ngrams", "auto", "all", "all-trusted"]


# Shapes


def test_the_large_shape_has_the_parameters_of_the_model_it_is_named_after() -> None:
    """Llama-3.2-1B has 1,235,814,400 parameters, those of its tied head counted once."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES["llama-3.2-1b"].sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_235_814_400
    assert model.config.rope_parameters["rope_theta"] == 500000.0


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_exits_that_are_measured(name: str) -> None:
    shape = SHAPES[name]
    assert shape.exit_layers[0] > 0 and shape.exit_layers[-1] < shape.sizes["num_hidden_layers"]
    assert 0 < shape.compiled_exit_layer < shape.sizes["num_hidden_layers"]
    assert shape.context + shape.new_tokens <= LlamaConfig(**shape.sizes).max_position_embeddings


def test_a_random_model_is_the_same_every_time_and_of_the_type_asked_for() -> None:
    one, other = (random_llama(SHAPES["tiny"].sizes, CPU, torch.bfloat16) for _ in range(2))
    assert one.dtype == torch.bfloat16 and not one.training
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    assert one.generation_config.eos_token_id is None


# Exactness


@pytest.fixture(scope="module")
def exactness() -> Exactness:
    return Exactness(CPU, new_tokens=24)


def test_every_eager_lever_is_exact_and_drafts_are_right_and_wrong(exactness: Exactness) -> None:
    steps = exactness.tasks()
    assert [task.name for task in steps["exactness"]] == [*EAGER, "tree-16"]
    assert [task.name for task in steps["exactness-compiled"]] == ["compiled-autoregressive", "compiled-static"]
    assert len(set(exactness.expected)) > 4
    for found in run_tasks(steps["exactness"], TimeLimit(1)):
        assert (found.status, found.figures["same"], found.figures["first_difference"]) == ("done", True, None)
        assert found.figures["tokens"] == 24
        if found.name != "hf_generate":
            assert 0 < found.figures["accepted"] < found.figures["drafted"], found.name


def test_a_token_that_differs_is_found(exactness: Exactness) -> None:
    other = Exactness(CPU, new_tokens=24)
    tokens = list(exactness.expected)
    tokens[5] += 1
    # In place of what plain decoding gives.
    vars(other)["expected"] = tokens
    found = other.check("static")
    assert (found["same"], found["first_difference"]) == (False, 5)


# Speeds


def test_a_speed_is_the_median_of_the_runs_behind_the_first() -> None:
    """Ten tokens in 1, 2 and 5 seconds behind a prefill of half a second, after a first run of 30 seconds."""
    seconds = iter([30.0, 1.0, 5.0, 2.0])

    def generate(batch: Batch, max_new_tokens: int) -> Run:
        return Run([list(range(11))], 10, 0.5, next(seconds), RoundCounts(4, 12, 6, 12, 0.1, 0.1))

    found = measure_speed(Arm("known", generate), Batch.of([kit.PROMPT]), 11, 3)
    assert (found.tokens_per_second, found.lowest, found.highest) == (5.0, 2.0, 10.0)
    assert (found.rounds_per_second, found.tokens_per_round) == (2.0, 2.5)
    assert (found.prefill_seconds, found.first_call_seconds) == (0.5, 28.0)
    assert (found.weight_bytes, found.loaded_bytes, found.peak_bytes) == (None, None, None)


def test_compiled_arms_are_those_of_the_shape_and_compile_nothing_until_they_run() -> None:
    run = ShapeRun(SHAPES["tiny"], CPU)
    made = {name: make() for name, make in run.arms()["compiled"].items()}
    assert [(name, arm.exit_layer, arm.num_draft_tokens) for name, arm in made.items()] == [
        ("compiled-autoregressive", None, None),
        ("compiled E=2 γ=1", 2, 1),
        ("compiled E=2 γ=2", 2, 2),
    ]
    assert all(arm.counted is not None for arm in made.values())


def test_eager_speeds_and_costs_of_a_shape() -> None:
    run = ShapeRun(replace(SHAPES["tiny"], exit_layers=(1,), new_tokens=4), CPU)
    steps = run.tasks()
    assert list(steps) == ["compiled", "eager", "costs", "hf-compiled"]
    quick: list[Task] = [*steps["eager"], *steps["costs"]]
    found = {each.name: each for each in run_tasks(quick, TimeLimit(1))}
    assert {name: each.status for name, each in found.items()} == dict.fromkeys(
        (BASELINE, "hf_generate", "costs"), "done"
    )
    plain = found[BASELINE].figures
    assert plain["tokens_per_round"] == 1.0
    assert plain["rounds_per_second"] == pytest.approx(plain["tokens_per_second"])
    assert plain["weight_bytes"] == sum(parameter.nbytes for parameter in run.engine.model.parameters()) + sum(
        buffer.nbytes for buffer in run.engine.model.buffers()
    )
    table = CostTable.read(found["costs"].figures["cost_table"], "the finding")
    assert (table.exit_layers, table.max_num_draft_tokens, table.measured_on["context"]) == ((1,), 3, 8)


@pytest.mark.cuda
def test_memory_of_a_cuda_device_is_told() -> None:
    run = ShapeRun(SHAPES["tiny"], torch.device("cuda"))
    arm = run.arms()["eager"][BASELINE]()
    found = measure_speed(arm, run.batch, 4, 1)
    assert found.loaded_bytes is not None and found.peak_bytes is not None
    assert 0 < found.loaded_bytes < found.peak_bytes
