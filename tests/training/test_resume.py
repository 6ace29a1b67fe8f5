"""Runs that are killed or run out of space, and go on; and what an output folder may hold."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from layerskip.training.finetune import finetune
from layerskip.training.recipe import recipe_of
from layerskip.training.run_folder import RECIPE_FILE, last_whole_checkpoint
from tests import kit
from tests.training import workers
from tests.training.workers import PADDING, ROWS

PROGRAM = Path(__file__).parents[2] / "training" / "finetune.py"
LORA = {"method": "lora", "lora": {"rank": 4, "dropout": 0.1}}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A recipe without an output folder, and the files it names."""
    return workers.save_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def whole(material: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """An uninterrupted LoRA run: its folder, and the batches it was trained on."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = workers.run(workers.train_from_recipe, {**material, **LORA, "output_dir": str(folder)})
    assert outcome.error == ""
    return folder, outcome.value


@pytest.fixture(scope="module")
def streamed(
    material: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path, list[Any]]:
    """An uninterrupted run of all weights on a stream: its recipe, its folder, and the batches it was trained on."""
    recipe = {**material, "data": {**material["data"], "streaming": True, "shuffle_buffer": 10}}
    folder = tmp_path_factory.mktemp("streamed")
    outcome = run(recipe, folder)
    assert outcome.error == ""
    return recipe, folder, outcome.value


def run(recipe: dict[str, Any], folder: Path, *fault: Any, **changes: Any) -> workers.Outcome:
    return workers.run(workers.train_from_recipe, {**recipe, **changes, "output_dir": str(folder)}, *fault)


def assert_same_run(folder: Path, expected: Path) -> None:
    for part in ("", "checkpoint-8"):
        workers.assert_same_weights(workers.tensors_of(folder / part), workers.tensors_of(expected / part))


def copy_of_run(whole: Path, folder: Path, *steps: int) -> None:
    """Makes a folder as a run leaves it that is killed after the checkpoints of some steps."""
    for step in steps:
        shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    shutil.copy(whole / RECIPE_FILE, folder)


def test_a_run_killed_inside_an_accumulation_window_goes_on_bit_by_bit(
    material: dict[str, Any], whole: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    recipe, folder = {**material, **LORA}, tmp_path / "run"
    killed = run(recipe, folder, "kill", (4, 1))
    assert killed.status == -signal.SIGKILL
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-3", RECIPE_FILE]

    written = tmp_path / "recipe.yaml"
    written.write_text(yaml.safe_dump({**recipe, "output_dir": str(folder)}), encoding="utf-8")
    program = workers.run(workers.run_program, PROGRAM, str(written), "resume=true")
    assert (program.status, program.error) == (0, "")
    assert json.loads(program.value.splitlines()[-1])["output_dir"] == str(folder)
    assert_same_run(folder, whole[0])
    before = workers.tensors_of(material["model"])
    after = workers.tensors_of(folder)
    assert not before["model.layers.3.mlp.up_proj.weight"].equal(after["model.layers.3.mlp.up_proj.weight"])


@pytest.mark.parametrize("checkpoints", [(3,), (3, 6)], ids=["first pass", "second pass"])
def test_a_resumed_run_on_a_stream_sees_the_same_rows(
    streamed: tuple[dict[str, Any], Path, list[Any]], tmp_path: Path, checkpoints: tuple[int, ...]
) -> None:
    recipe, whole, batches = streamed
    copy_of_run(whole, tmp_path, *checkpoints)
    resumed = run(recipe, tmp_path, resume=True)
    assert resumed.error == ""
    assert resumed.value == [batch for batch in batches if batch[0] >= checkpoints[-1]]
    assert_same_run(tmp_path, whole)


def test_a_stream_begins_anew_inside_an_accumulation_window(
    streamed: tuple[dict[str, Any], Path, list[Any]],
) -> None:
    _, _, batches = streamed
    assert [batch[:2] for batch in batches] == [(step, part) for step in range(8) for part in range(2)]
    # The rows are not a whole number of windows; the passes have the same rows, each in an order of its own.
    read = [tuple(token for token in row if token != PADDING) for _, _, batch in batches for row in batch]
    first, second = read[:ROWS], read[ROWS:]
    assert len(set(first)) == ROWS and set(second) < set(first) and second != first[: len(second)]


DAMAGES = [("trainer_state.json", 0), ("trainer_state.json", 30), ("model.safetensors", 1000), ("optimizer.pt", 1000)]


@pytest.mark.parametrize(("name", "left"), DAMAGES)
def test_a_partial_checkpoint_is_passed_over(
    streamed: tuple[dict[str, Any], Path, list[Any]], tmp_path: Path, name: str, left: int
) -> None:
    """Of a file that is left with no bytes, none is there."""
    copy_of_run(streamed[1], tmp_path, 3, 6)
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
    damaged = tmp_path / "checkpoint-6" / name
    content = damaged.read_bytes()
    assert len(content) > left
    damaged.unlink()
    if left:
        damaged.write_bytes(content[:left])
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_a_run_goes_on_before_a_partial_checkpoint(
    material: dict[str, Any], whole: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    copy_of_run(whole[0], tmp_path, 3, 6)
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    resumed = run({**material, **LORA}, tmp_path, resume=True)
    assert resumed.error == "" and resumed.value == [batch for batch in whole[1] if batch[0] >= 3]
    assert_same_run(tmp_path, whole[0])
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-8"


def test_a_disk_that_fills_up_in_a_checkpoint(
    material: dict[str, Any], whole: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """What is left is a run that was killed after the checkpoint before."""
    full = run({**material, **LORA}, tmp_path, "second checkpoint")
    assert full.error.startswith(f"OSError: {tmp_path / 'checkpoint-6'} could not be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", RECIPE_FILE]
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-3"
    weights, expected = (workers.tensors_of(folder / "checkpoint-3") for folder in (tmp_path, whole[0]))
    workers.assert_same_weights(weights, expected)


def test_a_disk_that_fills_up_in_the_result(
    material: dict[str, Any], whole: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    copy_of_run(whole[0], tmp_path, 3, 6, 8)
    left = sorted(path.name for path in tmp_path.iterdir())
    full = run({**material, **LORA}, tmp_path, "result", resume=True)
    assert full.error.startswith(f"OSError: the trained model could not be written to '{tmp_path}'")
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    resumed = run({**material, **LORA}, tmp_path, resume=True)
    assert resumed.error == "" and resumed.value == [], "all steps were done"
    assert_same_run(tmp_path, whole[0])


def test_too_little_space_is_refused_before_the_first_step(
    material: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(OSError, match="a checkpoint takes about"):
        finetune(recipe_of({**material, "output_dir": str(tmp_path)}))
    assert list(tmp_path.iterdir()) == []


def test_resuming_without_a_checkpoint_begins_from_the_start(
    material: dict[str, Any], whole: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """The same recipe gives the same weights and metadata."""
    copy_of_run(whole[0], tmp_path)
    resumed = run({**material, **LORA}, tmp_path, resume=True)
    assert resumed.error == "" and resumed.value == whole[1]
    assert_same_run(tmp_path, whole[0])
    stored, again = (json.loads((folder / "config.json").read_text())["layerskip"] for folder in (whole[0], tmp_path))
    assert again == stored
    assert stored["recipe"]["trainer"]["max_steps"] == 8
    assert len(stored["data"]) >= 32


def refused(recipe: dict[str, Any], folder: Path, message: str) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=message):
        finetune(recipe_of({**recipe, "output_dir": str(folder)}))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_with_another_run_is_refused(material: dict[str, Any], whole: tuple[Path, list[Any]]) -> None:
    refused({**material, **LORA}, whole[0], "holds another run; continue it with resume=true")


def test_a_folder_with_something_else_is_refused(material: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for resume in (False, True):
        refused({**material, "resume": resume}, tmp_path, "is not empty and holds no run")


def test_resuming_with_another_recipe_is_refused(material: dict[str, Any], whole: tuple[Path, list[Any]]) -> None:
    changed = {**material, **LORA, "resume": True, "dropout": {"p_max": 0.25}, "dtype": "bfloat16"}
    refused(changed, whole[0], r"another recipe \(dropout.p_max, dtype differ\)")


def test_the_result_loads_plainly(whole: tuple[Path, list[Any]]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole[0])
    assert model(kit.prompt_tensor()).logits.shape == (1, len(kit.PROMPT), kit.VOCAB)
