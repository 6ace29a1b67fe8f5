"""inference/measure_scaling.py, run as a user runs it, on a tiny saved model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from layerskip.comparison import scaling
from layerskip.decoding.cost import CostTable
from tests import kit
from tests.test_evaluate import Runner, run, save_model

__all__ = ["run"]
PROGRAM = "measure_scaling.py"
FILES = ["scaling.csv", "scaling.json", "scaling.png"]
SMALL = ["--contexts", "16,4", "--batch-sizes", "3,1", "--max-num-draft-tokens", 2, "--cost-repeats", 1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that recommends exit 2."""
    entry = {"format": 1, "exit_layer": 2, "num_draft_tokens": 3}
    return save_model(tmp_path_factory.mktemp("checkpoint"), layerskip=entry)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that recommends no exit."""
    return save_model(tmp_path_factory.mktemp("silent"))


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model may be loaded."""

    def unexpected(*arguments: Any, **options: Any) -> None:
        raise AssertionError("no model may be loaded")

    monkeypatch.setattr("layerskip.decoding.load.load", unexpected)


def stored(folder: Path) -> Any:
    return json.loads((folder / "scaling.json").read_text(encoding="utf-8"))


def last_line(run: Runner) -> str:
    return run.capsys.readouterr().err.rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]


def test_every_context_and_batch_size_is_measured_at_the_recommended_exit(
    checkpoint: str, tmp_path: Path, run: Runner
) -> None:
    folder = tmp_path / "runs" / "scaling"
    options = ["--output-dir", folder, *SMALL, "--acceptance", "0.9,0.5", "--cache-bytes"]
    found, shown = run(PROGRAM, "--model", checkpoint, *options)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    written = stored(folder)
    assert written["complete"] is True
    places = [(each["context"], each["rows"], each["exit_layer"], each["acceptance"]) for each in written["points"]]
    assert places == [(context, rows, 2, rate) for context in (4, 16) for rows in (1, 3) for rate in (0.5, 0.9)]
    tables = [CostTable.read(table, "scaling.json") for table in written["cost_tables"]]
    assert [(table.measured_on["context"], table.rows) for table in tables] == [(4, 1), (4, 3), (16, 1), (16, 3)]
    for each, table in zip(written["points"][::2], tables, strict=True):
        assert each["autoregressive_seconds"] == table.autoregressive_step / table.rows
        costs = {drafts: table.round_seconds(2, drafts) / expected for drafts, expected in ((1, 1.5), (2, 1.75))}
        assert each["self_speculative_seconds"] == pytest.approx(min(costs.values()) / table.rows)
        assert each["num_draft_tokens"] == min(costs, key=lambda drafts: costs[drafts])
        assert each["chosen_num_draft_tokens"] == (each["num_draft_tokens"] if each["speed_up"] > 1 else 0)
    # Keys and values of 2 heads of size 8 in fp32.
    slot = kit.NUM_LAYERS * 2 * 2 * 8 * 4
    sizes = {"context": 16, "shared": 17 * slot, "dynamic": 16 * slot, "num_layers": 4, "sliding_layers": 0}
    assert written["cache_bytes"] == sizes
    assert {"processor", "threads", "device", "dtype", "versions"} < set(written)
    assert written["settings"]["model"] == checkpoint
    assert found["output_dir"] == str(folder)
    assert [(each["acceptance"], each["context"]) for each in found["limits"]] == [
        (0.5, 4), (0.5, 16), (0.9, 4), (0.9, 16),
    ]  # fmt: skip
    assert "one row of 16 tokens" in shown
    assert sum(line.split()[:2] == ["16", "3"] for line in shown.splitlines()) == 2


def test_prompts_fill_the_contexts_and_exits_can_be_given(
    silent: str, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w44 w3\nw9\n", encoding="utf-8")
    asked = []
    measure = scaling.measure_costs

    def noted(engine: Any, exits: Any, drafts: int, context: list[int], *more: Any, **options: Any) -> CostTable:
        asked.append((exits, context))
        return measure(engine, exits, drafts, context, *more, **options)

    monkeypatch.setattr(scaling, "measure_costs", noted)
    options = ["--contexts", "5", "--batch-sizes", "1", "--exit-layers", "3,1", "--prompts", prompts]
    options += ["--max-num-draft-tokens", 1, "--cost-repeats", 1]
    run(PROGRAM, "--model", silent, "--output-dir", tmp_path / "out", *options)
    assert asked == [([1, 3], [44, 3, 9, 44, 3])]
    assert stored(tmp_path / "out")["cache_bytes"] is None


def test_an_interrupted_measurement_keeps_what_it_has(
    checkpoint: str, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = scaling.measure_costs
    ends: Iterator[bool] = iter([False, True])

    def interrupted(*arguments: Any, **options: Any) -> CostTable:
        if next(ends):
            raise KeyboardInterrupt
        return measure(*arguments, **options)

    monkeypatch.setattr(scaling, "measure_costs", interrupted)
    assert run.status(PROGRAM, "--model", checkpoint, "--output-dir", tmp_path / "out", *SMALL) == 130
    assert last_line(run) == f"interrupted; {tmp_path / 'out'} keeps what is done"
    found = stored(tmp_path / "out")
    assert (found["complete"], len(found["cost_tables"])) == (False, 1)
    assert {(each["context"], each["rows"]) for each in found["points"]} == {(4, 1)}
    width, height = struct.unpack(">II", (tmp_path / "out" / "scaling.png").read_bytes()[16:24])
    assert min(width, height) > 300


MISTAKES = [
    (["--contexts", "0,4"], "--contexts 0,4 has 0, which is out of range; allowed are integers from 1 on"),
    (
        ["--contexts", "1,4", "--cache-bytes"],
        "--contexts 1,4 has 1, which is out of range; allowed are integers from 2",
    ),
    (["--contexts", "4,x"], "--contexts '4,x' is not a list of numbers"),
    (["--batch-sizes", "0"], "--batch-sizes 0 has 0, which is out of range"),
    (["--acceptance", "1.5"], "--acceptance 1.5 is out of range; allowed are rates from 0 to 1"),
    (["--acceptance", "nan"], "--acceptance nan is out of range"),
    (["--acceptance", "high"], "--acceptance 'high' is not a list of rates"),
    (["--exit-layers", "x"], "--exit-layers 'x' is not a list of numbers"),
    (["--max-num-draft-tokens", 0], "--max-num-draft-tokens 0 is out of range"),
    (["--cost-repeats", 0], "--cost-repeats 0 is out of range"),
    (["--prompts", "missing.txt"], "missing.txt"),
]


@pytest.mark.parametrize(("more", "message"), MISTAKES)
def test_mistakes_are_named_before_a_model_is_loaded(
    checkpoint: str, tmp_path: Path, run: Runner, no_model: None, more: list[Any], message: str
) -> None:
    run.monkeypatch.chdir(tmp_path)
    assert run.status(PROGRAM, "--model", checkpoint, "--output-dir", "out", *more) == 2
    error = last_line(run)
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_and_a_file_are_refused(
    checkpoint: str, tmp_path: Path, run: Runner, no_model: None
) -> None:
    (tmp_path / "scaling.json").write_text("{}", encoding="utf-8")
    assert run.status(PROGRAM, "--model", checkpoint, "--output-dir", tmp_path) == 2
    assert f"--output-dir {tmp_path} is not empty; choose another folder" in last_line(run)
    assert run.status(PROGRAM, "--model", checkpoint, "--output-dir", tmp_path / "scaling.json") == 2
    assert "is a file; choose another folder" in last_line(run)
    assert (tmp_path / "scaling.json").read_text(encoding="utf-8") == "{}"


def test_what_the_model_lacks_is_named_before_anything_is_measured(
    checkpoint: str, silent: str, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = tmp_path / "gpt2"
    kit.build(kit.gpt2_config()).save_pretrained(learned)
    monkeypatch.setattr(scaling, "measure_costs", lambda *arguments, **options: pytest.fail("measured"))
    for model, more, message in [
        (silent, [], "the checkpoint recommends no exit; pass --exit-layers"),
        (checkpoint, ["--exit-layers", "4"], "exit_layer=4 is out of range"),
        (learned, ["--exit-layers", "2", "--contexts", "8,60"], "is too long for this model; pass shorter ones"),
    ]:
        assert run.status(PROGRAM, "--model", model, "--output-dir", tmp_path / "out", *more) == 2
        assert message in last_line(run)
        assert not (tmp_path / "out").exists()
