"""The folder of a comparison takes up what an interrupted one has left, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layerskip.comparison.arms import RoundCounts, Run
from layerskip.comparison.benchmark import Sample
from layerskip.comparison.comparison_folder import ComparisonFolder, ReadAnswer
from layerskip.comparison.quality import Reading
from layerskip.decoding.cost import CostTable

SETTINGS = {"model": "mine", "exit_layers": (1, 2), "rows": None}
COSTS = CostTable((1, 2), (0.1, 0.2), ((1.0, 1.1), (1.0, 1.2)), 1 / 3, 0.25, 0.125, {"device": "cpu"})
ANSWERS = [
    ReadAnswer(
        index,
        [1, 2],
        [5, 6, 35],
        "stop",
        Reading([[True, False]], [[6, 7], [6, 35]], [[0.5, 1.25], [0.25, 2.0]], [[1.0, 0.75]]),
    )
    for index in (2, 0)
]
ROUNDS = RoundCounts(rounds=2, drafted=3, accepted=1, draft_tokens_processed=3, draft_seconds=0.1, verify_seconds=1 / 3)
SAMPLES = [
    Sample("autoregressive", 0, 0, Run([[5, 6]], 1, 0.5, 1 / 7)),
    Sample("self_speculative E=1 γ=2", 0, 0, Run([[5, 6]], 1, 0.5, 0.25, ROUNDS)),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a comparison that was interrupted at its end."""
    path = tmp_path / "comparison"
    folder = ComparisonFolder(path, SETTINGS, resume=False)
    folder.add_answers(ANSWERS)
    folder.write_costs(COSTS)
    for sample in SAMPLES:
        folder.add_sample(sample)
    return path


def reopen(path: Path, **changes: Any) -> ComparisonFolder:
    return ComparisonFolder(path, {**SETTINGS, **changes}, resume=True)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# Going on


def test_everything_is_read_as_it_was_written(path: Path) -> None:
    folder = reopen(path)
    assert folder.answers() == {answer.index: answer for answer in ANSWERS}
    assert folder.costs() == COSTS
    assert folder.samples() == SAMPLES


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_folder_is_made_and_holds_nothing_yet(tmp_path: Path, resume: bool) -> None:
    folder = ComparisonFolder(tmp_path / "deep" / "comparison", SETTINGS, resume=resume)
    assert (folder.answers(), folder.costs(), folder.samples()) == ({}, None, [])
    assert list(contents(folder.path)) == ["settings.json"]


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    ComparisonFolder(tmp_path, SETTINGS, resume=False)
    assert json.loads((tmp_path / "settings.json").read_text()) == {**SETTINGS, "exit_layers": [1, 2]}


def test_losses_are_kept_to_the_last_digit(tmp_path: Path) -> None:
    folder = ComparisonFolder(tmp_path, SETTINGS, resume=False)
    reading = Reading([[True]], [[6], [6]], [[0.123456789], [12345678.9]], [[1 / 3]])
    folder.add_answers([ReadAnswer(0, [1], [5, 6], "length", reading)])
    kept = folder.answers()[0].reading
    assert (kept.losses, kept.acceptances) == (reading.losses, reading.acceptances)


@pytest.mark.parametrize(
    ("name", "read", "whole"),
    [
        ("answers.jsonl", lambda folder: list(folder.answers().values()), ANSWERS),
        ("timings.jsonl", lambda folder: folder.samples(), SAMPLES),
    ],
)
def test_a_half_written_last_line_is_dropped_and_written_anew(
    path: Path, name: str, read: Callable[[ComparisonFolder], list[Any]], whole: list[Any]
) -> None:
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-7])
    folder = reopen(path)
    assert read(folder) == whole[:-1]
    if name == "answers.jsonl":
        folder.add_answers(ANSWERS[-1:])
    else:
        folder.add_sample(SAMPLES[-1])
    assert (path / name).read_bytes() == content


# Refusals


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    for resume in (False, True):
        with pytest.raises(ValueError, match="is not empty and holds no comparison; choose another folder"):
            ComparisonFolder(tmp_path, SETTINGS, resume=resume)
    assert list(contents(tmp_path)) == ["thesis.txt"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "comparison"
    path.write_text("a file")
    with pytest.raises(ValueError, match="is a file; choose another folder"):
        ComparisonFolder(path, SETTINGS, resume=True)
    assert path.read_text() == "a file"


def test_a_comparison_is_gone_on_with_only_where_that_is_asked_for(path: Path) -> None:
    before = contents(path)
    with pytest.raises(ValueError, match="go on with it by --resume"):
        ComparisonFolder(path, SETTINGS, resume=False)
    assert contents(path) == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "yours"}, r"\(model differ\)"),
        ({"rows": 3, "exit_layers": [1]}, r"\(exit_layers, rows differ\)"),
        ({"dtype": "float32"}, r"\(dtype differ\)"),
    ],
)
def test_other_settings_are_refused_by_name(path: Path, changes: dict[str, Any], named: str) -> None:
    before = contents(path)
    with pytest.raises(ValueError, match=named):
        reopen(path, **changes)
    assert contents(path) == before


@pytest.mark.parametrize("name", ["answers.jsonl", "timings.jsonl"])
@pytest.mark.parametrize(
    "line", ['{"index": 1, "arm"', "[]", "{}", '{"index": 0, "reading": 3}'], ids=["half", "list", "empty", "strange"]
)
def test_a_damaged_line_in_the_middle_is_named(path: Path, name: str, line: str) -> None:
    first, *others = (path / name).read_text(encoding="utf-8").splitlines(keepends=True)
    (path / name).write_text("".join([first, line + "\n", *others]), encoding="utf-8")
    folder = reopen(path)
    with pytest.raises(ValueError, match=f"line 2 of .*{name}"):
        folder.answers() if name == "answers.jsonl" else folder.samples()


@pytest.mark.parametrize("content", ["", "{", "[1]", "3"])
def test_damaged_settings_are_named(path: Path, content: str) -> None:
    (path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=r"settings\.json is damaged .*choose another --output-dir"):
        reopen(path)


@pytest.mark.parametrize("content", ["", "{}", "[1]", json.dumps({**COSTS.to_dict(), "head": -1.0})])
def test_damaged_costs_are_named(path: Path, content: str) -> None:
    (path / "costs.json").write_text(content)
    with pytest.raises(ValueError, match=r"costs\.json is damaged .*choose another --output-dir"):
        reopen(path).costs()
