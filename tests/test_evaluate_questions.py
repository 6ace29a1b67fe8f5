"""evaluate.py on texts and questions, run as a user runs it, on tiny saved models whose acceptance is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip.comparison import side_by_side
from layerskip.comparison.bootstrap import paired_bootstrap
from tests import kit
from tests.test_evaluate import BUDGET, EOS, Runner, own_text, save_model

PROMPTS = ["w44 w3", "w1 w5 w9", "w2", "w30 w31 w32"]
TEXT = " ".join(f"w{(token * 37 + 11) % kit.VOCAB}" for token in range(23))


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def save(folder: Path, model: Any) -> str:
    """Saves another model than MIX, with the same tokenizer."""
    save_model(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """MIX, whose exits 1 and 3 were trained."""
    return save_model(tmp_path_factory.mktemp("mixed"), layerskip={"format": 1, "exit_layers": [3, 1]})


@pytest.fixture(scope="module")
def same(tmp_path_factory: pytest.TempPathFactory) -> str:
    """ID, whose exit 2 is the whole model."""
    return save(tmp_path_factory.mktemp("same"), kit.identical(eos_token_id=EOS))


def questions(folder: Path, references: list[Any], **columns: list[Any]) -> Path:
    path = folder / "questions.jsonl"
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, references, strict=False)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def own(folder: Path, right: int) -> Path:
    """Questions of which MIX answers the first `right` as their reference says."""
    return questions(folder, [*map(own_text, PROMPTS[:right]), *["nothing"] * (len(PROMPTS) - right)])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_accuracy_of_all_questions_and_of_each_category(checkpoint: str, tmp_path: Path, evaluate: Runner) -> None:
    references = [own_text(PROMPTS[0]), "nothing", ["no", own_text(PROMPTS[2])], "#### nothing"]
    data = questions(tmp_path, references, category=["a", "b", "a", None])
    answers = tmp_path / "answers.jsonl"
    options = ["--questions", data, "--max-new-tokens", BUDGET, "--answers", answers]
    found, shown = evaluate("evaluate.py", "--model", checkpoint, *options)
    (arm,) = found["questions"]["models"][0]["arms"]
    assert (arm["answered"], arm["correct"], arm["accuracy"]) == (4, 2, 0.5)
    assert {name: part["accuracy"] for name, part in arm["categories"].items()} == {"a": 1.0, "b": 0.0}
    assert (found["complete"], found["questions"]["comparison"]) == (True, [])
    assert "0.500" in shown
    written = {line["question"]: line for line in lines(answers)}
    assert [written[index]["answer"] for index in range(4)] == [own_text(prompt) for prompt in PROMPTS]
    assert [written[index]["correct"] for index in range(4)] == [True, False, True, False]
    assert written[3]["references"] == ["nothing"]
    assert {(line["model"], line["strategy"], line["exit_layer"]) for line in written.values()} == {
        (checkpoint, "autoregressive", None)
    }


def test_early_exit_varies_by_exit_and_speculation_does_not(same: str, tmp_path: Path, evaluate: Runner) -> None:
    """Exit 2 is the whole model, and exit 1 another one."""
    whole = kit.identical(eos_token_id=EOS)
    references = []
    for prompt in PROMPTS:
        ids = [int(word[1:]) for word in prompt.split()]
        tokens = kit.without_cache(whole, ids, BUDGET)
        tokens = tokens[: tokens.index(EOS)] if EOS in tokens else tokens
        references.append(" ".join(f"w{token}" for token in tokens))
    options = ["--model", same, "--questions", questions(tmp_path, references), "--max-new-tokens", BUDGET]
    options += ["--exit-layers", "1,2"]
    early, shown = evaluate("evaluate.py", *options, "--strategy", "early_exit")
    arms = early["questions"]["models"][0]["arms"]
    assert [(arm["exit_layer"], arm["accuracy"]) for arm in arms] == [(None, 1.0), (1, 0.0), (2, 1.0)]
    assert [arm["same_as_autoregressive"] for arm in arms] == [4, 0, 4]
    assert "varies from exit to exit" in shown
    drafting = [*options, "--strategy", "self_speculative", "--num-draft-tokens", "2,3"]
    speculative, shown = evaluate("evaluate.py", *drafting)
    arms = speculative["questions"]["models"][0]["arms"]
    assert [(arm["exit_layer"], arm["num_draft_tokens"]) for arm in arms[1:]] == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert all((arm["accuracy"], arm["same_as_autoregressive"]) == (1.0, 4) for arm in arms)
    assert "does not tell exits apart" in shown
    assert "does not tell exits apart" in speculative["questions"]["note"]


def test_two_checkpoints_side_by_side(checkpoint: str, same: str, tmp_path: Path, evaluate: Runner) -> None:
    data, answers = own(tmp_path, 3), tmp_path / "answers.jsonl"
    options = ["--questions", data, "--max-new-tokens", BUDGET, "--compare-with", same, "--answers", answers]
    found, shown = evaluate("evaluate.py", "--model", checkpoint, *options, "--seed", 3)
    (made,) = found["questions"]["comparison"]
    right = {model: [False] * len(PROMPTS) for model in (checkpoint, same)}
    for line in lines(answers):
        right[line["model"]][line["question"]] = line["correct"]
    assert right[checkpoint] == [True, True, True, False]
    assert right[same] == [False, False, True, False]
    wanted = paired_bootstrap(right[checkpoint], right[same], seed=3)
    assert (made["difference"], made["low"], made["high"]) == (wanted.difference, wanted.low, wanted.high)
    assert (made["difference"], made["only_first"], made["only_second"]) == (0.5, 2, 0)
    assert f"Accuracy of {checkpoint} minus that of {same}" in shown


def test_the_first_and_the_last_rows(checkpoint: str, tmp_path: Path, evaluate: Runner) -> None:
    options = ["--model", checkpoint, "--questions", own(tmp_path, 3), "--max-new-tokens", BUDGET]
    for flag, number, correct in (("--rows", 2, 2), ("--last-rows", 2, 1), ("--last-rows", 9, 3)):
        found, _ = evaluate("evaluate.py", *options, flag, number)
        assert found["questions"]["models"][0]["arms"][0]["correct"] == correct


def test_an_instruction_and_patterns(checkpoint: str, tmp_path: Path, evaluate: Runner) -> None:
    answers = tmp_path / "answers.jsonl"
    first = own_text("w44 w3 w9").split()[0]
    data = questions(tmp_path, [f"it is {first}, surely"])
    patterns = ["--answer-pattern", r"^w\d+", "--reference-pattern", r"is (\w+)"]
    options = ["--questions", data, "--max-new-tokens", BUDGET, "--instruction", "w9", "--answers", answers]
    found, _ = evaluate("evaluate.py", "--model", checkpoint, *options, *patterns)
    assert found["questions"]["models"][0]["arms"][0]["accuracy"] == 1.0
    (line,) = lines(answers)
    assert (line["prompt"], line["references"], line["extracted"]) == ("w44 w3\nw9", [first], first)


def interrupt_after(batches: int, monkeypatch: pytest.MonkeyPatch, name: str = "answer_questions") -> None:
    """Lets Ctrl-C come once so many batches are there."""
    original: Callable[..., Iterator[Any]] = vars(side_by_side)[name]

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for number, batch in enumerate(original(*arguments, **options)):
            if number == batches:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(side_by_side, name, interrupted)


def test_what_an_interrupted_run_has_is_reported_and_gone_on_from(
    checkpoint: str, tmp_path: Path, evaluate: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, answers = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    options = ["--model", checkpoint, "--questions", own(tmp_path, 3), "--max-new-tokens", BUDGET, "--batch-size", 1]
    wanted, _ = evaluate("evaluate.py", *options, "--answers", whole)
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert evaluate.status("evaluate.py", *options, "--answers", answers) == 130
    found = json.loads(evaluate.capsys.readouterr().out.splitlines()[-1])
    assert found["complete"] is False
    assert found["questions"]["models"][0]["arms"][0]["answered"] == 2
    assert lines(answers) == lines(whole)[:2]
    # A killed run may have left half a line.
    with answers.open("a", encoding="utf-8") as file:
        file.write('{"model": "')
    found, _ = evaluate("evaluate.py", *options, "--answers", answers, "--resume")
    assert lines(answers) == lines(whole)
    assert found == wanted
    with monkeypatch.context() as patch:
        interrupt_after(0, patch)
        assert evaluate("evaluate.py", *options, "--answers", answers, "--resume")[0] == wanted


def test_a_second_checkpoint_that_was_not_reached_has_no_comparison(
    checkpoint: str, same: str, tmp_path: Path, evaluate: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    options = ["--model", checkpoint, "--questions", own(tmp_path, 3), "--text", tmp_path / "text.txt"]
    interrupt_after(0, monkeypatch)
    assert evaluate.status("evaluate.py", *options, "--compare-with", same) == 130
    found = json.loads(evaluate.capsys.readouterr().out.splitlines()[-1])
    assert [made["model"] for made in found["text"]["models"]] == [checkpoint]
    (made,) = found["questions"]["comparison"]
    assert (made["questions"], made["difference"]) == (0, None)


def test_an_interrupted_text_reports_the_windows_it_has_read(
    checkpoint: str, tmp_path: Path, evaluate: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    interrupt_after(1, monkeypatch, "text_losses")
    options = ["--text", tmp_path / "text.txt", "--window", 8, "--batch-size", 2]
    assert evaluate.status("evaluate.py", "--model", checkpoint, *options) == 130
    (made,) = json.loads(evaluate.capsys.readouterr().out.splitlines()[-1])["text"]["models"]
    assert (made["windows"], made["tokens"]) == (2, 7 + 4)


OTHER_SETTINGS = [
    (["--max-new-tokens", 3], "line 1 of {path} has max_new_tokens 12, and this run 3"),
    (["--dtype", "bfloat16"], "line 1 of {path} has dtype 'float32', and this run 'bfloat16'"),
    (["--instruction", "w9"], "has prompt"),
    (["--answer-pattern", "w9+"], "has extracted"),
    (["--rows", 2], "answers question 3, and this run asks 2"),
    (["--last-rows", 3], "has prompt"),
]


def test_answers_with_other_settings_are_not_gone_on_from(checkpoint: str, tmp_path: Path, evaluate: Runner) -> None:
    answers = tmp_path / "answers.jsonl"
    options = ["--model", checkpoint, "--questions", own(tmp_path, 3), "--answers", answers, "--resume"]
    options += ["--max-new-tokens", BUDGET]
    evaluate("evaluate.py", *options)
    before = answers.read_bytes()
    for changes, message in OTHER_SETTINGS:
        assert evaluate.status("evaluate.py", *options, *changes) == 2
        assert message.format(path=answers) in evaluate.capsys.readouterr().err
        assert answers.read_bytes() == before


def test_answers_of_another_arm_are_not_gone_on_from(checkpoint: str, tmp_path: Path, evaluate: Runner) -> None:
    answers = tmp_path / "answers.jsonl"
    options = ["--model", checkpoint, "--questions", own(tmp_path, 3), "--answers", answers, "--resume"]
    options += ["--max-new-tokens", BUDGET]
    evaluate("evaluate.py", *options, "--strategy", "early_exit", "--exit-layers", 2)
    more, _ = evaluate("evaluate.py", *options, "--strategy", "early_exit", "--exit-layers", "1,2")
    assert [arm["answered"] for arm in more["questions"]["models"][0]["arms"]] == [4, 4, 4]
    assert len(lines(answers)) == 12
    assert evaluate.status("evaluate.py", *options) == 2
    assert "which this run does not ask" in evaluate.capsys.readouterr().err


def test_perplexity_of_last_layer_and_exits(same: str, tmp_path: Path, evaluate: Runner) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    found, shown = evaluate("evaluate.py", "--model", same, "--text", path, "--exit-layers", "1,2")
    ids = torch.tensor([[int(word[1:]) for word in TEXT.split()]])
    with torch.no_grad():
        losses = [
            float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))
            for model in (kit.identical(), kit.truncated(kit.identical(), 1))
        ]
    (made,) = found["text"]["models"]
    one, two = made["exits"]
    assert (made["windows"], made["tokens"]) == (1, 22)
    assert [made["loss"], one["loss"], two["loss"]] == pytest.approx([losses[0], losses[1], losses[0]], rel=1e-5)
    assert made["perplexity"] == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert two["agreement"] == 1.0
    assert f"{losses[0]:.4f}" in shown


def test_losses_of_two_checkpoints_are_compared_document_by_document(
    checkpoint: str, same: str, tmp_path: Path, evaluate: Runner
) -> None:
    path = tmp_path / "text.jsonl"
    texts = [TEXT, "w3 w4 w5", "w9"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = ["--text", path, "--window", 8, "--stride", 4, "--compare-with", same]
    found, _ = evaluate("evaluate.py", "--model", checkpoint, *options)
    first, second = found["text"]["models"]
    last, one, three = found["text"]["comparison"]
    assert [made["exit_layer"] for made in (last, one, three)] == [None, 1, 3]
    assert (first["tokens"], last["items"]) == (24, 2)
    assert last["difference"] == pytest.approx(first["loss"] - second["loss"])
    assert one["difference"] == pytest.approx(first["exits"][0]["loss"] - second["exits"][0]["loss"], abs=1e-6)
    assert last["low"] <= last["difference"] <= last["high"]


def test_a_checkpoint_that_names_no_exits_is_read_by_its_last_layer(
    same: str, tmp_path: Path, evaluate: Runner
) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    found, _ = evaluate("evaluate.py", "--model", same, "--text", tmp_path / "text.txt")
    assert found["text"]["models"][0]["exits"] == []


TEXT_FLAGS = ["--text", "text.txt"]
QUESTION_FLAGS = ["--questions", "questions.jsonl"]
DATA_FLAGS = ["--data", "questions.jsonl"]
MISTAKES = [
    ([], "pass --data, --text or --questions"),
    ([*TEXT_FLAGS, "--rows", "3"], "--rows has no use here; it goes with --data or --questions"),
    ([*TEXT_FLAGS, "--answers", "a.jsonl"], "--answers has no use here"),
    ([*TEXT_FLAGS, "--strategy", "early_exit"], "--strategy has no use here; it goes with --questions"),
    ([*TEXT_FLAGS, "--seed", "1"], "--seed has no use here; it goes with --compare-with"),
    ([*QUESTION_FLAGS, "--window", "8"], "--window has no use here; it goes with --text"),
    ([*QUESTION_FLAGS, "--exit-layers", "2"], "--exit-layers has no use here"),
    ([*QUESTION_FLAGS, "--num-draft-tokens", "2"], "--num-draft-tokens has no use here"),
    ([*QUESTION_FLAGS, "--resume"], "--resume has no use here; it goes with --questions and --answers"),
    ([*QUESTION_FLAGS, "--draft-vocab-sizes", "9"], "--draft-vocab-sizes has no use here; it goes with --data"),
    ([*DATA_FLAGS, "--compare-with", "x"], "--compare-with has no use here; it goes with --text or --questions"),
    ([*DATA_FLAGS, *QUESTION_FLAGS, "--answers", "a.jsonl"], "measure one at a time"),
    ([*QUESTION_FLAGS, "--rows", "1", "--last-rows", "1"], "pass one of them"),
    ([*QUESTION_FLAGS, "--last-rows", "0"], "--last-rows 0 is out of range"),
    ([*QUESTION_FLAGS, "--answers", "text.txt"], "is there already; choose another file, or go on from it"),
    ([*QUESTION_FLAGS, "--answer-pattern", "("], "--answer-pattern '(' is no regular expression"),
    ([*QUESTION_FLAGS, "--reference-pattern", "x"], "line 1 of questions.jsonl: --reference-pattern 'x' finds nothing"),
    ([*QUESTION_FLAGS, "--strategy", "early_exit"], "pass --exit-layers"),
    ([*QUESTION_FLAGS, "--strategy", "early_exit", "--exit-layers", "4"], "exit_layer=4 is out of range"),
    (["--questions", "text.txt"], "--questions text.txt ends with '.txt'; allowed is .jsonl"),
    ([*TEXT_FLAGS, "--window", "9999"], "--window 9999 is out of range"),
    (["--text", "short.txt"], "no text of two tokens or more"),
    ([*QUESTION_FLAGS, "--compare-with", "SAME"], "--compare-with SAME is --model itself"),
    ([*TEXT_FLAGS, "--compare-with", "nowhere/at-all"], "nowhere/at-all"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_the_program_with_one_line(
    same: str, arguments: list[str], message: str, tmp_path: Path, evaluate: Runner
) -> None:
    own(tmp_path, 1)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "short.txt").write_text("w1", encoding="utf-8")
    evaluate.monkeypatch.chdir(tmp_path)
    given = [same if part == "SAME" else part for part in arguments]
    assert evaluate.status("evaluate.py", "--model", same, *given) == 2
    last = evaluate.capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message.replace("SAME", same) in last


def test_a_second_checkpoint_that_cannot_do_it_is_told_before_the_work(
    same: str, tmp_path: Path, evaluate: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(*arguments: Any) -> None:
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(side_by_side, "measure", unexpected)
    own(tmp_path, 1)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    evaluate.monkeypatch.chdir(tmp_path)
    shallow = save(tmp_path / "shallow", kit.truncated(kit.mixed(eos_token_id=EOS), 2))
    options = ["--model", same, "--compare-with", shallow]
    arguments = [*QUESTION_FLAGS, "--strategy", "early_exit", "--exit-layers", "2"]
    assert evaluate.status("evaluate.py", *options, *arguments) == 2
    assert f"--compare-with {shallow}: exit_layer=2 is out of range" in evaluate.capsys.readouterr().err
    kit.word_tokenizer(20).save_pretrained(shallow)
    assert evaluate.status("evaluate.py", *options, *TEXT_FLAGS) == 2
    assert "makes other tokens of --text" in evaluate.capsys.readouterr().err
