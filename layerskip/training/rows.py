"""Rows of training data as token ids, and as labels that say which of them count."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerskip.training.exit_loss import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The shapes a row may have.
SHAPES: tuple[tuple[str, ...], ...] = (("text",), ("messages",), ("prompt", "completion"))
# What a row may say beside them.
OPTIONAL = ("finish_reason", "guard")
COLUMN_NAMES = ("text", "messages", "prompt", "completion", *OPTIONAL)
ACCEPTED = "text, or messages, or prompt and completion"

Span = tuple[int, int]


@dataclass(frozen=True)
class RowTokenizer:
    """Tokenises rows as generation sees them.

    Attributes:
        tokenizer: with an EOS token, and with a chat template where rows hold messages.
        completion_only: whether only what the model is to answer counts; `None`: so for prompt and completion, and
            everything for other rows.
        max_length: tokens; longer rows are cut at the end.
    """

    tokenizer: PreTrainedTokenizerBase
    completion_only: bool | None
    max_length: int

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Returns `input_ids` and `labels`, both `(tokens,)`; a label is its token's id, or −100: does not count.

        A text and a completion that are strings end with EOS, unless the row's `finish_reason` is "length"; messages
        end as the chat template ends them. The first token never counts, since nothing predicts it.

        Args:
            row: `text`, or `messages`, or `prompt` and `completion`, each of these a string or a list of messages; and
                perhaps `finish_reason`.

        Raises:
            ValueError: parts of another type, messages without role or content, no chat template, or one that does not
                tell where an answer begins.
        """
        finished = row.get("finish_reason") != "length"
        if "text" in row:
            ids, spans = self._text(row["text"], finished)
        elif "messages" in row:
            ids, spans = self._messages(row["messages"], finished)
        else:
            ids, spans = self._answer(row["prompt"], row["completion"], finished)
        labels = [IGNORED] * len(ids)
        for start, stop in spans:
            start = max(start, 1)
            labels[start:stop] = ids[start:stop]
        return {"input_ids": ids[: self.max_length], "labels": labels[: self.max_length]}

    def _text(self, text: Any, finished: bool) -> tuple[list[int], list[Span]]:
        if self.completion_only:
            raise ValueError(
                "completion_only=True, but in a text nothing is a completion; leave it out, or use rows of prompt and "
                "completion."
            )
        if not isinstance(text, str):
            raise ValueError(f"text is {_described(text)}; it must be a string.")
        # A blank text would teach that a text ends where it begins.
        ids = self._ended(self._from_string(text), finished) if text.strip() else []
        return ids, [(0, len(ids))]

    def _messages(self, messages: Any, finished: bool) -> tuple[list[int], list[Span]]:
        _check_messages("messages", messages)
        _check_finished(finished)
        ids = self._from_messages(messages)
        if not self.completion_only:
            return ids, [(0, len(ids))]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return ids, [self._turn(messages, index, ids) for index in turns]

    def _turn(self, messages: list[dict[str, Any]], index: int, ids: list[int]) -> Span:
        """Returns which of the ids are what the assistant wrote as `messages[index]`."""
        if index == 0:
            raise ValueError("messages[0] is the assistant's, so it answers nothing; begin with another role.")
        before = self._from_messages(messages[:index], add_generation_prompt=True)
        after = self._from_messages(messages[: index + 1])
        if not _begins(after, before) or not _begins(ids, after):
            raise ValueError(
                f"{self._template()} writes the messages up to messages[{index}] differently when others follow, so "
                "that the assistant's tokens cannot be told apart; use rows of prompt and completion, or "
                "completion_only=False."
            )
        return len(before), len(after)

    def _answer(self, prompt: Any, completion: Any, finished: bool) -> tuple[list[int], list[Span]]:
        """Returns the ids of a prompt and its completion, and which of them count."""
        start = self._prompt(prompt)
        if isinstance(completion, str):
            ids = self._ended(start + self._from_string(completion, add_special_tokens=False), finished)
        else:
            _check_messages("completion", completion)
            _check_finished(finished)
            if isinstance(prompt, str):
                raise ValueError("completion is a list of messages, but prompt is a string; write both as messages.")
            ids = self._from_messages([*prompt, *completion])
            if not _begins(ids, start):
                raise ValueError(
                    f"{self._template()} writes the prompt differently when a completion follows, so that the model "
                    "would learn to answer another prompt than it is given; write the completion as a string."
                )
        return ids, [(0 if self.completion_only is False else len(start), len(ids))]

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._from_string(prompt)
        _check_messages("prompt", prompt)
        return self._from_messages(prompt, add_generation_prompt=True)

    def _from_string(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._one_bos(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _from_messages(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> list[int]:
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {self.tokenizer.name_or_path!r} has no chat template for messages; set "
                "tokenizer.chat_template and save it with the model, or write prompt and completion as strings."
            )
        try:
            ids: Any = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"{self._template()} refuses the messages: {error}") from error
        return self._one_bos(ids)

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Drops all but one of the BOS tokens at the start: a text may write one that the tokenizer adds as well."""
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return list(ids)

    def _ended(self, ids: list[int], finished: bool) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if not finished or ids[-1:] == [eos] else [*ids, eos]

    def _template(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path!r}"


@dataclass(frozen=True)
class BlockTokenizer:
    """Tokenises a block of rows, and drops those without a token that counts.

    Where the data have the column `guard`, each token of a row gets its value, 1 (also where it is missing) or 0.

    Attributes:
        tokenise: for one row.
        columns: the data's own name of each column, as `find_columns` returns them.
        data: what the data are called in messages.
        first_row: how many rows of the data stand before those that are indexed from 0.
    """

    tokenise: RowTokenizer
    columns: Mapping[str, str]
    data: str
    first_row: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that come out."""
        return ("input_ids", "labels", "guard") if "guard" in self.columns else ("input_ids", "labels")

    def __call__(self, block: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[list[int]]]:
        """Returns `input_ids`, `labels` and perhaps `guard` of the rows that are kept.

        Args:
            block: the columns of the data.
            indices: of the block's rows.

        Raises:
            ValueError: a row that cannot be tokenised; the message tells its number, counted from 1.
        """
        kept: dict[str, list[list[int]]] = {name: [] for name in self.names}
        for offset, index in enumerate(indices):
            try:
                given = {name: block[own][offset] for name, own in self.columns.items()}
                row = self.tokenise(given)
                if "guard" in kept:
                    row["guard"] = [_guard(given["guard"])] * len(row["labels"])
            except ValueError as error:
                raise ValueError(f"row {self.first_row + index + 1} of {self.data}: {error}") from error
            if any(label != IGNORED for label in row["labels"]):
                for name, column in kept.items():
                    column.append(row[name])
        return kept


@dataclass(frozen=True)
class Packer:
    """Puts the rows of a block, each whole, one after another into rows of at most `max_length` tokens.

    A row that does not fit begins a new one, so that their order stays (next fit).
    """

    max_length: int

    def __call__(self, block: Mapping[str, Sequence[list[int]]]) -> dict[str, list[list[int]]]:
        """Returns the columns of the block and `position_ids`, which begin at 0 with every row of the block."""
        packed: dict[str, list[list[int]]] = {name: [] for name in (*block, "position_ids")}
        room = 0
        for index, ids in enumerate(block["input_ids"]):
            if len(ids) > room:
                for column in packed.values():
                    column.append([])
                room = self.max_length
            for name, rows in block.items():
                packed[name][-1] += rows[index]
            packed["position_ids"][-1] += range(len(ids))
            room -= len(ids)
        return packed


def find_columns(data: str, found: Sequence[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """Returns the data's own name of each column that a row is made of.

    Args:
        data: what the data are called in messages.
        found: the columns that they have.
        renamed: own names for some of `COLUMN_NAMES`; a row must have these.

    Raises:
        ValueError: the columns make no row, or rows of several kinds.
    """
    columns = {name: renamed.get(name, name) for name in COLUMN_NAMES}
    wanted = set(renamed) - set(OPTIONAL)
    shapes = [shape for shape in SHAPES if wanted <= set(shape) and all(columns[name] in found for name in shape)]
    if not shapes or any(own not in found for own in renamed.values()):
        raise ValueError(
            f"{data} has the columns {', '.join(found)}; accepted are {ACCEPTED}. Rename them, or say by columns what "
            f"they are called, such as {{prompt: question, completion: answer}}; columns={dict(renamed)} does not fit."
        )
    if len(shapes) > 1:
        name = shapes[0][0]
        raise ValueError(
            f"{data} has the columns {', '.join(found)}, of which several make a row; accepted are {ACCEPTED}. Choose "
            f"one by columns, such as {{{name}: {name}}}."
        )
    optional = [name for name in OPTIONAL if columns[name] in found]
    return {name: columns[name] for name in (*shapes[0], *optional)}


def _guard(value: Any) -> int:
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"guard is {_described(value)}; it must be true or false.")
    return int(value is not False)


def _begins(ids: list[int], start: list[int]) -> bool:
    return ids[: len(start)] == start


def _check_messages(name: str, messages: Any) -> None:
    if not isinstance(messages, list):
        wanted = "a list of messages" if name == "messages" else "a string or a list of messages"
        raise ValueError(f"{name} is {_described(messages)}; it must be {wanted}.")
    if not messages:
        raise ValueError(f"{name} is an empty list; it must hold at least one message.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"{name}[{index}] is {_described(message)}; it must be {{'role': …, 'content': …}}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"{name}[{index}] has no {key!r} that is a string: {reprlib.repr(message)}.")


def _check_finished(finished: bool) -> None:
    if not finished:
        raise ValueError(
            "finish_reason='length', but a chat template ends every message; write the unfinished answer as a "
            "completion that is a string, or leave the row out."
        )


def _described(value: Any) -> str:
    return "missing" if value is None else f"{reprlib.repr(value)} of type {type(value).__name__}"
