"""The program that makes training data of a model's own answers, run as a user runs it, on a tiny saved model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from layerskip.training.data import DataSettings, load_data
from tests import kit

PROGRAM = Path(__file__).parent.parent / "training" / "generate_data.py"
EOS = 35
BUDGET = 12
TEMPLATE = (
    "{% for message in messages %}w7 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
)
# Of different lengths; with EOS the first answer ends early and the others do not.
PROMPTS = ["w44 w3", "w1 w5 w9", "w2", "w30 w31 w32 w33 w34"]


def tokenizer() -> PreTrainedTokenizerFast:
    made = kit.word_tokenizer(kit.VOCAB)
    made.eos_token = f"w{EOS}"
    return made


def ids(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def save_model(folder: Path, template: str | None = None) -> str:
    """Saves MIX, which ends its answers with EOS, and a tokenizer of words."""
    kit.mixed(eos_token_id=EOS).save_pretrained(folder)
    made = tokenizer()
    made.chat_template = template
    made.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with a chat template."""
    return save_model(tmp_path_factory.mktemp("chatting"), TEMPLATE)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "own.jsonl"


def write_prompts(folder: Path, prompts: list[Any]) -> Path:
    """Writes strings as a .txt file, and rows as a .jsonl file."""
    if all(isinstance(prompt, str) for prompt in prompts):
        path = folder / "prompts.txt"
        path.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    else:
        path = folder / "prompts.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts), encoding="utf-8")
    return path


class Runner:
    """Runs the program in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def status(self, *arguments: Any) -> int:
        self.monkeypatch.setattr(sys, "argv", [PROGRAM.name, *map(str, arguments)])
        try:
            runpy.run_path(str(PROGRAM), run_name="__main__")
        except SystemExit as stop:
            return int(stop.code or 0)
        return 0

    def __call__(self, model: str, prompts: Path, out: Path, *arguments: Any) -> dict[str, Any]:
        """Returns the closing report."""
        options = ["--model", model, "--prompts", prompts, "--out", out, "--max-new-tokens", BUDGET]
        assert self.status(*options, *arguments) == 0
        return dict(json.loads(self.capsys.readouterr().out.splitlines()[-1]))

    def refused(self, model: str, prompts: Path, out: Path, *arguments: Any) -> str:
        """Returns the message of a run that ends with status 2."""
        assert self.status("--model", model, "--prompts", prompts, "--out", out, *arguments) == 2
        last = self.capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("error: ")
        return last


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(monkeypatch, capsys)


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]


def expected(prompt: list[int]) -> tuple[str, str, int]:
    """Returns what the model answers, why it ended, and its number of tokens, by the oracle without a cache."""
    tokens = kit.without_cache(kit.mixed(), prompt, BUDGET)
    finished = EOS in tokens
    text = tokens[: tokens.index(EOS)] if finished else tokens
    return " ".join(f"w{token}" for token in text), "stop" if finished else "length", len(text) + finished


# Rows


def test_answers_are_greedy_and_rows_say_why_they_ended(
    run: Runner, checkpoint: str, tmp_path: Path, out: Path
) -> None:
    report = run(checkpoint, write_prompts(tmp_path, PROMPTS), out, "--batch-size", 3)
    rows = rows_of(out)
    answers = {prompt: expected(ids(prompt)) for prompt in PROMPTS}
    assert {row["prompt"]: (row["completion"], row["finish_reason"]) for row in rows} == {
        prompt: answer[:2] for prompt, answer in answers.items()
    }
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert all(list(row) == ["prompt", "completion", "finish_reason"] for row in rows)
    assert report.pop("seconds") > 0 and report.pop("tokens_per_second") > 0
    unfinished = [row for row in rows if row["finish_reason"] == "length"]
    assert report == {
        "rows": 4,
        "already_there": 0,
        "empty": 0,
        "unfinished": len(unfinished),
        "retokenized_differently": 0,
        "tokens": sum(tokens for _, _, tokens in answers.values()),
    }


def test_longest_prompts_are_answered_first(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    run(checkpoint, write_prompts(tmp_path, PROMPTS), out, "--batch-size", 2)
    assert [len(row["prompt"].split()) for row in rows_of(out)] == [5, 3, 2, 1]


def test_the_batch_size_changes_no_answer(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    prompts = write_prompts(tmp_path, PROMPTS)
    run(checkpoint, prompts, out)
    run(checkpoint, prompts, tmp_path / "single.jsonl", "--batch-size", 1)
    assert rows_of(tmp_path / "single.jsonl") == rows_of(out)


@pytest.mark.parametrize("is_chat", [False, True])
def test_training_sees_the_prompt_and_the_tokens_that_the_model_chose(
    run: Runner, checkpoint: str, chatting: str, is_chat: bool, tmp_path: Path, out: Path
) -> None:
    run(chatting if is_chat else checkpoint, write_prompts(tmp_path, PROMPTS), out)
    made = tokenizer()
    made.chat_template = TEMPLATE
    rows = load_data(DataSettings(train=str(out)), made, seed=0).train
    for row in rows:
        answer = [label for label in row["labels"] if label != -100]
        prompt = row["input_ids"][: -len(answer)]
        assert (prompt[0] == 7 and prompt[-1] == 8) == is_chat
        assert answer == kit.without_cache(kit.mixed(), prompt, BUDGET)[: len(answer)]
        assert (answer[-1] == EOS) == (len(answer) < BUDGET)


def test_texts_with_other_tokens_than_the_model_chose_are_counted(run: Runner, tmp_path: Path, out: Path) -> None:
    """Two tokens are special here, so that they do not appear in texts."""
    model = save_model(tmp_path / "model")
    made = tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["w83", "w96"]})
    made.save_pretrained(model)
    report = run(model, write_prompts(tmp_path, PROMPTS), out)
    different = [row for row in rows_of(out) if row["completion"] != expected(ids(row["prompt"]))[0]]
    assert report["retokenized_differently"] == len(different) > 0
    assert report["rows"] > len(different)


def test_another_end_than_the_one_that_training_writes_counts_as_different(
    run: Runner, tmp_path: Path, out: Path
) -> None:
    model = save_model(tmp_path / "model")
    made = tokenizer()
    made.eos_token = "w95"
    made.add_special_tokens({"additional_special_tokens": [f"w{EOS}"]})
    made.save_pretrained(model)
    report = run(model, write_prompts(tmp_path, PROMPTS), out)
    ended = [row for row in rows_of(out) if row["finish_reason"] == "stop"]
    assert report["retokenized_differently"] == len(ended) > 0


def test_unfinished_answers_can_be_left_out(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    report = run(checkpoint, write_prompts(tmp_path, PROMPTS), out, "--skip-unfinished")
    rows = rows_of(out)
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert report["rows"] == len(rows) and report["unfinished"] == 4 - len(rows)


def test_empty_answers_are_left_out(run: Runner, tmp_path: Path, out: Path) -> None:
    """The first token of the first answer ends it."""
    model = kit.mixed()
    first = kit.without_cache(model, ids(PROMPTS[0]), 1)[0]
    kit.mixed(eos_token_id=first).save_pretrained(tmp_path / "model")
    made = kit.word_tokenizer(kit.VOCAB)
    made.eos_token = f"w{first}"
    made.save_pretrained(tmp_path / "model")
    report = run(str(tmp_path / "model"), write_prompts(tmp_path, PROMPTS), out)
    assert report["empty"] == 1 and report["rows"] == 3
    assert PROMPTS[0] not in [row["prompt"] for row in rows_of(out)]


# Prompts


def test_rows_give_their_prompt_in_several_shapes(run: Runner, chatting: str, tmp_path: Path, out: Path) -> None:
    user, system = {"role": "user", "content": "w1 w5"}, {"role": "system", "content": "w2"}
    reply = {"role": "assistant", "content": "w3"}
    rows = [
        {"prompt": "w44 w3", "completion": "w1", "other": 5},
        {"prompt": [system, user], "completion": "w1"},
        {"messages": [user, reply]},
        {"messages": [user, reply, user]},
        {"text": "w9 w10"},
        {"text": None, "messages": None, "prompt": "w11"},
    ]
    run(chatting, write_prompts(tmp_path, rows), out)
    asked = [row["prompt"] for row in rows_of(out)]
    assert sorted(asked, key=str) == sorted(
        [
            [{"role": "user", "content": "w44 w3"}],
            [system, user],
            [user],
            [user, reply, user],
            [{"role": "user", "content": "w9 w10"}],
            [{"role": "user", "content": "w11"}],
        ],
        key=str,
    )
    row = next(row for row in rows_of(out) if row["prompt"] == [system, user])
    assert row["completion"] == expected([7, 2, 7, 1, 5, 8])[0]


def test_no_chat_sends_strings_as_they_stand(run: Runner, chatting: str, tmp_path: Path, out: Path) -> None:
    run(chatting, write_prompts(tmp_path, PROMPTS), out, "--no-chat")
    assert {row["prompt"]: row["completion"] for row in rows_of(out)} == {
        prompt: expected(ids(prompt))[0] for prompt in PROMPTS
    }


def test_line_separators_inside_a_row_do_not_end_it(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    prompts = write_prompts(tmp_path, [{"prompt": "w1\u2028w5"}, {"prompt": "w2\x85w3"}])
    assert run(checkpoint, prompts, out)["rows"] == 2
    report = run(checkpoint, prompts, out, "--resume")
    assert (report["rows"], report["already_there"]) == (0, 2)


# Going on


def test_a_run_that_was_interrupted_goes_on_where_it_was(
    run: Runner, checkpoint: str, tmp_path: Path, out: Path
) -> None:
    prompts = write_prompts(tmp_path, PROMPTS)
    run(checkpoint, prompts, out, "--batch-size", 1)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1] + lines[2][:20])
    report = run(checkpoint, prompts, out, "--resume")
    assert out.read_bytes() == whole
    assert (report["rows"], report["already_there"]) == (2, 2)


def test_finished_batches_are_in_the_file_while_others_are_answered(
    run: Runner, checkpoint: str, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import layerskip

    generate = layerskip.Engine.generate
    seen = []

    def interrupted(engine: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(out.read_text().count("\n") if out.exists() else 0)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return generate(engine, *arguments, **named)

    monkeypatch.setattr(layerskip.Engine, "generate", interrupted)
    options = ["--prompts", write_prompts(tmp_path, PROMPTS), "--out", out, "--batch-size", 1]
    assert run.status("--model", checkpoint, *options) == 130
    assert seen == [0, 1, 2]


def test_resuming_a_finished_run_does_nothing(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    prompts = write_prompts(tmp_path, PROMPTS)
    run(checkpoint, prompts, out)
    whole = out.read_bytes()
    report = run(checkpoint, prompts, out, "--resume")
    assert out.read_bytes() == whole
    assert report["already_there"] == 4
    assert report["rows"] == report["tokens"] == 0 and report["tokens_per_second"] is None


def test_resuming_where_nothing_is_there_yet_begins(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    assert run(checkpoint, write_prompts(tmp_path, PROMPTS), out, "--resume")["rows"] == 4


def test_a_prompt_that_occurs_twice_is_answered_twice(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    run(checkpoint, write_prompts(tmp_path, ["w1 w5", "w2"]), out)
    report = run(checkpoint, write_prompts(tmp_path, ["w1 w5", "w2", "w1 w5"]), out, "--resume")
    assert (report["rows"], report["already_there"]) == (1, 2)
    assert sorted(row["prompt"] for row in rows_of(out)) == ["w1 w5", "w1 w5", "w2"]


# Mistakes


def test_a_file_that_is_there_is_not_overwritten(run: Runner, checkpoint: str, tmp_path: Path, out: Path) -> None:
    out.write_text("mine")
    assert "go on with --resume, or choose another" in run.refused(checkpoint, write_prompts(tmp_path, PROMPTS), out)
    assert out.read_text() == "mine"


@pytest.mark.parametrize("content", ['{"prompt": "w1"}\n', "mine\n", "[]\n"])
def test_a_file_of_something_else_is_not_gone_on_with(
    run: Runner, checkpoint: str, content: str, tmp_path: Path, out: Path
) -> None:
    out.write_text(content)
    assert f"line 1 of --out {out}" in run.refused(checkpoint, write_prompts(tmp_path, PROMPTS), out, "--resume")
    assert out.read_text() == content


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"answer": "w1"}', "line 1 of {path} has answer, but neither prompt, messages, question, turns nor text"),
        ('{"prompt": 5}', "line 1 of {path}: prompt is not a string or a list of messages"),
        ('{"prompt": [{"role": "user"}]}', "prompt is not a string or a list of messages, each with role and content"),
        ('{"messages": "w1"}', "messages is not a list of messages"),
        ('{"messages": [{"role": "assistant", "content": "w1"}]}', "messages holds nothing to answer"),
        ('{"text": [{"role": "user", "content": "w1"}]}', "text is not a string"),
        ('{"prompt": ""}', "prompt holds nothing to answer"),
        ('{"prompt": "\\ud800"}', "line 1 of {path} cannot be read as JSON text"),
        ('{"prompt": ', "line 1 of {path} cannot be read as JSON text"),
        ("[1]", "line 1 of {path} is no JSON object"),
        ("", "holds no rows"),
        ('{"prompt": [{"role": "user", "content": "w1"}]}', "has no chat template"),
    ],
)
def test_bad_rows_are_named(run: Runner, checkpoint: str, row: str, message: str, tmp_path: Path, out: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{row}\n", encoding="utf-8")
    assert message.format(path=path) in run.refused(checkpoint, path, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat"], "--chat needs a chat template"),
        (["--batch-size", "0"], "--batch-size 0 is out of range"),
        (["--max-new-tokens", "0"], "`max_new_tokens` must be greater than 0"),
        (["--dtype", "int4"], "dtype='int4' is unknown"),
        (["--prompts", "nothing.txt"], "nothing.txt"),
        (["--prompts", "prompts.csv"], "ends with '.csv'; allowed are .txt and .jsonl"),
        (["--out", "nowhere/own.jsonl"], "the folder nowhere is not there"),
        (["--model", "./nothing"], "there is no such folder"),
    ],
)
def test_mistakes_end_the_program_with_one_line(
    run: Runner, checkpoint: str, arguments: list[str], message: str, tmp_path: Path, out: Path
) -> None:
    assert message in run.refused(checkpoint, write_prompts(tmp_path, PROMPTS), out, *arguments)
    assert not out.exists()


def test_messages_and_no_chat_do_not_go_together(run: Runner, chatting: str, tmp_path: Path, out: Path) -> None:
    prompts = write_prompts(tmp_path, [{"messages": [{"role": "user", "content": "w1"}]}])
    assert "some prompts are messages, which need a chat template" in run.refused(chatting, prompts, out, "--no-chat")


@pytest.mark.parametrize("lacking", ["tokenizer", "tokenizer's EOS", "model's EOS"])
def test_a_model_that_cannot_end_an_answer_is_refused(run: Runner, lacking: str, tmp_path: Path, out: Path) -> None:
    model = tmp_path / "model"
    kit.mixed(eos_token_id=None if lacking == "model's EOS" else EOS).save_pretrained(model)
    if lacking != "tokenizer":
        (kit.word_tokenizer() if lacking == "tokenizer's EOS" else tokenizer()).save_pretrained(model)
    message = "has no tokenizer" if lacking == "tokenizer" else "has no EOS token"
    assert message in run.refused(str(model), write_prompts(tmp_path, PROMPTS), out)


def test_the_program_explains_itself(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.status("--help") == 0
    assert "--skip-unfinished" in capsys.readouterr().out
