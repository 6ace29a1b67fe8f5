"""inference/benchmark_gpu.py, run as a user runs it, on a CPU and without compiled steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_evaluate import Runner, run

__all__ = ["run"]
PROGRAM = "benchmark_gpu.py"
TINY = ["--device", "cpu", "--shape", "tiny"]
LEVERS = [
    *("hf_generate", "static", "adaptive", "ngrams", "trusted", "adaptive+ngrams"),
    *("auto", "all", "all-trusted", "tree-16"),
]


def test_every_step_goes_into_tables_and_the_file(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No demo model is here, and none may be fetched.
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path / "empty"))
    output = tmp_path / "gpu.json"
    steps = ["--steps", "costs,eager,checkpoint,exactness", "--minutes", 1, "--output", output]
    assert run.status(PROGRAM, *TINY, *steps) == 0
    shown = run.capsys.readouterr().out
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["complete"]
    assert found["machine"]["device"] == "cpu" and found["machine"]["device_name"] is None
    assert found["settings"]["shape"] == "tiny"
    # The most valuable first, in whatever order they are named.
    assert list(found["steps"]) == ["exactness", "checkpoint", "eager", "costs"]
    exactness = found["steps"]["exactness"]
    assert list(exactness) == LEVERS
    assert all(each["status"] == "done" and each["figures"]["same"] for each in exactness.values())
    for each in found["steps"]["checkpoint"].values():
        assert (each["status"], each["figures"]) == ("left out", {})
        assert "--model demo is not on this machine" in each["reason"]
    assert {name: each["status"] for name, each in found["steps"]["eager"].items()} == {
        "autoregressive": "done",
        "hf_generate": "done",
    }
    assert found["steps"]["costs"]["costs"]["figures"]["cost_table"]["exit_layers"] == [1, 2]
    assert len(found["predicted"]["eager"]) == 2 * 3
    assert found["predicted"]["compiled"]["ratios"] == {}
    lines = shown.splitlines()
    assert lines.count("costs") == lines.count("exactness") + 1 == 2
    for begin in ("tree-16", "hf_generate", "autoregressive", "E=2", "checkpoint/levers: left out, --model demo"):
        assert any(line.startswith(begin) for line in lines), begin


def test_what_the_time_limit_leaves_out_is_not_reached(run: Runner, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    assert run.status(PROGRAM, *TINY, "--minutes", 1e-9, "--output", output) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    assert not found["complete"]
    assert list(found["steps"]) == [
        *("exactness", "exactness-compiled", "checkpoint", "checkpoint-compiled"),
        *("compiled", "eager", "costs", "hf-compiled"),
    ]
    findings = [each for step in found["steps"].values() for each in step.values()]
    assert {each["status"] for each in findings} == {"not reached"}
    assert "compiled/compiled E=2 γ=1: not reached" in run.capsys.readouterr().out


MISTAKES: list[tuple[list[Any], str]] = [
    (["--minutes", 0], "--minutes 0 is out of range"),
    (["--minutes", "nan"], "--minutes nan is out of range"),
    (["--steps", "exactness,speed"], "--steps 'speed' is unknown; allowed are exactness, exactness-compiled"),
    (["--device", "toaster"], "--device 'toaster' is no device"),
    (["--device", "meta"], "--device meta is not supported here"),
    (["--device", "cuda:64"], "--device cuda:64 needs a CUDA device"),
    (["--prompts", "missing.txt"], "missing.txt"),
    (["--output", "missing/gpu.json"], "folder that is there"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_the_program_with_one_line(
    arguments: list[Any], message: str, run: Runner, tmp_path: Path
) -> None:
    run.monkeypatch.chdir(tmp_path)
    assert run.status(PROGRAM, *TINY, "--output", "gpu.json", *arguments) == 2
    last = run.capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_one_line_says_so(run: Runner, tmp_path: Path) -> None:
    assert run.status(PROGRAM, "--output", tmp_path / "gpu.json") == 2
    assert "--device cuda needs a CUDA device, and torch finds none here" in run.capsys.readouterr().err
