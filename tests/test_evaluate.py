"""The programs that measure, run as a user runs them, on a tiny saved model that ends its answers."""

from __future__ import annotations

import gc
import json
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip.model.draft_head import write_draft_token_ids
from tests import kit

PROGRAMS = Path(__file__).parent.parent / "inference"
EOS = 35
BUDGET = 12
TEMPLATE = (
    "{% for message in messages %}w7 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
)
PROMPTS = ["w44 w3", "w1 w5 w9", "w2"]


def save_model(folder: Path, template: str | None = None, **entries: Any) -> str:
    """Saves MIX, which ends its answers with EOS, and a tokenizer of words."""
    kit.mixed(eos_token_id=EOS).save_pretrained(folder)
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.eos_token = f"w{EOS}"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    stored = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**stored, **entries}), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint that says which exits were trained."""
    entry = {"format": 1, "exit_layers": [3, 1]}
    return save_model(tmp_path_factory.mktemp("checkpoint"), layerskip=entry)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with a chat template, that says nothing about exits."""
    return save_model(tmp_path_factory.mktemp("chatting"), TEMPLATE)


class Runner:
    """Runs a program in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def status(self, program: str, *arguments: Any) -> int:
        self.monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        # A program that collects garbage goes through its own objects alone, as in a process of its own.
        gc.freeze()
        try:
            runpy.run_path(str(PROGRAMS / program), run_name="__main__")
        except SystemExit as stop:
            return int(stop.code or 0)
        finally:
            gc.unfreeze()
        return 0

    def __call__(self, program: str, *arguments: Any) -> tuple[dict[str, Any], str]:
        """Returns the closing JSON and all that was printed before it."""
        assert self.status(program, *arguments) == 0
        shown, _, last = self.capsys.readouterr().out.rstrip("\n").rpartition("\n")
        return json.loads(last), shown


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@cache
def own_tokens(prompt: str) -> list[int]:
    tokens = kit.without_cache(kit.mixed(), [int(word[1:]) for word in prompt.split()], BUDGET)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def own_text(prompt: str) -> str:
    """The answer as text, which has no special tokens."""
    return " ".join(f"w{token}" for token in own_tokens(prompt) if token != EOS)


def test_figures_of_all_rows_and_of_each_category(checkpoint: str, tmp_path: Path, run: Runner) -> None:
    rows = [
        {"prompt": PROMPTS[0], "completion": f" {own_text(PROMPTS[0])}\n", "category": "short"},
        {"prompt": PROMPTS[1], "completion": "w9 w9", "category": "long"},
        {"prompt": PROMPTS[2], "category": "short"},
    ]
    answers = tmp_path / "answers.jsonl"
    options = ["--data", write(tmp_path, rows), "--max-new-tokens", BUDGET, "--num-draft-tokens", "5,2"]
    found, shown = run("evaluate.py", "--model", checkpoint, *options, "--batch-size", 2, "--answers", answers)
    assert (found["rows"], found["completions"], found["exact"]) == (3, 2, 1)
    assert [made["exit_layer"] for made in found["exits"]] == [1, 3]
    for made in found["exits"]:
        assert list(made["mean_acceptance_length"]) == ["2", "5"]
        assert len(made["acceptance_by_position"]) == 5
        assert 0 <= made["agreement"] <= 1
        assert made["loss"] != found["loss"]
    assert found["exits"][1]["agreement"] > found["exits"][0]["agreement"]
    short, long = found["categories"]["short"], found["categories"]["long"]
    assert (short["rows"], short["completions"], short["exact"]) == (2, 1, 1)
    assert (long["rows"], long["completions"], long["exact"]) == (1, 1, 0)
    assert short["new_tokens"] + long["new_tokens"] == found["new_tokens"]
    assert min(short["loss"], long["loss"]) < found["loss"] < max(short["loss"], long["loss"])
    assert [line.split(":")[0] for line in shown.splitlines() if " answers, " in line] == ["All rows", "long", "short"]
    assert "exact match 1 of 2" in shown
    written = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert [row["answer"] for row in written] == [own_text(prompt) for prompt in PROMPTS]
    assert [row.get("exact") for row in written] == [True, False, None]


def test_rows_without_completions_have_no_losses_and_no_exact_match(
    checkpoint: str, tmp_path: Path, run: Runner
) -> None:
    data = write(tmp_path, [{"prompt": prompt} for prompt in PROMPTS])
    options = ["--data", data, "--max-new-tokens", BUDGET, "--rows", 2, "--exit-layers", "2"]
    found, shown = run("evaluate.py", "--model", checkpoint, *options)
    assert (found["rows"], found["completions"], found["exact"], found["loss"]) == (2, 0, None, None)
    assert found["exits"][0]["loss"] is None
    assert found["categories"] == {}
    assert "exact match" not in shown


def test_draft_vocabularies_are_the_lowest_ids_or_the_checkpoints_own(tmp_path: Path, run: Runner) -> None:
    folder = tmp_path / "model"
    save_model(folder)
    data = write(tmp_path, [{"prompt": prompt} for prompt in PROMPTS])
    options = ["--model", folder, "--data", data, "--max-new-tokens", BUDGET, "--exit-layers", "3"]
    followers = [token for prompt in PROMPTS for token in own_tokens(prompt)[1:]]

    def share(ids: set[int]) -> float:
        return sum(token in ids for token in followers) / len(followers)

    lowest, _ = run("evaluate.py", *options, "--draft-vocab-sizes", "40,97")
    whole, few, all_ids = lowest["exits"]
    assert (whole["draft_vocab_size"], whole["coverage"]) == (None, None)
    assert (few["draft_vocab_size"], few["coverage"]) == (40, share({EOS, *range(40)}))
    assert few["agreement"] <= few["coverage"] < 1
    assert (all_ids["coverage"], all_ids["agreement"]) == (1.0, whole["agreement"])

    write_draft_token_ids(folder, torch.arange(96, 40, -1))
    own, _ = run("evaluate.py", *options, "--draft-vocab-sizes", "30")
    assert own["exits"][1]["coverage"] == share(set(range(67, 97)))


def test_strings_go_through_the_chat_template_and_messages_stay(chatting: str, tmp_path: Path, run: Runner) -> None:
    rows = [{"prompt": "w44 w3"}, {"prompt": [{"role": "user", "content": "w44 w3"}], "completion": "w9"}]
    answers = tmp_path / "answers.jsonl"
    options = ["--data", write(tmp_path, rows), "--max-new-tokens", BUDGET, "--exit-layers", "2"]
    run("evaluate.py", "--model", chatting, *options, "--answers", answers)
    written = [json.loads(line)["answer"] for line in answers.read_text(encoding="utf-8").splitlines()]
    assert written == [own_text("w7 w44 w3 w8")] * 2


def test_an_answer_that_was_cut_has_no_end_to_predict(checkpoint: str, tmp_path: Path, run: Runner) -> None:
    """Rows as generate_data.py writes them: their losses are those of rows whose EOS does not count."""
    row = {"prompt": "w1 w5", "completion": "w9 w3 w4"}
    options = ["--max-new-tokens", 4, "--exit-layers", "2"]
    found = {}
    for reason in ("stop", "length"):
        data = write(tmp_path, [{**row, "finish_reason": reason}])
        found[reason], _ = run("evaluate.py", "--model", checkpoint, "--data", data, *options)
    with torch.no_grad():
        logits = kit.mixed()(torch.tensor([[1, 5, 9, 3, 4]])).logits[0]
    for reason, answer in (("stop", [9, 3, 4, EOS]), ("length", [9, 3, 4])):
        loss = torch.nn.functional.cross_entropy(logits[1 : 1 + len(answer)], torch.tensor(answer))
        assert found[reason]["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_a_row_that_is_too_long_is_named_and_no_file_of_answers_stays(
    tmp_path: Path, run: Runner, checkpoint: str
) -> None:
    folder = tmp_path / "model"
    save_model(folder, max_position_embeddings=16)
    data = write(tmp_path, [{"prompt": "w1"}, {"prompt": "w1 w2", "completion": " ".join(["w3"] * 14)}])
    options = ["--data", data, "--exit-layers", "2", "--answers", tmp_path / "answers.jsonl"]
    assert run.status("evaluate.py", "--model", folder, *options) == 2
    message = f"line 2 of {data}: prompt and completion have 17 tokens, but the model has 16 positions"
    assert message in run.capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()


def test_answers_that_cannot_be_written_are_told_before_the_work(
    checkpoint: str, tmp_path: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path, [{"prompt": "w1"}])
    opened = Path.open

    def refusing(path: Path, mode: str = "r", **options: Any) -> Any:
        if path.name == "answers.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, **options)

    def unexpected(*arguments: Any, **options: Any) -> None:
        raise AssertionError("no model may be loaded")

    monkeypatch.setattr(Path, "open", refusing)
    monkeypatch.setattr("layerskip.decoding.load.load", unexpected)
    options = ["--data", data, "--exit-layers", "2", "--answers", tmp_path / "answers.jsonl"]
    assert run.status("evaluate.py", "--model", checkpoint, *options) == 2
    assert "Permission denied" in run.capsys.readouterr().err


MISTAKES = [
    (["--data", "nothing.jsonl"], "nothing.jsonl"),
    (["--data", "rows.txt"], "allowed is .jsonl"),
    (["--num-draft-tokens", "4,x"], "--num-draft-tokens '4,x'"),
    (["--num-draft-tokens", "0"], "num_draft_tokens=0 is out of range"),
    (["--exit-layers", "4"], "exit_layer=4 is out of range"),
    (["--exit-layers", ""], "--exit-layers ''"),
    ([], "pass --exit-layers"),
    (["--exit-layers", "2", "--rows", "0"], "--rows 0"),
    (["--exit-layers", "2", "--batch-size", "0"], "--batch-size 0"),
    (["--exit-layers", "2", "--max-new-tokens", "0"], "--max-new-tokens 0"),
    (["--exit-layers", "2", "--draft-vocab-sizes", "98"], "--draft-vocab-sizes 98"),
    (["--exit-layers", "2", "--answers", "missing/out.jsonl"], "its folder is not there"),
    (["--exit-layers", "2", "--answers", "rows.jsonl"], "is there already"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_the_program_with_one_line(
    chatting: str, arguments: list[str], message: str, tmp_path: Path, run: Runner
) -> None:
    write(tmp_path, [{"prompt": "w1"}])
    run.monkeypatch.chdir(tmp_path)
    assert run.status("evaluate.py", "--model", chatting, "--data", "rows.jsonl", *arguments) == 2
    last = run.capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.parametrize("part", [{"completion": 3}, {"category": ["a"]}, {"finish_reason": True}])
def test_parts_of_another_type_are_named_with_their_row(
    chatting: str, part: dict[str, Any], tmp_path: Path, run: Runner
) -> None:
    data = write(tmp_path, [{"prompt": "w1"}, {"prompt": "w1", **part}])
    assert run.status("evaluate.py", "--model", chatting, "--data", data, "--exit-layers", "2") == 2
    assert f"line 2 of {data}: {next(iter(part))} is not a string" in run.capsys.readouterr().err
