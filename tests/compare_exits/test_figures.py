"""compare_exits.py, run as a user runs it: its figures, tables, files and pictures."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import runpy
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import kit
from tests.compare_exits.compare_kit import FILES, PICTURES, PROGRAM, SHORT, arguments, edit, written
from tests.comparison.test_compare import (
    CATEGORIES,
    EXITS,
    PROMPTS,
)
from tests.test_evaluate import PROGRAMS, TEMPLATE, Runner, own_tokens


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


@cache
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
    known(*arguments(untrained, prompts, tmp_path / "exits", "--rows", 3, *SHORT))
    found = written(tmp_path / "exits" / "exits.json")
    assert (found["answered"], list(found["quality"])) == (3, ["all", "a", "b"])


def test_exits_are_those_that_were_trained_unless_told_otherwise(
    model: Path, prompts: Path, tmp_path: Path, known: Runner
) -> None:
    edit(model, layerskip={"format": 1, "exit_layers": [3, 1]})
    compared = {}
    for wanted in (None, "2", "all"):
        more = [] if wanted is None else ["--exit-layers", wanted]
        known(*arguments(model, prompts, tmp_path / str(wanted), *SHORT, *more))
        compared[wanted] = written(tmp_path / str(wanted) / "exits.json")["exit_layers"]
    assert compared == {None: [1, 3], "2": [2], "all": [1, 2, 3]}


def test_strings_go_through_the_chat_template(model: Path, prompts: Path, tmp_path: Path, known: Runner) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE)
    known(*arguments(model, prompts, tmp_path / "exits", *SHORT))
    rows = [json.loads(line) for line in (tmp_path / "exits" / "answers.jsonl").read_text().splitlines()]
    assert {row["index"]: row["prompt_ids"] for row in rows}[0] == [7, 44, 3, 8]
