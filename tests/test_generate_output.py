"""generate.py --output, run as a user runs it, on a tiny saved model that ends its answers."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import layerskip
from layerskip.answer_parts import AnswerParts, Answers
from tests import kit
from tests.test_evaluate import PROGRAMS, Runner, save_model
from tests.training import workers

PROMPTS = ["w1 w5 w9", "w44 w3", "w2", "w30 w31 w32 w33 w34", "w7 w8"]
DRAWN = ["--temperature", 1.5, "--seed", 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """MIX, which ends some of the answers before the others."""
    return save_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


class Generating(Runner):
    """Runs generate.py in this process."""

    def arguments(self, model: str, prompts: Path, *more: Any) -> list[Any]:
        return ["--model", model, "--prompts", prompts, "--exit-layer", 2, "--max-new-tokens", 12, *more]

    def report(self, *arguments: Any) -> dict[str, Any]:
        """Returns the closing line of a run with --output."""
        return self("generate.py", *self.arguments(*arguments))[0]

    def printed(self, *arguments: Any) -> list[dict[str, Any]]:
        """Returns the lines of a run with --json."""
        assert self.status("generate.py", *self.arguments(*arguments, "--json")) == 0
        return [json.loads(line) for line in self.capsys.readouterr().out.splitlines()]

    def refused(self, *arguments: Any) -> str:
        """Returns the message of a run that ends with status 2."""
        assert self.status("generate.py", *self.arguments(*arguments)) == 2
        last = self.capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ")
        return last

    def interrupted(self, *arguments: Any, after: int) -> None:
        """Starts a run that ends with Ctrl-C after so many calls of the engine."""
        generate, calls = layerskip.Engine.generate, iter(range(after))

        def counted(engine: Any, *given: Any, **named: Any) -> Any:
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return generate(engine, *given, **named)

        with self.monkeypatch.context() as patch:
            patch.setattr(layerskip.Engine, "generate", counted)
            assert self.status("generate.py", *self.arguments(*arguments)) == 130


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Generating:
    return Generating(monkeypatch, capsys)


TIMES = ("seconds", "compile_seconds", "decode_tokens_per_second", "per_row")


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines without times."""
    for line in lines:
        line["statistics"] = {name: value for name, value in line["statistics"].items() if name not in TIMES}
    return lines


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]


def test_the_file_has_the_lines_of_json_in_the_order_of_the_prompts(
    run: Generating, checkpoint: str, prompts: Path, out: Path
) -> None:
    report = run.report(checkpoint, prompts, "--output", out)
    made = lines_of(out)
    assert [list(line) for line in made] == [["prompt", "text", "token_ids", "finish_reason", "statistics"]] * 5
    assert [line["prompt"] for line in made] == PROMPTS
    assert untimed(made) == untimed(run.printed(checkpoint, prompts))
    assert {line["finish_reason"] for line in made} == {"stop", "length"}
    assert report.pop("seconds") > 0 and report.pop("tokens_per_second") > 0
    tokens = sum(len(line["token_ids"]) for line in made)
    assert report == {"answers": 5, "already_there": 0, "tokens": tokens, "ranks": 1}
    assert {path.name for path in out.parent.iterdir()} == {"prompts.txt", "out.jsonl"}


def test_the_batch_size_changes_no_answer(run: Generating, checkpoint: str, prompts: Path, out: Path) -> None:
    single = run.printed(checkpoint, prompts)
    run.report(checkpoint, prompts, "--output", out, "--batch-size", 2)
    for lines in (lines_of(out), run.printed(checkpoint, prompts, "--batch-size", 3)):
        for line, alone in zip(lines, single, strict=True):
            own, wanted = line.pop("statistics"), alone["statistics"]
            assert line == {name: alone[name] for name in line}
            names = ("strategy", "exit_layer", "rounds", "drafted", "accepted", "emitted", "late_layer_tokens")
            assert [own[name] for name in names] == [wanted[name] for name in names]


def test_a_drawn_answer_would_depend_on_its_neighbours_in_a_batch() -> None:
    """Why --seed does not go with a batch size above 1."""
    engine = layerskip.Engine(kit.mixed(pad_token_id=0), kit.word_tokenizer(kit.VOCAB), exit_layer=2)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    drawn = [
        engine.generate(batch, generator=torch.Generator().manual_seed(3), **options).new_token_ids[0]
        for batch in ([PROMPTS[0]], PROMPTS[:2], PROMPTS[:2])
    ]
    assert drawn[0] != drawn[1] == drawn[2]


# Going on


def test_an_interrupted_run_goes_on_with_what_it_has(
    run: Generating, checkpoint: str, prompts: Path, out: Path, tmp_path: Path
) -> None:
    run.report(checkpoint, prompts, "--output", tmp_path / "whole.jsonl", *DRAWN)
    run.interrupted(checkpoint, prompts, "--output", out, *DRAWN, after=2)
    assert not out.exists()
    assert f"{out}.parts holds answers of an interrupted run" in run.refused(
        checkpoint, prompts, "--output", out, *DRAWN
    )
    [part] = Path(f"{out}.parts").glob("rank-*")
    kept = [json.loads(line)["answer"] for line in part.read_text(encoding="utf-8").splitlines()]
    report = run.report(checkpoint, prompts, "--output", out, "--resume", *DRAWN)
    assert (report["answers"], report["already_there"]) == (3, 2)
    made = lines_of(out)
    # Times tell that these were not made again.
    assert [answer in made for answer in kept] == [True, True]
    assert report["tokens"] == sum(len(line["token_ids"]) for line in made if line not in kept)
    assert untimed(made) == untimed(lines_of(tmp_path / "whole.jsonl"))


def test_a_run_is_not_gone_on_with_by_other_settings(
    run: Generating, checkpoint: str, prompts: Path, out: Path, tmp_path: Path
) -> None:
    run.interrupted(checkpoint, prompts, "--output", out, *DRAWN, after=1)
    before = {path.name: path.read_bytes() for path in Path(f"{out}.parts").iterdir()}
    resumed = ["--output", out, "--resume", *DRAWN]
    other_prompts = tmp_path / "other.txt"
    other_prompts.write_text("w1\n", encoding="utf-8")
    kit.mixed(seed=1, eos_token_id=35).save_pretrained(tmp_path / "other")
    kit.word_tokenizer(kit.VOCAB).save_pretrained(tmp_path / "other")
    assert "(max_new_tokens differ)" in run.refused("nowhere", prompts, *resumed, "--max-new-tokens", 11)
    assert "(seed, temperature differ)" in run.refused("nowhere", prompts, *resumed, "--seed", 4, "--temperature", 2)
    assert "(prompts differ)" in run.refused("nowhere", other_prompts, *resumed)
    assert "(model differ)" in run.refused(str(tmp_path / "other"), prompts, *resumed)
    assert {path.name: path.read_bytes() for path in Path(f"{out}.parts").iterdir()} == before


def test_a_finished_file_is_left_as_it_is(run: Generating, checkpoint: str, prompts: Path, out: Path) -> None:
    run.report(checkpoint, prompts, "--output", out)
    before = out.read_bytes(), out.stat().st_ino
    # No model is needed to see that nothing is left to do.
    report = run.report("nowhere", prompts, "--output", out, "--resume")
    assert (report["answers"], report["already_there"], report["tokens_per_second"]) == (0, 5, None)
    assert (out.read_bytes(), out.stat().st_ino) == before


# Mistakes


@pytest.mark.parametrize("prompt", [" ".join(["w1"] * 60), "w0"], ids=["too long", "refused later"])
def test_a_prompt_that_cannot_be_answered_is_named(
    run: Generating, prompt: str, tmp_path: Path, prompts: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.build(kit.gpt2_config()).save_pretrained(tmp_path / "short")
    kit.word_tokenizer(kit.VOCAB).save_pretrained(tmp_path / "short")
    prompts.write_text("w1 w5\nw2 w3\n\n" + prompt + "\n", encoding="utf-8")
    generate = layerskip.Engine.generate

    def refusing(engine: Any, given: Any, **named: Any) -> Any:
        if given == ["w0"]:
            raise ValueError("Not this one.")
        return generate(engine, given, **named)

    monkeypatch.setattr(layerskip.Engine, "generate", refusing)
    message = run.refused(str(tmp_path / "short"), prompts, "--output", out)
    assert ("64" in message or "Not this one." in message) and f"line 4 of {prompts}: " in message
    written = sum(part.read_text().count("\n") for part in Path(f"{out}.parts").glob("rank-*"))
    assert written == (2 if prompt == "w0" else 0)
    if not written:
        # Nothing is there to go on with, so that a run on other prompts may begin.
        prompts.write_text("w1 w5\n", encoding="utf-8")
        assert run.report(str(tmp_path / "short"), prompts, "--output", out)["answers"] == 1
        assert not Path(f"{out}.parts").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "o.json"], "--output o.json ends with '.json'; allowed is .jsonl"),
        (["--output", "nothing/o.jsonl"], "the folder nothing is not there"),
        (["--output", "o.jsonl", "--json"], "--json is for standard output"),
        (["--output", "o.jsonl", "--color", "never"], "--color never is for standard output"),
        (["--resume"], "pass --output as well"),
        (["--batch-size", 2], "--batch-size 2 is for --json and --output"),
        (["--batch-size", 0, "--json"], "--batch-size 0 is out of range"),
        (["--batch-size", 2, "--json", *DRAWN], "--seed 3 does not go with --batch-size 2"),
    ],
)
def test_mistakes_are_told_before_the_model_is_loaded(
    run: Generating, prompts: Path, options: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prompts.parent)
    assert message in run.refused("nowhere", prompts, *options)
    assert [path.name for path in prompts.parent.iterdir()] == ["prompts.txt"]


def test_options_that_the_model_does_not_have_are_told_before_anything_is_begun(
    run: Generating, checkpoint: str, prompts: Path, out: Path
) -> None:
    message = run.refused(checkpoint, prompts, "--output", out, "--exit-layer", 99)
    assert "exit_layer=99 is out of range" in message and "line" not in message
    assert not Path(f"{out}.parts").exists()


def test_a_file_of_answers_is_for_a_file_of_prompts(run: Generating, out: Path) -> None:
    assert run.status("generate.py", "--model", "nowhere", "--prompt", "w1", "--output", out) == 2
    assert "pass --prompts" in run.capsys.readouterr().err


def test_batches_need_a_token_that_fills_up_rows(run: Generating, prompts: Path, out: Path, tmp_path: Path) -> None:
    kit.mixed().save_pretrained(tmp_path / "endless")
    kit.word_tokenizer(kit.VOCAB).save_pretrained(tmp_path / "endless")
    message = run.refused(str(tmp_path / "endless"), prompts, "--output", out, "--batch-size", 2)
    assert "--batch-size 2 needs a token that fills up rows" in message
    assert not Path(f"{out}.parts").exists()


# Two ranks


def test_two_ranks_answer_as_one_does(run: Generating, checkpoint: str, prompts: Path, out: Path) -> None:
    """In processes of their own, which begin in a folder that has nothing to do with the checkout."""
    # Without --multi_gpu the launcher starts one process where there are not several GPUs.
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    arguments = map(str, run.arguments(checkpoint, prompts, "--output", out, "--device", "cpu"))
    command = [sys.executable, *launch, str(PROGRAMS / "generate.py"), *arguments]
    program = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, timeout=180, check=False)
    assert program.returncode == 0, program.stderr
    [report] = [json.loads(line) for line in program.stdout.splitlines() if line.startswith('{"answers"')]
    assert (report["answers"], report["already_there"], report["ranks"]) == (5, 0, 2)
    assert untimed(lines_of(out)) == untimed(run.printed(checkpoint, prompts))


def generate_until_killed(arguments: list[str]) -> None:
    """Runs generate.py on a rank; the second one is killed while it writes its second answer."""
    add = AnswerParts.add

    def adding(parts: AnswerParts, rank: int, answers: Answers) -> None:
        part = parts.folder / "rank-1.jsonl"
        if rank == 1 and part.exists():
            with part.open("a") as file:
                file.write('{"index": 0, "ans')
            os.kill(os.getpid(), signal.SIGKILL)
        add(parts, rank, answers)

    AnswerParts.add = adding  # type: ignore[method-assign]
    sys.argv = ["generate.py", *arguments]
    runpy.run_path(str(PROGRAMS / "generate.py"), run_name="__main__")


def test_a_rank_that_is_killed_loses_nothing_that_was_written(
    run: Generating, checkpoint: str, prompts: Path, out: Path
) -> None:
    arguments = run.arguments(checkpoint, prompts, "--output", out, *DRAWN)
    first, second = workers.run_ranks(generate_until_killed, [*map(str, arguments), "--device", "cpu"])
    assert second.status == -signal.SIGKILL
    # It answers its share, and would wait for the other.
    assert "RuntimeError" in first.error
    assert not out.exists()
    report = run.report(checkpoint, prompts, "--output", out, *DRAWN, "--resume")
    # The three of the first rank and one of the second.
    assert (report["answers"], report["already_there"], report["ranks"]) == (1, 4, 1)
    assert untimed(lines_of(out)) == untimed(run.printed(checkpoint, prompts, *DRAWN))
