"""What compare_exits.py advises, and what --save leaves in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import layerskip
from layerskip.decoding.plan import Wishes
from layerskip.model.draft_head import write_draft_token_ids
from tests import kit
from tests.compare_exits.compare_kit import SHORT, arguments, edit, written
from tests.comparison.test_compare import (
    COSTS,
    know_times,
)
from tests.test_evaluate import Runner


def agreement(folder: Path) -> tuple[float, ...]:
    """Returns how often each exit's first choice was the full model's, as a comparison's JSON file has it."""
    figures = json.loads((folder / "exits.json").read_text(encoding="utf-8"))["quality"]["all"]
    return tuple(each["agreement"] for each in figures if each["exit_layer"] in COSTS.exit_layers)


def test_the_fastest_cell_is_saved_and_load_uses_it(
    model: Path, prompts: Path, tmp_path: Path, known: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_times(monkeypatch, E2γ1=1.25, E2γ3=1.5)
    closing, shown = known(*arguments(model, prompts, tmp_path / "exits", "--run-cells", 9, "--save"))
    reason = "E=2, γ=3 runs at 1.50 times the speed of plain decoding."
    best = {"exit_layer": 2, "num_draft_tokens": 3, "speed_up": 1.5, "reason": reason}
    assert closing == {"output_dir": str(tmp_path / "exits"), **best}
    assert f"\n{reason}\n" in shown
    engine = layerskip.load(model)
    result = engine.generate("w44 w3", max_new_tokens=6).statistics
    assert (result.strategy, result.exit_layer, result.num_draft_tokens) == ("self_speculative", 2, 3)
    assert engine.cost_table == replace(COSTS, acceptance=agreement(tmp_path / "exits"))


@pytest.mark.parametrize(
    ("metadata", "advice"),
    [
        ({}, "No exit pays here: its exits were never trained: fine-tune first (training/finetune.py)."),
        ({"exit_layers": [1, 2]}, "No exit pays here: train its exits further, or compare on prompts like those"),
    ],
    ids=["untrained", "trained"],
)
def test_where_no_exit_pays_that_is_told_and_saved_and_generation_is_autoregressive(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    known: Runner,
    monkeypatch: pytest.MonkeyPatch,
    metadata: dict[str, Any],
    advice: str,
) -> None:
    know_times(monkeypatch, E1γ1=0.5, E1γ2=0.75, E1γ3=0.5)
    edit(model, layerskip={"format": 1, **metadata})
    closing, shown = known(*arguments(model, prompts, tmp_path / "exits", *SHORT, "--exit-layers", 1, "--save"))
    assert (closing["exit_layer"], closing["num_draft_tokens"]) == (None, None)
    assert advice in shown
    assert all(each["measured"] < 1 for each in written(tmp_path / "exits" / "exits.json")["measured"])
    stored = written(model / "config.json")["layerskip"]
    assert (stored["exit_layer"], stored["num_draft_tokens"]) == (None, None)
    assert layerskip.load(model).generate("w44 w3", max_new_tokens=4).statistics.strategy == "autoregressive"


def test_saving_changes_the_metadata_alone(model: Path, prompts: Path, tmp_path: Path, known: Runner) -> None:
    edit(model, layerskip={"format": 1, "exit_layers": [1, 2], "recipe": {"seed": 3}}, last=1)
    before = written(model / "config.json")
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    known(*arguments(model, prompts, tmp_path / "exits", *SHORT, "--save"))
    after = written(model / "config.json")
    assert list(after) == list(before)
    changed = {**before, "layerskip": after["layerskip"]}
    assert after == changed
    assert {name: after["layerskip"][name] for name in before["layerskip"]} == before["layerskip"]
    assert {file.name for file in model.iterdir() if file.read_bytes() != files[file.name]} == {"config.json"}
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert all(torch.equal(values, kit.mixed().state_dict()[name]) for name, values in plain.state_dict().items())


def test_without_save_the_checkpoint_stays(model: Path, prompts: Path, tmp_path: Path, known: Runner) -> None:
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    _, shown = known(*arguments(model, prompts, tmp_path / "exits", *SHORT))
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    assert "stand in" not in shown


@pytest.mark.parametrize(("size", "expected"), [(None, 40), (20, 20), (kit.VOCAB, None)])
def test_the_draft_vocabulary_that_was_measured_is_the_one_that_load_uses(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    known: Runner,
    monkeypatch: pytest.MonkeyPatch,
    size: int | None,
    expected: int | None,
) -> None:
    know_times(monkeypatch, **{f"E1γ{drafts}": 2.0 for drafts in (1, 2, 3)})
    edit(model, layerskip={"format": 1, "draft_vocab_size": 30})
    write_draft_token_ids(model, torch.arange(90, 50, -1))
    wanted = 30 if size is None else size
    more = [] if size is None else ["--draft-vocab-size", size]
    known(*arguments(model, prompts, tmp_path / "exits", *SHORT, "--exit-layers", 1, "--save", *more))
    assert written(model / "config.json")["layerskip"]["draft_vocab_size"] == wanted
    engine = layerskip.load(model)
    plan = engine.plan("self_speculative", Wishes())
    assert (plan.exit_layer, plan.draft_vocab_size) == (1, 30 if size is None else expected)


@pytest.fixture
def adapters(model: Path, tmp_path: Path) -> Path:
    """Adapters on MIX, that say nothing about exits."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(layerskip.load(model).model, config).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.mark.parametrize("own", [None, {"format": 1, "exit_layers": [1], "data": "mine"}], ids=["without", "with"])
def test_adapters_get_metadata_of_their_own_and_what_lies_beneath_stays(
    model: Path,
    adapters: Path,
    prompts: Path,
    tmp_path: Path,
    known: Runner,
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, Any] | None,
) -> None:
    know_times(monkeypatch, **{f"E1γ{drafts}": 2.0 for drafts in (1, 2, 3)})
    edit(model, layerskip={"format": 1, "exit_layers": [1, 2]})
    write_draft_token_ids(model, torch.arange(40))
    if own is not None:
        (adapters / "layerskip.json").write_text(json.dumps(own))
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    known(*arguments(adapters, prompts, tmp_path / "exits", "--exit-layers", 1, "--save"))
    assert {file.name: file.read_bytes() for file in model.iterdir()} == before
    stored = written(adapters / "layerskip.json")
    expected = {"format": 1, "exit_layers": [1, 2]} if own is None else own
    assert {name: stored[name] for name in expected} == expected
    engine = layerskip.load(adapters)
    plan = engine.plan("self_speculative", Wishes())
    assert (plan.exit_layer, plan.draft_vocab_size) == (1, 40 if own is None else None)
    assert engine.cost_table == COSTS


def test_a_damaged_table_of_costs_is_named(model: Path) -> None:
    edit(model, layerskip={"format": 1, "cost_table": {**COSTS.to_dict(), "autoregressive_step": 0}})
    with pytest.raises(ValueError, match="the checkpoint's cost_table: latencies must be positive"):
        _ = layerskip.load(model).cost_table
