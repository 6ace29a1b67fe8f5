"""The command-line programs, run as a user runs them, on a tiny saved model."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from layerskip import demo, program
from layerskip.prompt_file import as_chat, prompts_of
from layerskip.training.recipe import read_recipe
from tests import kit
from tests.test_demo import save_adapters

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "inference"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with MIX and a tokenizer of words."""
    folder = tmp_path_factory.mktemp("checkpoint")
    kit.mixed().save_pretrained(folder)
    kit.word_tokenizer(kit.VOCAB).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def bare_checkout(tmp_path: Path) -> Path:
    """A checkout without the demo's adapters."""
    for folder in ("inference", "training"):
        ignored = shutil.ignore_patterns("checkpoints", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / "checkout" / folder, ignore=ignored)
    return tmp_path / "checkout"


@pytest.fixture
def checkout(checkpoint: str, bare_checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with adapters on MIX, which stands in for the demo model."""
    monkeypatch.setattr(demo, "fetch", lambda: Path(checkpoint))
    save_adapters(Path(checkpoint), bare_checkout / program.DIFFERENCE)
    return bare_checkout


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str, checkout: Path = ROOT) -> int:
    """Runs a program of inference/, or of the folder that it names, in this process; returns its exit status."""
    path = checkout / (name if "/" in name else f"inference/{name}")
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    try:
        runpy.run_path(str(path), run_name="__main__")
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
    ("demo.py", ["--max-new-tokens", "0"], "--max-new-tokens 0 is out of range"),
    ("demo.py", ["--output-dir", "runs"], "--output-dir runs is for a run of --train-minutes"),
    ("demo.py", ["--recipe", "recipe.yaml"], "--recipe recipe.yaml is for a run of --train-minutes"),
    ("demo.py", ["--train-minutes", "0"], "--train-minutes 0 is out of range"),
    ("demo.py", ["--train-minutes", "nan"], "--train-minutes nan is out of range"),
    ("demo.py", ["--train-minutes", "1"], "do not go together, since the recipe names the model"),
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


# How generate.py chooses tokens

DRAWING = ["--temperature", "1.5", "--top-k", "20", "--top-p", "0.95", "--min-p", "0.01"]


@pytest.fixture(scope="module")
def stoppable(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with MIX and words that transformers can look for strings in."""
    folder = tmp_path_factory.mktemp("stoppable")
    kit.mixed().save_pretrained(folder)
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    # What transformers encodes when it prepares to look for strings; it fails where that is unknown.
    tokenizer.add_tokens(["abcdef"])
    tokenizer.save_pretrained(folder)
    return str(folder)


def answers_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, *options: str
) -> list[dict[str, Any]]:
    """Returns what generate.py --json answers to two prompts that are the same."""
    exit_layer = [] if "autoregressive" in options else ["--exit-layer", "2"]
    arguments = ["--model", model, *exit_layer, "--max-new-tokens", "12", "--json", *options]
    assert run(monkeypatch, "generate.py", *arguments, "--prompt", "w1 w5 w9", "--prompt", "w1 w5 w9") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("strategy", ["self_speculative", "autoregressive", "early_exit"])
def test_a_seed_draws_the_same_again_for_every_prompt(
    checkpoint: str, strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*DRAWING, "--strategy", strategy, "--seed"]
    first, second = answers_of(monkeypatch, capsys, checkpoint, *options, "1")
    assert first["token_ids"] == second["token_ids"]
    assert answers_of(monkeypatch, capsys, checkpoint, *options, "1")[0]["token_ids"] == first["token_ids"]
    assert answers_of(monkeypatch, capsys, checkpoint, *options, "2")[0]["token_ids"] != first["token_ids"]
    assert first["statistics"]["strategy"] == strategy


def test_without_a_seed_every_answer_is_drawn_anew(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = answers_of(monkeypatch, capsys, checkpoint, "--temperature", "2")
    assert first["token_ids"] != second["token_ids"]


@pytest.mark.parametrize(
    "narrow", [["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1.0"]], ids=lambda flags: flags[0]
)
def test_drawing_among_one_token_is_greedy(
    checkpoint: str, narrow: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = answers_of(monkeypatch, capsys, checkpoint, "--temperature", "2", *narrow)
    assert [answer["token_ids"] for answer in answers] == [kit.without_cache(kit.mixed(), [1, 5, 9], 12)] * 2


def test_a_seed_prints_the_text_of_its_tokens(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*DRAWING, "--seed", "3"]
    answer = answers_of(monkeypatch, capsys, checkpoint, *options)[0]
    arguments = ["--model", checkpoint, "--exit-layer", "2", "--max-new-tokens", "12", "--prompt", "w1 w5 w9"]
    assert run(monkeypatch, "generate.py", *arguments, *options) == 0
    assert capsys.readouterr().out.split() == answer["text"].split() != []


def test_an_answer_ends_with_the_first_stop_string(
    stoppable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = kit.without_cache(kit.mixed(), [1, 5, 9], 12)
    place = next(place for place in range(3, 12) if plain[place] not in plain[:place])
    stops = ["--stop", "w0 w0 w0", "--stop", f"w{plain[place]}"]
    for answer in answers_of(monkeypatch, capsys, stoppable, *stops):
        assert answer["token_ids"] == plain[: place + 1]
        assert answer["finish_reason"] == "stop"
        assert answer["text"].endswith(f"w{plain[place]}")
    arguments = ["--model", stoppable, "--exit-layer", "2", "--max-new-tokens", "12", "--prompt", "w1 w5 w9"]
    assert run(monkeypatch, "generate.py", *arguments, *stops) == 0
    assert capsys.readouterr().out.split() == [f"w{token}" for token in plain[: place + 1] if token]


@pytest.mark.parametrize("drawing", [[], [*DRAWING, "--seed", "3"]], ids=["greedy", "drawn"])
def test_accepted_tokens_of_an_answer_are_green(
    checkpoint: str, drawing: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = answers_of(monkeypatch, capsys, checkpoint, *drawing)[0]
    arguments = ["--model", checkpoint, "--exit-layer", "2", "--max-new-tokens", "12", "--prompt", "w1 w5 w9"]
    shown = {}
    for color in ("always", "never"):
        assert run(monkeypatch, "generate.py", *arguments, *drawing, "--color", color) == 0
        shown[color] = capsys.readouterr().out
    green = re.findall("\033\\[32m(.*?)\033\\[0m", shown["always"])
    assert sum(len(piece.split()) for piece in green) == answer["statistics"]["accepted"] > 0
    assert len("".join(green).split()) < len(answer["token_ids"])
    assert re.sub("\033\\[\\d*m", "", shown["always"]) == shown["never"]
    assert shown["never"].strip() == answer["text"].strip()


CHOICES = [
    (["--top-k", "5"], "--top-k 5 is for drawing tokens; pass --temperature as well"),
    (["--top-p", "0.9"], "--top-p 0.9 is for drawing tokens; pass --temperature as well"),
    (["--min-p", "0.1"], "--min-p 0.1 is for drawing tokens; pass --temperature as well"),
    (["--seed", "0"], "--seed 0 is for drawing tokens; pass --temperature as well"),
    (["--temperature", "0"], "--temperature 0 is out of range; pass one above 0, or none to draw nothing"),
    (["--temperature", "-1"], "--temperature -1 is out of range"),
    (["--temperature", "nan"], "--temperature nan is out of range"),
    (["--temperature", "1", "--top-k", "-1"], "--top-k -1 is out of range"),
    (["--temperature", "1", "--top-p", "1.5"], "--top-p 1.5 is out of range"),
    (["--temperature", "1", "--top-p", "-0.5"], "--top-p -0.5 is out of range"),
    (["--temperature", "1", "--min-p", "-0.5"], "--min-p -0.5 is out of range"),
    (["--temperature", "1", "--seed", str(2**64)], f"--seed {2**64} is out of range"),
    (["--temperature", "1", "--seed", "-1"], "--seed -1 is out of range"),
    (["--stop", ""], "stop_strings"),
]


@pytest.mark.parametrize(("options", "message"), CHOICES)
def test_mistakes_in_how_tokens_are_chosen_end_generate_with_one_line(
    checkpoint: str,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", checkpoint, "--exit-layer", "2", "--prompt", "w1", *options]
    assert run(monkeypatch, "generate.py", *arguments) == 2
    output = capsys.readouterr()
    assert message in output.err.splitlines()[-1]
    assert output.err.splitlines()[-1].startswith("error: ")
    assert output.out.strip() == ""


# The demo


def figures_of(shown: str) -> dict[str, list[str]]:
    """Returns the closing table of the demo: the figures of commands and of general prompts, by the line's name."""
    table = shown[shown.rindex("commands", 0, shown.index("exit_layer  ")) :]
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_demo_answers_every_prompt_twice_and_compares(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo.py", "--model", checkpoint, "--max-new-tokens", "12") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Loading {checkpoint}\n")
    assert "Using 3." in shown
    assert "[commands 6/6] i need 4650 rand" in shown and "[general 3/3]" in shown
    assert len(re.findall(r"\(autoregressive: [\d.]+ tokens/s\)", shown)) == 9
    assert len(re.findall(r"\(self_speculative: [\d.]+ tokens/s, \d+ of \d+ drafts accepted\)", shown)) == 9
    figures = figures_of(shown)
    assert figures["exit_layer"] == ["3", "3"]
    assert figures["num_draft_tokens"] == ["4", "4"]
    assert all(float(length) > 1.0 for length in figures["mean_acceptance_length"])
    rates = [[float(rate) for rate in column.split()] for column in figures["acceptance_by_position"]]
    assert all(len(column) == 4 and 0.0 < column[0] <= 1.0 for column in rates)
    plain, fast = (
        [tuple(map(int, column.split(", "))) for column in figures[f"{strategy} early, late_layer_tokens"]]
        for strategy in ("autoregressive", "self_speculative")
    )
    # A prompt of as many tokens as words, and 12 tokens of which the last is not processed.
    words = [
        sum(len(prompt[-1]["content"].split()) + 11 for prompt in demo.COMMANDS),
        sum(len(prompt.split()) + 11 for prompt in demo.PROMPTS[:3]),
    ]
    assert plain == [(tokens, tokens) for tokens in words]
    assert all(early == late > tokens for (early, late), tokens in zip(fast, words, strict=True))
    assert figures["identical answers"] == ["6 of 6", "3 of 3"]


def test_both_answers_are_the_text_of_the_model(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo.py", "--model", checkpoint, "--max-new-tokens", "8", "--color", "always") == 0
    plain = re.sub("\033\\[\\d*m", "", capsys.readouterr().out)
    answer = " ".join(f"w{token}" for token in kit.without_cache(kit.mixed(), [0] * 8, 8))
    question = demo.COMMANDS[0][-1]["content"]
    assert len(question.split()) == 8
    shown = plain[plain.index(question) : plain.index("[commands 2/6]")].splitlines()
    assert shown.count(answer) == 2


@pytest.mark.parametrize(
    ("options", "variables", "colored"),
    [
        ([], {}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {}, False),
    ],
)
def test_accepted_tokens_are_green_when_that_is_wanted(
    checkpoint: str,
    options: list[str],
    variables: dict[str, str],
    colored: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(monkeypatch, "demo.py", "--model", checkpoint, "--max-new-tokens", "8", *options) == 0
    shown = capsys.readouterr().out
    assert ("Green" in shown) == colored
    accepted = sum(int(count) for count in re.findall(r"(\d+) of \d+ drafts accepted", shown))
    green = re.findall("\033\\[32m(.*?)\033\\[0m", shown)
    words = [word for piece in green for word in piece.split() if word.startswith("w")]
    assert len(words) == (accepted if colored else 0)
    assert accepted > 0


@pytest.mark.parametrize(
    ("terminal", "variables", "colored"),
    [(True, {}, True), (True, {"NO_COLOR": "1"}, False), (True, {"NO_COLOR": ""}, True), (False, {}, False)],
)
def test_by_default_a_terminal_decides_about_colour(
    terminal: bool, variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Screen(terminal))
    assert program.use_color("auto") == colored


class Screen(io.StringIO):
    """A standard output that is a terminal or is not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_demo_shows_the_adapters_of_the_checkout(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo.py", "--max-new-tokens", "8", checkout=checkout) == 0
    shown = capsys.readouterr().out
    assert "with the checkout's adapters" in shown
    assert figures_of(shown)["exit_layer"] == ["2", "2"]
    assert figures_of(shown)["num_draft_tokens"] == ["3", "3"]


def test_the_base_alone_names_no_exit(
    chatting: str, bare_checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo.py", "--model", "demo-base", "--max-new-tokens", "8", checkout=bare_checkout) == 0
    assert "names no exit layer" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["demo", "demo-base"])
def test_programs_take_the_demo_model_with_and_without_its_adapters(
    checkout: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", model, "--prompt", "w1 w5 w9", "--exit-layer", "2", "--max-new-tokens", "8"]
    assert run(monkeypatch, "generate.py", *options, checkout=checkout) == 0
    base = [f"w{token}" for token in kit.without_cache(kit.mixed(), [1, 5, 9], 8)]
    assert (capsys.readouterr().out.split() == base) == (model == "demo-base")


@pytest.mark.parametrize("name", ["demo.py", "generate.py", "training/generate_data.py"])
def test_a_checkout_without_the_adapters_is_told(
    name: str, bare_checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("w1\n", encoding="utf-8")
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    more = {
        "demo.py": [],
        "generate.py": prompts,
        "training/generate_data.py": [*prompts, "--out", str(tmp_path / "o")],
    }
    assert run(monkeypatch, name, "--model", "demo", *more[name], checkout=bare_checkout) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert str(bare_checkout / program.DIFFERENCE) in line and "demo-base" in line


def test_the_demo_with_its_adapters_is_not_trained_further_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model": "demo", "data": {"train": "rows.jsonl"}, "output_dir": "run"}))
    for name, arguments in (("training/finetune.py", [str(recipe)]), ("training/benchmark.py", ["--model", "demo"])):
        assert run(monkeypatch, name, *arguments) == 2
        assert "train from demo-base; to go on from adapters use lora.continue_from" in capsys.readouterr().err


def write_recipe(path: Path, model: str = "demo-base", **lora: object) -> None:
    """Writes a recipe for adapters on a tiny model, of two steps at most, which trains exits 1 and 2."""
    written = {
        "model": model,
        "data": {"train": "nowhere.jsonl", "eval": "nowhere.jsonl"},
        "output_dir": "nowhere",
        "method": "lora",
        "lora": {"rank": 2, "merge": False, **lora},
        "exits": {"exit_layers": [1, 2], "curriculum": "fixed", "weights": "equal"},
        "trainer": {"max_steps": 2, "use_cpu": True, "disable_tqdm": True},
    }
    path.write_text(yaml.safe_dump(written), encoding="utf-8")


@pytest.fixture
def chatting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that can be asked messages, which stands in for the demo model."""
    tokenizer = kit.word_tokenizer(kit.VOCAB)
    tokenizer.add_special_tokens({"eos_token": "w1", "pad_token": "w1"})
    turns = "{% for message in messages %}w2 {{ message['content'] }} {% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}w3 {% endif %}"
    # Where a program that is started by another one looks for it as well.
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path))
    folder = tmp_path / "smollm2-135m-instruct"
    kit.mixed().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert demo.fetch() == folder
    return str(folder)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that another one starts run in this process, where all libraries are loaded already, on few rows."""

    def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == sys.executable
        if "--rows" in command:
            command[command.index("--rows") + 1] = "50"
        return subprocess.CompletedProcess(command, run(monkeypatch, *command[1:]))

    monkeypatch.setattr(subprocess, "run", start)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kept", [True, False])
def test_demo_trains_and_shows_what_came_out(
    chatting: str,
    bare_checkout: Path,
    kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_recipe(tmp_path / "recipe.yaml")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    options = ["--train-minutes", "1", "--recipe", str(tmp_path / "recipe.yaml"), "--max-new-tokens", "4"]
    options += ["--exit-layer", "1", "--num-draft-tokens", "2", "--dtype", "float32"]
    options += ["--output-dir", str(tmp_path / "run")] if kept else []
    assert run(monkeypatch, "demo.py", *options, checkout=bare_checkout) == 0
    output = capfd.readouterr()
    assert "Training for at most 1 minutes" in output.out
    assert '"train_loss"' in output.out
    assert figures_of(output.out)["exit_layer"] == ["1", "1"]
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file() == kept
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.usefixtures("in_this_process")
def test_a_training_that_fails_ends_the_demo_and_leaves_nothing(
    chatting: str,
    bare_checkout: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_recipe(tmp_path / "recipe.yaml", targets=["nothing"])
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    options = ["--train-minutes", "1", "--recipe", str(tmp_path / "recipe.yaml"), "--exit-layer", "1"]
    assert run(monkeypatch, "demo.py", *options, "--num-draft-tokens", "2", checkout=bare_checkout) == 2
    errors = capfd.readouterr().err
    assert "lora.targets=('nothing',)" in errors
    assert errors.splitlines()[-1].startswith("error: training/finetune.py ended with status 2")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ([], {"model": "other"}, "has model: other; --train-minutes trains demo-base"),
        (["--exit-layer", "3", "--num-draft-tokens", "2"], {}, "exit_layer=3 is not trained by --recipe"),
        (["--exit-layer", "3", "--num-draft-tokens", "2"], {}, "pass as --exit-layer one of 1, 2,"),
        (["--exit-layer", "9", "--num-draft-tokens", "2"], {}, "exit_layer=9 is out of range"),
        (["--exit-layer", "1", "--num-draft-tokens", "0"], {}, "num_draft_tokens=0 is out of range"),
        (["--exit-layer", "1"], {}, "needs the adapters in"),
        ([], {"merge": True}, "it needs method: lora and merge: false"),
        (["--output-dir", "."], {}, "--output-dir . is there already"),
        (["--recipe", "nothing.yaml"], {}, "--recipe nothing.yaml is no file"),
    ],
)
def test_mistakes_are_found_before_training(
    chatting: str,
    bare_checkout: Path,
    options: list[str],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_recipe(tmp_path / "recipe.yaml", **changes)
    arguments = ["--train-minutes", "1", "--recipe", str(tmp_path / "recipe.yaml"), *options]
    assert run(monkeypatch, "demo.py", *arguments, checkout=bare_checkout) == 2
    output = capsys.readouterr()
    assert message in output.err.splitlines()[-1]
    assert "Writing" not in output.out


def test_the_demo_says_which_keys_of_a_recipe_it_replaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo.py", "--help") == 0
    shown = capsys.readouterr().out
    assert [
        key for key in ("data.train", "data.eval", "max_minutes", "trainer.save_strategy") if key not in shown
    ] == []


def test_the_recipe_of_the_demo_is_one_that_it_can_follow() -> None:
    recipe = read_recipe(ROOT / "configs" / "smollm2-135m-commands.yaml")
    assert recipe.model == "demo-base"
    assert recipe.lora is not None and not recipe.lora.merge


# Other programs


def test_only_strings_become_messages() -> None:
    tokenizer = kit.word_tokenizer()
    messages = [{"role": "user", "content": "w2"}]
    assert as_chat(["w1", messages], tokenizer) == ["w1", messages]
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert as_chat(["w1", messages], tokenizer) == [[{"role": "user", "content": "w1"}], messages]


def test_numbers_of_a_list_are_told_once_and_in_rising_order() -> None:
    assert program.read_numbers("--exit-layers", "12, 6,12") == [6, 12]


def test_a_mark_before_the_first_prompt_of_a_file_is_dropped(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"\xef\xbb\xbfw1 w5\n")
    assert prompts_of(prompts) == ["w1 w5"]


@pytest.mark.parametrize(("content", "message"), [(b"\n", "holds no prompt"), (b"\xff\xfe", "is no UTF-8 text")])
def test_bad_prompt_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    with pytest.raises(ValueError, match=f"prompts.txt {message}"):
        prompts_of(prompts)


@pytest.mark.parametrize("program", ["generate.py", "demo.py", "benchmark.py"])
def test_programs_explain_themselves(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, program, "--help") == 0
    assert "--model" in capsys.readouterr().out


def test_a_reader_that_stops_early_ends_a_program_quietly(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python closes its output when it ends, and would complain there."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as output:
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"A control: nobody reads it.")
        monkeypatch.setattr(sys, "stdout", output)
        options = ["--model", checkpoint, "--exit-layer", "2", "--json", "--prompt", "w1 w5"]
        assert run(monkeypatch, "generate.py", *options) == 0
    assert "error" not in capsys.readouterr().err
