"""Prompts in a file: the lines of a .txt file, or the rows of a .jsonl file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A string, or a list of messages.
Prompt = str | list[dict[str, Any]]
# Where a row's prompt may stand, in the order in which it is looked for, and what it must be.
MESSAGES = "a list of messages, each with role and content as strings"
WANTED = {
    "prompt": f"a string or {MESSAGES}",
    "messages": MESSAGES,
    "question": "a string",
    "turns": "a list of strings",
    "text": "a string",
}


@dataclass(frozen=True)
class PromptRow:
    """A prompt and where it comes from.

    Attributes:
        where: what messages call it, with file and line.
        prompt: a string, or a list of messages.
        category: what kind of prompt it is, or `None`.
        columns: the whole row of a .jsonl file; empty for a line of text.
    """

    where: str
    prompt: Prompt
    category: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def _lines(path: Path) -> list[tuple[str, str]]:
    """Returns the lines of a text file that are not blank, each with what messages call it."""
    lines = []
    # As bytes, so that the line that is no text can be named.
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        where = f"line {number} of {path}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is no UTF-8 text: {error}.") from error
        if text.strip():
            lines.append((where, text))
    if not lines:
        raise ValueError(f"{path} holds no prompt; write one a line.")
    return lines


def prompts_of(path: Path) -> list[Prompt]:
    """Returns the prompts of a file; what may be in it, and what is raised, is as of `prompt_rows`."""
    return [row.prompt for row in prompt_rows(path)]


def prompt_rows(path: Path) -> list[PromptRow]:
    """Returns the prompts of a .txt file, one a line, or of a .jsonl file.

    A row of the latter has `prompt` (a string or a list of messages), or `messages` (the assistant's last turn is left
    out), or `question`, or `turns` (what a user says in turn, of which the first is asked), or `text`, the first of
    these that it has; and perhaps a `category`. Other columns are kept as they are.

    Raises:
        OSError: the file cannot be read.
        ValueError: a file of another kind, one without prompts, or a row without one; it names file and line.
    """
    if path.suffix.lower() not in (".txt", ".jsonl"):
        raise ValueError(f"{path} ends with {path.suffix!r}; allowed are .txt and .jsonl.")
    if path.suffix.lower() == ".txt":
        return [PromptRow(where, line) for where, line in _lines(path)]
    rows = [
        PromptRow(where, _prompt_of(row, where), _category_of(row, where), row)
        for where, row in json_rows(path.read_bytes(), str(path))
    ]
    if not rows:
        raise ValueError(f"{path} holds no rows; write one a line.")
    return rows


def json_rows(content: bytes, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a .jsonl file, each with what messages call it.

    Raises:
        ValueError: a line that is no JSON object.
    """
    # As bytes, since a text is also split at characters that may stand inside a row.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if line.strip():
            where = f"line {number} of {name}"
            yield where, _row(line, where)


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        # Half a surrogate pair can be written in JSON, but is no text.
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read as JSON text: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object.")
    return row


def _prompt_of(row: dict[str, Any], where: str) -> Prompt:
    name = next((name for name in WANTED if row.get(name) is not None), None)
    if name is None:
        *others, last = WANTED
        raise ValueError(f"{where} has {', '.join(row) or 'nothing'}, but neither {', '.join(others)} nor {last}.")
    value = row[name]
    is_wanted = {
        "prompt": isinstance(value, str) or _are_messages(value),
        "messages": _are_messages(value),
        "question": isinstance(value, str),
        "turns": isinstance(value, list) and all(isinstance(turn, str) for turn in value),
        "text": isinstance(value, str),
    }
    if not is_wanted[name]:
        raise ValueError(f"{where}: {name} is not {WANTED[name]}.")
    while name == "messages" and value and value[-1]["role"] == "assistant":
        value = value[:-1]
    if name == "turns" and value:
        value = value[0]
    if not value or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{where}: {name} holds nothing to answer.")
    return value


def _category_of(row: dict[str, Any], where: str) -> str | None:
    category = row.get("category")
    if not isinstance(category, str | None):
        raise ValueError(f"{where}: category is not a string.")
    return category


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts the place of what cannot be asked or answered in front of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def as_chat(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None) -> list[Prompt]:
    """Returns each string as a user's message where the tokenizer has a chat template; all else as it stands."""
    if tokenizer is None or tokenizer.chat_template is None:
        return list(prompts)
    return [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
