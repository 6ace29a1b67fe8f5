"""Prompt files of every kind, and the file and line that a bad one names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerskip.prompt_file import prompt_rows, prompts_of


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a"}, "a"),
        ({"prompt": [{"role": "user", "content": "a"}]}, [{"role": "user", "content": "a"}]),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            [{"role": "user", "content": "a"}],
        ),
        ({"question": "a", "answer": "#### 1"}, "a"),
        ({"question_id": 82, "category": "writing", "turns": ["a", "b"]}, "a"),
        ({"text": "a"}, "a"),
        ({"prompt": None, "question": "a"}, "a"),
        ({"prompt": "a", "question": "b"}, "a"),
    ],
)
def test_a_row_has_its_prompt_in_one_of_five_columns(row: dict[str, Any], prompt: Any, tmp_path: Path) -> None:
    path = write(tmp_path, "rows.jsonl", json.dumps(row) + "\n")
    (read,) = prompt_rows(path)
    assert (read.prompt, read.category, read.columns) == (prompt, row.get("category"), row)
    assert prompts_of(path) == [prompt]


def test_blank_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = prompt_rows(write(tmp_path, "lines.txt", "a\n\n  \nb\n"))
    assert [(row.prompt, row.category, row.columns) for row in rows] == [("a", None, {}), ("b", None, {})]
    assert rows[1].where == f"line 4 of {tmp_path / 'lines.txt'}"
    rows = prompt_rows(write(tmp_path, "rows.jsonl", '\n{"text": "a\\u2028b"}\n'))
    assert [(row.prompt, row.where) for row in rows] == [("a\u2028b", f"line 2 of {tmp_path / 'rows.jsonl'}")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON text"),
        ("[" * 100_000, "cannot be read as JSON text"),
        ('"a"', "is no JSON object"),
        ("{}", "has nothing, but neither prompt, messages, question, turns nor text"),
        ('{"turns": "a"}', "turns is not a list of strings"),
        ('{"turns": ["a", 1]}', "turns is not a list of strings"),
        ('{"turns": []}', "turns holds nothing to answer"),
        ('{"turns": ["", "b"]}', "turns holds nothing to answer"),
        ('{"question": ["a"]}', "question is not a string"),
        ('{"messages": "a"}', "messages is not a list of messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "messages holds nothing to answer"),
        ('{"prompt": ""}', "prompt holds nothing to answer"),
        ('{"prompt": "a", "category": 3}', "category is not a string"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(content: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, "rows.jsonl", f'{{"prompt": "a"}}\n\n{content}\n')
    with pytest.raises(ValueError, match=message) as raised:
        prompt_rows(path)
    assert str(raised.value).startswith(f"line 3 of {path}")


def test_a_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"a\nb\xff\n")
    with pytest.raises(ValueError, match=r"line 2 of .*lines\.txt is no UTF-8 text"):
        prompt_rows(path)


@pytest.mark.parametrize(("name", "message"), [("rows.jsonl", "holds no rows"), ("lines.txt", "holds no prompt")])
def test_a_file_without_prompts_is_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_rows(write(tmp_path, name, "\n\n"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends with '\.csv'; allowed are \.txt and \.jsonl"):
        prompt_rows(write(tmp_path, "rows.csv", "a\n"))
