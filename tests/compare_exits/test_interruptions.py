"""compare_exits.py that is interrupted, killed, and gone on with."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layerskip.files import whole_lines
from tests.compare_exits.compare_kit import SHORT, arguments, last_line, written
from tests.comparison.test_compare import (
    interrupt_answering,
    interrupt_costs,
    interrupt_runs,
)
from tests.test_evaluate import PROGRAMS, Runner


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
    command = arguments(model, prompts, tmp_path / "exits", "--save", *SHORT)
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
    prompts.write_text("".join(f"w{first} w{first + 40}\n" for first in range(16)))
    output = tmp_path / "exits"
    program, *options = arguments(untrained, prompts, output, *SHORT, "--run-cells", 1)
    process = subprocess.Popen(
        [sys.executable, PROGRAMS / program, *map(str, options)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    answers = output / "answers.jsonl"
    deadline = time.monotonic() + 300
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
    assert sorted(indices) == list(range(16))


def test_a_finished_comparison_is_reported_again(untrained: Path, prompts: Path, tmp_path: Path, known: Runner) -> None:
    command = arguments(untrained, prompts, tmp_path / "exits", *SHORT)
    closing, shown = known(*command)
    assert known.status(*command) == 2
    assert "go on with it by --resume" in last_line(known.capsys.readouterr().err)
    again, shown_again = known(*command, "--resume")
    assert again == closing
    # Only the table before them is of more, since costs are known from the beginning.
    assert shown_again.endswith(shown[shown.index("agreement  tokens") :])
