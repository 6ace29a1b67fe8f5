"""Prompts in a file: the lines of a .txt file, or the rows of a .jsonl file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A string, or a list of messages.
Prompt = str | list[dict[str, Any]]
# Where a row's prompt may stand, and what it must be.
MESSAGES = "a list of messages, each with role and content as strings"
WANTED = {"prompt": f"a string or {MESSAGES}", "messages": MESSAGES, "text": "a string"}


def read_lines(path: Path) -> list[str]:
    """Returns the prompts of a text file, one a line.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds none, or is no UTF-8 text.
    """
    try:
        # utf-8-sig drops the mark that some editors put before the first line.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}.") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompt; write one a line.")
    return lines


def prompts_of(path: Path) -> list[Prompt]:
    """Returns the prompts of a .txt file, one a line, or of a .jsonl file.

    A row of the latter has `prompt` (a string or a list of messages), or `messages` (the assistant's last turn is left
    out), or `text`, the first of these that it has; other columns are ignored.

    Raises:
        OSError: the file cannot be read.
        ValueError: a file of another kind, one without prompts, or a row without one.
    """
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise ValueError(f"{path} ends with {path.suffix!r}; allowed are .txt and .jsonl.")
    if path.suffix.lower() == ".txt":
        return list(read_lines(path))
    prompts = [_prompt_of(row, where) for where, row in json_rows(path.read_bytes(), str(path))]
    if not prompts:
        raise ValueError(f"{path} holds no rows; write one a line.")
    return prompts


def json_rows(content: bytes, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a .jsonl file, each with what messages call it.

    Raises:
        ValueError: a line that is no JSON object.
    """
    # As bytes, since a text is also split at characters that may stand inside a row.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if line.strip():
            where = f"row {number} of {name}"
            yield where, _row(line, where)


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        # Half a surrogate pair can be written in JSON, but is no text.
        json.dumps(row, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"{where} cannot be read as JSON text: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object.")
    return row


def _prompt_of(row: dict[str, Any], where: str) -> Prompt:
    name = next((name for name in WANTED if row.get(name) is not None), None)
    if name is None:
        raise ValueError(f"{where} has {', '.join(row) or 'nothing'}, but neither prompt nor messages nor text.")
    value = row[name]
    is_string = isinstance(value, str) and name != "messages"
    is_messages = isinstance(value, list) and all(map(_is_message, value)) and name != "text"
    if not is_string and not is_messages:
        raise ValueError(f"{where}: {name} is not {WANTED[name]}.")
    while name == "messages" and value and value[-1]["role"] == "assistant":
        value = value[:-1]
    if not value:
        raise ValueError(f"{where}: {name} holds nothing to answer.")
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
