"""The files of a comparison are whole and say how far it is; its tables show what was found."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from layerskip.comparison import plots
from layerskip.comparison.exit_comparison import CSV_HEADER, ExitComparison
from layerskip.comparison.exit_report import categories_table, draw, exits_table, measured_table, write_report
from layerskip.comparison.plots import MAX_TOKENS
from tests.comparison.test_exit_comparison import ANSWERS, FOUND, read, real

MEASURED = real({(1, 2): [0.5, 0.25, 2.0], (2, 1): [2.0, 1.5, 2.0]})
STAGES = {
    "nothing": replace(FOUND, answers={}, costs=None),
    "answers": replace(FOUND, costs=None),
    "costs": FOUND,
    "runs": MEASURED,
}
every_stage = pytest.mark.parametrize("found", STAGES.values(), ids=list(STAGES))


def recommended(found: ExitComparison) -> Any:
    return found.recommendation(True) if found.measured else None


def drawn(folder: Path, found: ExitComparison) -> list[str]:
    return [path.name for path in draw(folder, found, recommended(found), str)]


@every_stage
def test_the_files_are_whole_at_every_stage(tmp_path: Path, found: ExitComparison) -> None:
    write_report(tmp_path, found, recommended(found), {"model": "mine"})
    stored = json.loads((tmp_path / "exits.json").read_text(encoding="utf-8"))
    assert (stored["complete"], stored["model"]) == (bool(found.measured), "mine")
    assert stored["recommendation"] == (vars(recommended(found)) if found.measured else None)
    with (tmp_path / "exits.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == list(CSV_HEADER)
    wanted = [["" if value is None else str(value) for value in row] for row in found.csv_rows()]
    assert rows == wanted
    assert sorted(file.name for file in tmp_path.iterdir()) == ["exits.csv", "exits.json"]


def test_a_report_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    write_report(tmp_path, MEASURED, recommended(MEASURED), {})
    write_report(tmp_path, STAGES["nothing"], None, {})
    assert json.loads((tmp_path / "exits.json").read_text())["answered"] == 0
    assert (tmp_path / "exits.csv").read_text().splitlines() == [",".join(CSV_HEADER)]


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("nothing", []),
        ("runs", ["quality.png", "decided.png", "tokens.png", "heatmap.png", "predicted.png"]),
    ],
)
def test_what_there_is_data_for_is_drawn(tmp_path: Path, stage: str, names: list[str]) -> None:
    assert drawn(tmp_path, STAGES[stage]) == names
    for name in names:
        with Image.open(tmp_path / name) as picture:
            picture.verify()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)


def test_a_category_of_answers_without_drafts_can_be_drawn(tmp_path: Path) -> None:
    """Every answer of a category may end with its first token."""
    found = replace(FOUND, categories=("chat", "code", "empty"), answers={**ANSWERS, 2: read(2, [], [], [])})
    assert "decided.png" in drawn(tmp_path, found)


def test_the_beginning_of_a_long_answer_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "write_figure", lambda figure, path: None)
    long = list(range(10, 12 + MAX_TOKENS))
    found = replace(FOUND, answers={0: read(0, [], [], []), 1: read(1, long, long, long)})
    decoded: list[int] = []
    draw(tmp_path, replace(found, costs=None), None, lambda token: decoded.append(token) or str(token))
    assert sorted(decoded) == long[:MAX_TOKENS]


def test_the_table_of_exits_has_their_quality_and_best_prediction() -> None:
    header, _, *lines = [line.split() for line in exits_table(FOUND).splitlines()]
    assert header[:5] == ["exit_layer", "perplexity", "agreement", "expected_acceptance", "decided_by_then"]
    assert lines[0] == ["1", "2.00", "0.500", "0.500", "0.250", "0.25", "1", "1.33", "1.00"]
    assert lines[1] == ["2", "2.00", "0.750", "0.500", "0.750", "0.50", "1", "1.33", "1.00"]
    assert lines[2] == ["3", "(last)", "2.00", "1.000", "1.000", "1.000", "–", "–", "–", "–"]


def test_before_costs_the_table_of_exits_has_their_quality_alone() -> None:
    header, _, first, *_ = [line.split() for line in exits_table(STAGES["answers"]).splitlines()]
    assert header[-1] == "decided_by_then"
    assert first == ["1", "2.00", "0.500", "0.500", "0.250"]


def test_the_table_of_categories_has_the_agreement_of_every_exit() -> None:
    lines = [line.split() for line in categories_table(FOUND).splitlines()[2:]]
    assert lines == [["chat", "3", "0.667", "0.667"], ["code", "1", "0.000", "1.000"]]


def test_without_categories_there_is_no_table_of_them() -> None:
    assert categories_table(replace(FOUND, categories=(None, None))) == ""


def test_the_table_of_real_runs_has_them_beside_their_predictions() -> None:
    *rows, legend = measured_table(MEASURED).splitlines()[2:]
    first, second = [line.split() for line in rows]
    assert first == ["1", "2", "1.50", "2.00", "1.00", "0.50", "0.25–2.00", "+100%", "1", "of", "1"]
    assert second[5:7] == ["2.00", "1.50–2.00"]
    assert "on the 1 answers that were run" in legend
