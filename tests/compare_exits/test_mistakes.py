"""What a user gets wrong is told before any work."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from layerskip.program import DIFFERENCE, writable_checkpoint
from tests import kit
from tests.compare_exits.compare_kit import arguments, last_line
from tests.test_evaluate import EOS, Runner, save_model

MISTAKES = [
    (["--max-num-draft-tokens", 0], "--max-num-draft-tokens 0 is out of range"),
    (["--rows", 0], "--rows 0 is out of range"),
    (["--batch-size", -1], "--batch-size -1 is out of range"),
    (["--run-cells", 0], "--run-cells 0 is out of range"),
    (["--run-rows", 0], "--run-rows 0 is out of range"),
    (["--repeats", 0], "--repeats 0 is out of range"),
    (["--save", "--repeats", 2], "--save with --repeats 2 would store what may be noise; pass 3 or more"),
    (["--exit-layers", "1,x"], "--exit-layers '1,x' is not a list of numbers"),
    (["--max-new-tokens", 2], "--max-new-tokens 2 is out of range; allowed are integers from 3 on"),
    (["--temperature", 0], "--temperature 0.0 is out of range"),
    (["--temperature", "nan"], "--temperature nan is out of range"),
    (["--temperature", "inf"], "--temperature inf is out of range"),
    (["--prompts", "missing.jsonl"], "missing.jsonl"),
    (["--prompts", "prompts.csv"], "allowed are .txt and .jsonl"),
    (["--save", "--model", "demo-base"], "--save cannot write into --model demo-base"),
    (["--save", "--model", "someone/some-model"], "--save needs a local checkpoint, and --model someone/some-model"),
    (["--save", "--model", "."], "--save needs a local checkpoint, and --model . is no folder that holds one"),
]


@pytest.mark.parametrize(("more", "message"), MISTAKES)
def test_mistakes_are_named_before_a_model_is_loaded(
    untrained: Path, prompts: Path, tmp_path: Path, run: Runner, no_model: None, more: list[Any], message: str
) -> None:
    run.monkeypatch.chdir(tmp_path)
    assert run.status(*arguments(untrained, prompts, Path("exits"), *more)) == 2
    error = last_line(run.capsys.readouterr().err)
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "exits").exists()


def test_a_checkpoint_that_cannot_be_written_is_refused(
    model: Path, prompts: Path, tmp_path: Path, run: Runner, no_model: None
) -> None:
    run.monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert run.status(*arguments(model, prompts, tmp_path / "exits", "--save")) == 2
    assert f"--save cannot write into {model}, the folder of --model {model}" in last_line(run.capsys.readouterr().err)


def test_the_demo_in_a_checkout_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DIFFERENCE).mkdir(parents=True)
    (tmp_path / DIFFERENCE / "adapter_config.json").write_text("{}")
    assert writable_checkpoint("demo", tmp_path) == tmp_path / DIFFERENCE
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ValueError, match="--save cannot write into"):
        writable_checkpoint("demo", tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "line 2 of {file} cannot be read as JSON text"),
        ('{"answer": "w1"}', "line 2 of {file} has answer, but neither prompt"),
        ('{"prompt": "w1", "category": 3}', "line 2 of {file}: category is not a string"),
        ('{"prompt": ""}', "line 2 of {file}: prompt holds nothing to answer"),
    ],
)
def test_a_bad_prompt_is_named_by_file_and_line(
    untrained: Path, tmp_path: Path, run: Runner, no_model: None, line: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "w1"}}\n{line}\n')
    assert run.status(*arguments(untrained, file, tmp_path / "exits")) == 2
    assert message.format(file=file) in last_line(run.capsys.readouterr().err)
    assert not (tmp_path / "exits").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--exit-layers", "0"], "exit_layer=0 is out of range"),
        (["--exit-layers", "2,4"], "exit_layer=4 is out of range"),
        (["--exit-layers", "two"], "--exit-layers 'two' is not a list of numbers"),
        (["--draft-vocab-size", 20], "draft_vocab_size=20 is out of range"),
        (["--dtype", "int8"], "dtype='int8' is unknown"),
        (["--device", "abacus"], "device='abacus' is not available"),
    ],
)
def test_what_does_not_fit_the_model_is_named_before_anything_is_made(
    untrained: Path, prompts: Path, tmp_path: Path, run: Runner, more: list[Any], message: str
) -> None:
    assert run.status(*arguments(untrained, prompts, tmp_path / "exits", *more)) == 2
    assert message in last_line(run.capsys.readouterr().err)
    assert not (tmp_path / "exits").exists()


def test_a_model_of_one_layer_is_refused(tmp_path: Path, prompts: Path, run: Runner) -> None:
    save_model(tmp_path / "model")
    kit.truncated(kit.mixed(), 1).save_pretrained(tmp_path / "model")
    assert run.status(*arguments(tmp_path / "model", prompts, tmp_path / "exits")) == 2
    assert "the model has a single layer, which cannot draft for itself" in run.capsys.readouterr().err


def test_a_missing_matplotlib_says_what_to_install(
    untrained: Path, prompts: Path, tmp_path: Path, run: Runner, no_model: None
) -> None:
    run.monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run.status(*arguments(untrained, prompts, tmp_path / "exits")) == 2
    assert 'pip install "layerskip[plot]"' in last_line(run.capsys.readouterr().err)


def test_a_prompt_that_is_too_long_leaves_no_comparison_behind(tmp_path: Path, run: Runner) -> None:
    """So that the same command works once the prompt is shortened."""
    save_model(tmp_path / "model")
    kit.build(kit.gpt2_config(n_positions=16, eos_token_id=EOS)).save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1\nw1 w2 w3 w4 w5 w6\n")
    assert run.status(*arguments(tmp_path / "model", prompts, tmp_path / "exits")) == 2
    assert "16" in last_line(run.capsys.readouterr().err)
    assert not (tmp_path / "exits").exists()


def test_a_folder_of_something_else_is_refused(untrained: Path, prompts: Path, tmp_path: Path, run: Runner) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    assert run.status(*arguments(untrained, prompts, tmp_path, "--resume")) == 2
    assert "is not empty and holds no comparison" in last_line(run.capsys.readouterr().err)
