"""The voice-command task: what its rows hold, and that its splits share neither phrasings nor open values."""

from __future__ import annotations

import importlib.util
import itertools
import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parent.parent / "training" / "voice_commands.py"


def load() -> ModuleType:
    """Returns the program as a module."""
    spec = importlib.util.spec_from_file_location("voice_commands", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["voice_commands"] = module
    spec.loader.exec_module(module)
    return module


task = load()
PAIRS = list(itertools.combinations(task.SPLITS, 2))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs the program in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [PROGRAM.name, *arguments])
    try:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def open_values(split: str) -> set[str]:
    """Returns all values that slots filled from open pools can have in a split, in lower case."""
    pools = {pool for phrasing in task.phrasings(split) for _, pool in task.slots_of(phrasing.text)}
    return {value.lower() for pool in pools - set(task.CLOSED) for value in task.pool_values(pool, split)}


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    rows = task.generate("train", 300, 0)
    assert task.generate("train", 300, 0) == rows
    assert task.generate("train", 300, 1) != rows
    assert task.generate("train", 300, -1) != task.generate("train", 300, 1)


def test_the_rows_of_a_seed_stay_as_they_are() -> None:
    row = task.generate("validation", 3, 0)[1]
    command = "i should call my nephew about the loose railing today so please remind me"
    task_said = "call my nephew about the loose railing"
    answer = f'{{"intent": "create_reminder", "slots": {{"task": "{task_said}", "date": "today"}}}}'
    assert row["prompt"] == [{"role": "system", "content": task.SYSTEM}, {"role": "user", "content": command}]
    assert row["completion"] == answer


@pytest.mark.parametrize("split", task.SPLITS)
def test_completions_are_one_line_of_json_with_values_copied_from_the_command(split: str) -> None:
    for row in task.generate(split, 2000, 0):
        system, user = row["prompt"]
        assert (system["role"], user["role"]) == ("system", "user")
        answer = json.loads(row["completion"])
        assert json.dumps(answer) == row["completion"] and "\n" not in row["completion"]
        assert list(answer) == ["intent", "slots"]
        order = task.INTENTS[answer["intent"]].slots
        assert list(answer["slots"]) == [slot for slot in order if slot in answer["slots"]]
        assert all(value and value in user["content"] for value in answer["slots"].values())
        assert "{" not in user["content"]


def test_the_system_sentence_is_short() -> None:
    assert len(task.SYSTEM.split()) < 20


def test_there_are_many_intents_and_phrasings_in_every_split() -> None:
    assert len(task.INTENTS) >= 18
    for split, least in zip(task.SPLITS, (8, 3, 3), strict=True):
        counts = Counter(phrasing.intent for phrasing in task.phrasings(split))
        assert set(counts) == set(task.INTENTS)
        assert min(counts.values()) >= least


def test_phrasings_use_known_slots_and_pools_and_every_slot_can_be_learnt() -> None:
    for name, intent in task.INTENTS.items():
        used = {split: {s for p in intent.phrasings(split) for s, _ in task.slots_of(p)} for split in task.SPLITS}
        assert used["train"] == set(intent.slots), name
        assert used["validation"] | used["test"] <= used["train"], name
    for split in task.SPLITS:
        for phrasing in task.phrasings(split):
            assert phrasing.count >= 1


def test_some_intents_have_no_slots_and_some_phrasings_leave_slots_out() -> None:
    assert sum(not intent.slots for intent in task.INTENTS.values()) >= 3
    partial = [p for p in task.phrasings("train") if len(task.slots_of(p.text)) < len(task.INTENTS[p.intent].slots)]
    assert len(partial) > 50


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_splits_share_no_phrasing(one: str, other: str) -> None:
    texts = {split: [phrasing.text for phrasing in task.phrasings(split)] for split in (one, other)}
    assert len(set(texts[one])) == len(texts[one])
    # Without the slots' names, so that no phrasing differs by a pool alone.
    bare = {split: {task.SLOT.sub("_", text) for text in texts[split]} for split in texts}
    assert bare[one].isdisjoint(bare[other])


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_splits_share_no_value_of_an_open_slot(one: str, other: str) -> None:
    assert open_values(one) and open_values(one).isdisjoint(open_values(other))


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_splits_share_no_command(one: str, other: str) -> None:
    commands = [{row["prompt"][1]["content"] for row in task.generate(split, 2000, 0)} for split in (one, other)]
    assert commands[0].isdisjoint(commands[1])


@pytest.mark.parametrize("split", task.SPLITS)
def test_no_command_occurs_twice(split: str) -> None:
    rows = task.generate(split, 4000, 5)
    assert len({row["prompt"][1]["content"] for row in rows}) == len(rows) == 4000


def test_two_slots_of_one_pool_get_different_values() -> None:
    phrasing = task.Phrasing("convert_units", "{amount} {from_unit:length} in {to_unit:length}", "test")
    numbers, units = (len(task.pool_values(pool, "test")) for pool in ("amount", "length"))
    assert phrasing.count == numbers * units * (units - 1)
    commands = [phrasing.command(number) for number in range(phrasing.count)]
    assert len({command for command, _ in commands}) == phrasing.count
    assert all(slots["from_unit"] != slots["to_unit"] for _, slots in commands)


def test_every_intent_is_about_as_frequent_while_its_commands_last() -> None:
    intents = Counter(json.loads(row["completion"])["intent"] for row in task.generate("train", 3100, 0))
    assert intents["tell_joke"] == 11
    assert all(70 <= intents[name] <= 160 for name, intent in task.INTENTS.items() if intent.slots)


def test_all_commands_of_a_small_task_can_be_made_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    jokes = {"tell_joke": task.INTENTS["tell_joke"]}
    monkeypatch.setattr(task, "INTENTS", jokes)
    rows = task.generate("test", 3, 0)
    assert {row["prompt"][1]["content"] for row in rows} == set(jokes["tell_joke"].phrasings("test"))
    with pytest.raises(ValueError, match="rows=4 is out of range; split 'test' has at most 3 unique rows"):
        task.generate("test", 4, 0)


def test_commands_that_two_phrasings_share_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    same = task.Intent(
        slots=("state",), train=("lights {state}",), validation=("lights on",), test=("lights {state}", "lights on")
    )
    monkeypatch.setattr(task, "INTENTS", {"switch_lights": same})
    assert len(task.generate("test", 2, 0)) == 2
    with pytest.raises(ValueError, match="rows=3 is out of range; split 'test' has at most 2 unique rows"):
        task.generate("test", 3, 0)


def test_the_program_writes_json_lines_to_a_file_or_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--split", "test", "--rows", "20", "--seed", "3"]
    assert run(monkeypatch, *arguments, "--out", str(out)) == 0
    assert capsys.readouterr().out == ""
    assert run(monkeypatch, *arguments) == 0
    text = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert [json.loads(line) for line in text.splitlines()] == task.generate("test", 20, 3)


def test_plain_prompts_are_the_bare_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--split", "test", "--rows", "5", "--plain") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = task.generate("test", 5, 0)
    assert [row["prompt"] for row in rows] == [row["prompt"][1]["content"] for row in expected]
    assert [row["completion"] for row in rows] == [row["completion"] for row in expected]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "dev", "--rows", "5"], "split='dev' is unknown; the splits are train, validation, test"),
        (["--split", "test", "--rows", "0"], "rows=0 is out of range"),
        (["--split", "train", "--rows", "100000000"], "rows=100000000 is out of range; allowed are 1 to 1000000"),
        (["--split", "test", "--rows", "3", "--out", "nowhere/a.jsonl"], "the folder nowhere is not there"),
        (["--split", "test", "--rows", "5", "--out", "/nowhere/rows.jsonl"], "/nowhere/rows.jsonl"),
    ],
)
def test_a_bad_argument_ends_with_status_2_and_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and message in output.err
    assert output.err.count("\n") == 1
