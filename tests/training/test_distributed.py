"""Two ranks on the CPU: DDP through the trainer, FSDP2 by hand, and the program under `accelerate launch`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands import launch

from tests import kit
from tests.training import workers

PROGRAM = Path(__file__).parents[2] / "training" / "finetune.py"
STEPS = 12


def rows(number: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Rows of different lengths, of which different numbers of tokens count."""
    torch.manual_seed(seed)
    made = []
    for row in range(number):
        ids = torch.randint(1, kit.VOCAB, (4 + row % 9,)).tolist()
        masked = row % 4
        made.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return made


def values(outcomes: list[workers.Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert (outcome.status, outcome.error) == (0, "")
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "checkpointing"])
def dropped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Weights and kept samples of two ranks with one row each, so that a dropped layer is skipped as a whole."""
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 1,
        "learning_rate": 0.01,
        "activation_checkpointing": request.param,
        "disable_tqdm": True,
        "logging_steps": 5,
    }
    folder = str(tmp_path_factory.mktemp("dropped"))
    return values(workers.run_ranks(workers.train_on_rows, rows(2 * STEPS), 0.5, folder, options))


def test_ranks_keep_the_same_weights_where_whole_layers_are_skipped(dropped: list[Any]) -> None:
    (first, _), (second, _) = dropped
    workers.assert_same_weights(first, second)
    before = dict(kit.l4().named_parameters())
    assert all(not torch.equal(first[name], before[name]) for name in before)


def test_ranks_drop_the_same_layers_and_draw_once_a_forward(dropped: list[Any]) -> None:
    (_, first), (_, second) = dropped
    assert first == second
    assert len(first) == STEPS * kit.NUM_LAYERS
    skipped = [sum(not kept[0] for kept in first[layer :: kit.NUM_LAYERS]) for layer in range(kit.NUM_LAYERS)]
    assert skipped[0] == 0 and skipped[3] >= 5


BY_SGD = {
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that one process trains, with four rows a step."""
    options = {**BY_SGD, "per_device_train_batch_size": 4}
    folder = str(tmp_path_factory.mktemp("by_one"))
    ((weights, _),) = values([workers.run(workers.train_on_rows, rows(20), 0.0, folder, options)])
    return weights


@pytest.mark.parametrize("accumulated", [1, 2])
def test_two_ranks_train_as_one_process_with_the_same_batch(
    by_one: dict[str, torch.Tensor], tmp_path: Path, accumulated: int
) -> None:
    options = {**BY_SGD, "per_device_train_batch_size": 2 // accumulated, "gradient_accumulation_steps": accumulated}
    ranks = values(workers.run_ranks(workers.train_on_rows, rows(20), 0.0, str(tmp_path), options))
    before = dict(kit.l4().named_parameters())
    for weights, _ in ranks:
        for name, weight in by_one.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)
    assert max((by_one[name] - before[name]).abs().max().item() for name in by_one) > 0.01


def test_fsdp2_trains_as_one_process() -> None:
    ids = torch.randint(1, kit.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0)).tolist()
    ranks = values(workers.run_ranks(workers.train_sharded, ids, 12))
    ((expected, kept),) = values([workers.run(workers.train_sharded, ids, 12)])
    assert [False, False] in kept and [True, False] in kept
    before = dict(kit.l4().named_parameters())
    for weights, masks in ranks:
        assert masks == kept
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0)
    assert max((expected[name] - before[name]).abs().max().item() for name in expected) > 0.01


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_fsdp_on_cpus_is_refused(how: str, tmp_path: Path) -> None:
    for outcome in workers.run_ranks(workers.ask_for_fsdp, how, str(tmp_path)):
        assert outcome.error.startswith("ValueError: FSDP was asked for on CPU")
    alone = workers.run(workers.ask_for_fsdp, how, str(tmp_path))
    assert alone.error.startswith("ValueError: ") and "fsdp" in alone.error.lower()


@pytest.mark.parametrize("streaming", [False, True], ids=["file", "stream"])
def test_ranks_read_different_rows_of_a_recipe(streaming: bool, tmp_path: Path) -> None:
    recipe = workers.save_material(tmp_path)
    recipe["data"] |= {"streaming": streaming, "shuffle_buffer": 10} if streaming else {}
    recipe["trainer"] |= {"max_steps": 2}
    ranks = values(workers.run_ranks(workers.train_from_recipe, {**recipe, "output_dir": str(tmp_path / "run")}))
    read = [
        [tuple(token for token in row if token != workers.PADDING) for _, _, batch in batches for row in batch]
        for batches in ranks
    ]
    assert [len(of_rank) for of_rank in read] == [8, 8]
    assert len({*read[0], *read[1]}) == 16
    assert workers.tensors_of(tmp_path / "run")


def test_ranks_end_together_when_the_time_is_over(tmp_path: Path) -> None:
    """The first rank's clock allows three steps, on which it looks twice each; that of the other, none."""
    recipe = workers.save_material(tmp_path)
    recipe["trainer"] |= {"max_steps": 50}
    recipe |= {"output_dir": str(tmp_path / "run"), "max_minutes": 0.3 / 60}
    assert values(workers.run_ranks(workers.train_by_uneven_clocks, recipe)) == [3, 3]


def test_the_program_under_accelerate_launch(tmp_path: Path) -> None:
    recipe = workers.save_material(tmp_path)
    recipe["trainer"] |= {"max_steps": 2}
    recipe |= {"method": "lora", "output_dir": str(tmp_path / "run")}
    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    # Without --multi_gpu the launcher starts one process where there are not several GPUs.
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    options += ["--dynamo_backend", "no", "--main_process_port", "0", str(PROGRAM), str(written)]
    [shown] = values([workers.run(workers.run_program, Path(launch.__file__), *options)])
    [report] = [json.loads(line) for line in shown.splitlines() if line.startswith('{"output_dir"')]
    assert report["train_loss"] > 0
    # Of 11 batches of two rows each rank has 6, and takes 2 steps of 2.
    assert report["epoch"] == pytest.approx(4 / 6)
    assert workers.tensors_of(tmp_path / "run")
