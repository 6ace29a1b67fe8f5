"""compare_exits.py, run as a user runs it, on tiny saved models: its figures, files and advice, Ctrl-C and --save."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

import layerskip
from layerskip.comparison import compare
from layerskip.decoding.plan import Wishes
from layerskip.files import whole_lines
from layerskip.model.draft_head import write_draft_token_ids
from layerskip.program import DIFFERENCE, writable_checkpoint
from tests import kit
from tests.comparison.test_compare import (
    CATEGORIES,
    COSTS,
    EXITS,
    PROMPTS,
    interrupt_answering,
    interrupt_costs,
    interrupt_runs,
    know_times,
)
from tests.test_evaluate import BUDGET, EOS, PROGRAMS, TEMPLATE, Runner, own_tokens, save_model

PROGRAM = "compare_exits.py"
FILES = ["answers.jsonl", "costs.json", "exits.csv", "exits.json", "settings.json", "timings.jsonl"]
PICTURES = ["decided.png", "heatmap.png", "predicted.png", "quality.png", "tokens.png"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, run: Runner) -> Runner:
    """Runs the program with costs that are known, real runs that are as fast as plain decoding, and no pictures."""
    know_times(monkeypatch)
    monkeypatch.setattr(compare, "draw", lambda *arguments: [])
    return run


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MIX, whose checkpoint says nothing about exits."""
    folder = tmp_path_factory.mktemp("untrained")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": prompt, "category": category} for prompt, category in zip(PROMPTS, CATEGORIES, strict=True)]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def model(untrained: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, that can be written into."""
    return shutil.copytree(untrained, tmp_path / "model")


def edit(folder: Path, **entries: Any) -> Path:
    """Changes entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return folder


def arguments(model: Path | str, prompts: Path, output: Path, *more: Any) -> list[Any]:
    """A comparison of few cells, each run for real on two prompts and twice."""
    options = ["--max-new-tokens", BUDGET, "--max-num-draft-tokens", 3, "--batch-size", 2]
    options += ["--run-cells", 2, "--run-rows", 2, "--repeats", 3, "--cost-repeats", 1]
    return [PROGRAM, "--model", model, "--prompts", prompts, "--output-dir", output, *options, *more]


def written(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def last_line(error: str) -> str:
    return error.rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]


# Figures and files


@dataclass(frozen=True)
class Done:
    """A whole comparison with measured times: its folder, what exits.json holds, and what was printed."""

    output: Path
    found: dict[str, Any]
    shown: str
    error: str


@pytest.fixture(scope="module")
def done(untrained: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    output = tmp_path_factory.mktemp("done") / "exits"
    shown, error = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(error),
    ):
        patch.setattr(sys, "argv", list(map(str, arguments(untrained, prompts, output))))
        runpy.run_path(str(PROGRAMS / PROGRAM), run_name="__main__")
    return Done(output, written(output / "exits.json"), shown.getvalue(), error.getvalue())


def own_readings() -> list[list[torch.Tensor]]:
    """For each of MIX's answers logits behind all its tokens but the last: of its first 1, 2, 3 layers, and all."""
    models = [kit.truncated(kit.mixed(), layers) for layers in EXITS] + [kit.mixed()]
    readings = []
    for prompt in PROMPTS:
        ids = [int(word[1:]) for word in prompt.split()]
        tokens = own_tokens(prompt)
        with torch.no_grad():
            readings.append([model(torch.tensor([ids + tokens])).logits[0, len(ids) : -1] for model in models])
    return readings


def test_quality_is_what_models_of_fewer_layers_make_of_the_answers(done: Done) -> None:
    follow = torch.tensor([token for prompt in PROMPTS for token in own_tokens(prompt)[1:]])
    logits = [torch.cat(each) for each in zip(*own_readings(), strict=True)]
    for each, mine in zip(done.found["quality"]["all"], logits, strict=True):
        assert each["tokens"] == len(follow)
        assert each["agreement"] == float((mine.argmax(-1) == follow).double().mean())
        loss = float(torch.nn.functional.cross_entropy(mine, follow))
        assert each["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        overlap = torch.minimum(mine.softmax(-1), logits[-1].softmax(-1)).sum(-1).mean()
        assert each["expected_acceptance"] == pytest.approx(float(overlap), rel=1e-4)


def test_a_category_has_the_tokens_of_its_answers(done: Done) -> None:
    tokens: Counter[str | None] = Counter()
    for prompt, category in zip(PROMPTS, CATEGORIES, strict=True):
        tokens[category] += len(own_tokens(prompt)) - 1
    found = {name: exits[0]["tokens"] for name, exits in done.found["quality"].items()}
    assert found == {"all": tokens.total(), "a": tokens["a"], "b": tokens["b"]}


def test_tokens_are_decided_where_models_of_more_layers_choose_the_same(done: Done) -> None:
    decided: Counter[int] = Counter()
    for logits in own_readings():
        for column in torch.stack(logits).argmax(-1).T.tolist():
            decided[max((layer + 1 for layer in EXITS if column[layer - 1] != column[-1]), default=1)] += 1
    assert done.found["decided"]["all"] == {str(layer): decided[layer] for layer in (*EXITS, kit.NUM_LAYERS)}


def test_real_runs_are_as_they_were_replayed(done: Done) -> None:
    assert len(done.found["measured"]) == 2
    for each in done.found["measured"]:
        assert each["tokens_per_round"] == each["cell"]["tokens_per_round"]
        assert (each["same_as_plain"], each["answers"]) == (2, 2)
        assert each["lowest"] <= each["measured"] <= each["highest"]


def test_a_cell_has_a_row_in_the_csv(done: Done) -> None:
    def place(row: Mapping[str, Any]) -> tuple[int, int]:
        return int(row["exit_layer"]), int(row["num_draft_tokens"])

    with (done.output / "exits.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [place(row) for row in rows] == [(exit_layer, drafts) for exit_layer in EXITS for drafts in (1, 2, 3)]
    for row, cell in zip(rows, done.found["cells"], strict=True):
        assert [float(row[name]) for name in ("tokens_per_round", "predicted")] == [
            cell[name] for name in ("tokens_per_round", "predicted")
        ]
    real = [place(each["cell"]) for each in done.found["measured"]]
    assert [place(row) for row in rows if row["measured"]] == real


def test_the_files_are_there_and_the_pictures_can_be_opened(done: Done) -> None:
    assert sorted(file.name for file in done.output.iterdir()) == sorted(FILES + PICTURES)
    for name in PICTURES:
        with Image.open(done.output / name) as picture:
            picture.verify()


def test_the_last_line_is_the_recommendation_of_exits_json(done: Done) -> None:
    assert done.found["complete"] is True
    closing = json.loads(done.shown.splitlines()[-1])
    assert closing == {"output_dir": str(done.output), **done.found["recommendation"]}


@pytest.mark.parametrize("header", ["exit_layer  perplexity", "agreement  tokens", "E  γ  tokens_per_round"])
def test_tables_are_printed(done: Done, header: str) -> None:
    assert header in done.shown


@pytest.mark.parametrize("bar", ["answering: 100%", "measuring costs: 100%", "measuring: 100%"])
def test_bars_show_the_progress(done: Done, bar: str) -> None:
    assert bar in done.error


def test_prompts_are_chosen_from_all_categories(untrained: Path, prompts: Path, tmp_path: Path, known: Runner) -> None:
    known(*arguments(untrained, prompts, tmp_path / "exits", "--rows", 3))
    found = written(tmp_path / "exits" / "exits.json")
    assert (found["answered"], list(found["quality"])) == (3, ["all", "a", "b"])


def test_exits_are_those_that_were_trained_unless_told_otherwise(
    model: Path, prompts: Path, tmp_path: Path, known: Runner
) -> None:
    edit(model, layerskip={"format": 1, "exit_layers": [3, 1]})
    compared = {}
    for wanted in (None, "2", "all"):
        more = [] if wanted is None else ["--exit-layers", wanted]
        known(*arguments(model, prompts, tmp_path / str(wanted), *more))
        compared[wanted] = written(tmp_path / str(wanted) / "exits.json")["exit_layers"]
    assert compared == {None: [1, 3], "2": [2], "all": [1, 2, 3]}


def test_strings_go_through_the_chat_template(model: Path, prompts: Path, tmp_path: Path, known: Runner) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    known(*arguments(model, prompts, tmp_path / "exits"))
    rows = [json.loads(line) for line in (tmp_path / "exits" / "answers.jsonl").read_text().splitlines()]
    assert {row["index"]: row["prompt_ids"] for row in rows}[0] == [7, 44, 3, 8]


# The recommendation, and --save


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
    assert engine.cost_table == COSTS


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
    closing, shown = known(*arguments(model, prompts, tmp_path / "exits", "--exit-layers", 1, "--save"))
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
    known(*arguments(model, prompts, tmp_path / "exits", "--save"))
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
    _, shown = known(*arguments(model, prompts, tmp_path / "exits"))
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
    known(*arguments(model, prompts, tmp_path / "exits", "--exit-layers", 1, "--save", *more))
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


# Ctrl-C, and worse


@pytest.mark.parametrize(
    ("interrupt", "answered", "costs"),
    [(interrupt_answering, 2, False), (interrupt_costs, 5, False), (interrupt_runs, 5, True)],
    ids=["answering", "costs", "runs"],
)
def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(
    model: Path,
    prompts: Path,
    tmp_path: Path,
    known: Runner,
    interrupt: Callable[[pytest.MonkeyPatch], None],
    answered: int,
    costs: bool,
) -> None:
    before = (model / "config.json").read_bytes()
    command = arguments(model, prompts, tmp_path / "exits", "--save")
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch)
        assert known.status(*command) == 130
    assert "keeps what is done, and --resume goes on" in known.capsys.readouterr().err
    assert (model / "config.json").read_bytes() == before
    found = written(tmp_path / "exits" / "exits.json")
    assert (found["complete"], found["answered"], found["recommendation"]) == (False, answered, None)
    assert (found["cost_table"] is not None) == costs
    with (tmp_path / "exits" / "exits.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == (9 if costs else 3)
    known(*command, "--resume")
    assert written(tmp_path / "exits" / "exits.json")["complete"] is True
    assert "exit_layer" in written(model / "config.json")["layerskip"]


def test_a_run_that_is_killed_goes_on(untrained: Path, tmp_path: Path, known: Runner) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"w{first} w{first + 40}\n" for first in range(40)))
    output = tmp_path / "exits"
    program, *options = arguments(untrained, prompts, output, "--run-rows", 1)
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / program, *map(str, options)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    answers = output / "answers.jsonl"
    deadline = time.monotonic() + 60
    while not answers.is_file() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = whole_lines(answers)
    with answers.open("ab") as file:
        # As of a write that was cut short.
        file.write(b'{"index": 1, "prompt_')
    known(program, *options, "--resume")
    assert answers.read_bytes().startswith(kept)
    indices = [json.loads(line)["index"] for line in answers.read_text(encoding="utf-8").splitlines()]
    assert sorted(indices) == list(range(40))


def test_a_finished_comparison_is_reported_again(untrained: Path, prompts: Path, tmp_path: Path, known: Runner) -> None:
    command = arguments(untrained, prompts, tmp_path / "exits")
    closing, shown = known(*command)
    assert known.status(*command) == 2
    assert "go on with it by --resume" in last_line(known.capsys.readouterr().err)
    again, shown_again = known(*command, "--resume")
    assert again == closing
    # Only the table before them is of more, since costs are known from the beginning.
    assert shown_again.endswith(shown[shown.index("agreement  tokens") :])


# Mistakes


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model may be loaded."""

    def unexpected(*arguments: Any, **options: Any) -> None:
        raise AssertionError("no model may be loaded")

    monkeypatch.setattr("layerskip.decoding.engine.load", unexpected)


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
