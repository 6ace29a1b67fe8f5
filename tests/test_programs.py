"""The command-line programs, run as a user runs them, on a tiny saved model."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from layerskip.prompt_file import read_lines
from tests import kit

PROGRAMS = Path(__file__).parent.parent / "inference"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with MIX and a tokenizer of words."""
    folder = tmp_path_factory.mktemp("checkpoint")
    kit.mixed().save_pretrained(folder)
    kit.word_tokenizer(kit.VOCAB).save_pretrained(folder)
    return str(folder)


def run(monkeypatch: pytest.MonkeyPatch, program: str, *arguments: str) -> int:
    """Runs a program of inference/ in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    try:
        runpy.run_path(str(PROGRAMS / program), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_generate_prints_the_text(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", checkpoint, "--exit-layer", "2", "--max-new-tokens", "8"]
    assert run(monkeypatch, "generate.py", *options, "--prompt", "w1 w5 w9") == 0
    expected = kit.without_cache(kit.mixed(), [1, 5, 9], 8)
    assert capsys.readouterr().out.split() == [f"w{token}" for token in expected]


def test_generate_writes_a_json_line_for_every_prompt_of_a_file(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w1 w5 w9\n\nw44 w3\n", encoding="utf-8")
    options = ["--model", checkpoint, "--exit-layer", "2", "--num-draft-tokens", "3", "--max-new-tokens", "8"]
    assert run(monkeypatch, "generate.py", *options, "--prompts", str(prompts), "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["w1 w5 w9", "w44 w3"]
    assert answers[0]["token_ids"] == kit.without_cache(kit.mixed(), [1, 5, 9], 8)
    assert answers[1]["statistics"]["num_draft_tokens"] == 3
    assert answers[0]["finish_reason"] == "length"


MISTAKES = [
    ("generate.py", ["--prompt", "w1"], "inference/compare_exits.py"),
    ("generate.py", ["--prompt", "w1", "--exit-layer", "4"], "exit_layer=4 is out of range"),
    ("generate.py", ["--prompt", "", "--exit-layer", "2"], "prompts[0] is empty"),
    ("generate.py", ["--prompt", "w1", "--exit-layer", "2", "--chat"], "--chat needs a chat template"),
    ("generate.py", ["--prompts", "nothing.txt", "--exit-layer", "2"], "nothing.txt"),
    ("generate.py", ["--prompt", "w1", "--strategy", "fast"], "strategy='fast' is unknown"),
    ("generate.py", ["--prompt", "w1", "--dtype", "int4"], "dtype='int4' is unknown"),
    ("demo.py", ["--exit-layer", "9"], "exit_layer=9 is out of range"),
    ("benchmark.py", ["--exit-layers", "1,x"], "--exit-layers '1,x'"),
    ("benchmark.py", ["--exit-layers", "9"], "exit_layer=9 is out of range"),
    ("benchmark.py", ["--exit-layers", "2", "--repeats", "0"], "repeats=0"),
    ("benchmark.py", ["--exit-layers", "2", "--max-new-tokens", "1"], "max_new_tokens=1"),
]


@pytest.mark.parametrize(("program", "arguments", "message"), MISTAKES)
def test_mistakes_end_a_program_with_one_line(
    checkpoint: str,
    program: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, program, "--model", checkpoint, *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("error: ")


def test_demo_answers_every_prompt_and_compares(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo.py", "--model", checkpoint, "--max-new-tokens", "12") == 0
    shown = capsys.readouterr().out
    assert "Using 3." in shown
    assert "[4/4]" in shown
    table = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("auto", "self_"))}
    assert table["self_speculative"][1:3] == ["3", "4"]
    assert float(table["autoregressive"][5]) == 1.0
    assert float(table["self_speculative"][5]) > 1.0
    assert "Identical tokens: 4 of 4 prompts." in shown


def test_benchmark_prints_a_table_and_ends_with_json(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--exit-layers", "1,2", "--num-draft-tokens", "3", "--max-new-tokens", "8", "--repeats", "2"]
    assert run(monkeypatch, "benchmark.py", "--model", checkpoint, *options, "--hf-early-exit") == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    arms = [(arm["name"], arm["exit_layer"]) for arm in summary["arms"]]
    speculative = [("self_speculative", 1), ("self_speculative", 2), ("hf_early_exit", 1), ("hf_early_exit", 2)]
    assert arms == [("autoregressive", None), ("hf_generate", None), *speculative]
    assert summary["arms"][0]["ratio"] == 1.0
    assert all(arm["same_as_first"] == 4 for arm in summary["arms"])
    plain, generate = summary["arms"][:2]
    assert plain["layer_tokens"] == generate["layer_tokens"]
    assert any(line.split()[:1] == ["hf_generate"] for line in lines)


def test_a_mark_before_the_first_prompt_of_a_file_is_dropped(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"\xef\xbb\xbfw1 w5\n")
    assert read_lines(prompts) == ["w1 w5"]


@pytest.mark.parametrize(("content", "message"), [(b"\n", "holds no prompt"), (b"\xff\xfe", "is no UTF-8 text")])
def test_bad_prompt_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    with pytest.raises(ValueError, match=f"prompts.txt {message}"):
        read_lines(prompts)


@pytest.mark.parametrize("program", ["generate.py", "demo.py", "benchmark.py"])
def test_programs_explain_themselves(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, program, "--help") == 0
    assert "--model" in capsys.readouterr().out


def test_a_reader_that_stops_early_ends_a_program_quietly(checkpoint: str) -> None:
    program = [sys.executable, str(PROGRAMS / "generate.py"), "--model", checkpoint, "--exit-layer", "2", "--json"]
    with subprocess.Popen(
        [*program, "--prompt", "w1 w5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert "error" not in running.stderr.read()


def test_a_program_runs_from_any_folder(checkpoint: str, tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "generate.py"), "--model", checkpoint, "--prompt", "w1 w5"]
    finished = subprocess.run(
        [*command, "--exit-layer", "2", "--max-new-tokens", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(finished.stdout.split()) == 4
