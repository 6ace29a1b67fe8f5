"""What the tests of compare_exits.py share: how it is called, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.test_evaluate import BUDGET

PROGRAM = "compare_exits.py"
FILES = ["answers.jsonl", "costs.json", "exits.csv", "exits.json", "settings.json", "timings.jsonl"]
# For tests that look at no figures: short answers, and one prompt that is run for real.
SHORT = ["--max-new-tokens", 6, "--run-rows", 1]
PICTURES = ["decided.png", "heatmap.png", "predicted.png", "quality.png", "tokens.png"]


def edit(folder: Path, **entries: Any) -> Path:
    """Changes entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return folder


def arguments(model: Path | str, prompts: Path, output: Path, *more: Any) -> list[Any]:
    """A comparison of few cells, each run for real on two prompts, three times."""
    options = ["--max-new-tokens", BUDGET, "--max-num-draft-tokens", 3, "--batch-size", 2]
    options += ["--run-cells", 2, "--run-rows", 2, "--repeats", 3, "--cost-repeats", 1]
    return [PROGRAM, "--model", model, "--prompts", prompts, "--output-dir", output, *options, *more]


def written(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def last_line(error: str) -> str:
    return error.rstrip("\n").rpartition("\n")[2].rpartition("\r")[2]
