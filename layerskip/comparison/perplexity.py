"""Perplexity of the last layer and of exits on a text, in windows that overlap."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layerskip.comparison.losses import LossSums, batch_losses
from layerskip.decoding.engine import Engine
from layerskip.prompt_file import json_rows
from layerskip.training.exit_loss import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_DEFAULT_WINDOW = 1024


@dataclass(frozen=True)
class Window:
    """A span of a document that passes the model at once.

    Attributes:
        document: which document it is from, counted from 0.
        input_ids: its tokens.
        context: how many of them, from the first on, are context only; the others are predicted.
    """

    document: int
    input_ids: list[int]
    context: int

    @property
    def labels(self) -> list[int]:
        """The tokens that are predicted; `IGNORED` in place of those that are not."""
        return [IGNORED] * self.context + self.input_ids[self.context :]


def read_documents(path: Path) -> list[str]:
    """Returns the documents of a file: a .txt file is one, line ends included; a .jsonl file has one in each `text`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is of another kind, no UTF-8 text or empty, or a row has no text; it names file and line.
    """
    kind, content = path.suffix.lower(), path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if kind not in (".txt", ".jsonl"):
        raise ValueError(f"{path} ends with {path.suffix!r}; allowed are .txt and .jsonl.")
    if kind == ".txt":
        try:
            documents = [content.decode()]
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise ValueError(f"line {line} of {path} is no UTF-8 text: {error}.") from error
    else:
        documents = []
        for where, row in json_rows(content, str(path)):
            if not isinstance(row.get("text"), str):
                raise ValueError(f"{where} has {', '.join(row) or 'nothing'}, but no text that is a string.")
            documents.append(row["text"])
    if not any(documents):
        raise ValueError(f"{path} holds no text.")
    return documents


def window_size(window: int | None, stride: int | None, positions: int) -> tuple[int, int]:
    """Returns window and stride: those asked for, else min(1024, positions) and half a window.

    Raises:
        ValueError: a window of less than 2 tokens or more than `positions`, or a stride outside 1 to window − 1.
    """
    chosen = min(LONGEST_DEFAULT_WINDOW, positions) if window is None else window
    if not 2 <= chosen <= positions:
        raise ValueError(f"--window {chosen} is out of range; allowed are 2 to {positions}, the model's positions.")
    step = max(1, chosen // 2) if stride is None else stride
    if not 1 <= step < chosen:
        raise ValueError(
            f"--stride {step} is out of range; allowed are 1 to {chosen - 1}, less than the window of {chosen} tokens, "
            "so that every token has another before it."
        )
    return chosen, step


def windows_of(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, window: int, stride: int) -> list[Window]:
    """Returns the windows of all documents, in order, with special tokens as the tokenizer adds them to a text.

    Window k of a document is its tokens k·stride to k·stride + window − 1, counted from 0; the last window is the
    first that reaches the document's end. Each predicts the tokens that no window before it holds, and the first one
    all but its first token. So each token but a document's very first is predicted exactly once, and past the first
    window from at least window − stride tokens before it. A document of fewer than two tokens has no window.
    """
    windows = []
    for document, text in enumerate(documents):
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        done = 1
        for start in range(0, len(ids), stride):
            stop = min(start + window, len(ids))
            if done < stop:
                windows.append(Window(document, ids[start:stop], done - start))
            done = stop
            if stop == len(ids):
                break
    return windows


def text_losses(
    engine: Engine, windows: Sequence[Window], exit_layers: Sequence[int], batch_size: int
) -> Iterator[tuple[list[int], LossSums]]:
    """Yields, batch by batch, indices of windows and their summed losses; the longest windows come first.

    Logits are made for some tokens at a time, so that neither an exit nor the last layer holds those of a batch. A
    progress bar on standard error counts windows.

    Args:
        engine: the model, in eval mode, with a tokenizer.
        windows: of `windows_of`.
        exit_layers: the exits, counted from 1, rising; none for the last layer alone.
        batch_size: windows in a pass.

    Raises:
        ValueError: an exit that the model does not have, or a model in train mode.
    """
    rows = [{"input_ids": window.input_ids, "labels": window.labels} for window in windows]
    yield from batch_losses(engine, rows, exit_layers, batch_size, unit="window")


@dataclass
class TextSums:
    """Summed losses of windows, as they come in.

    Attributes:
        windows: all of them.
        sums: of each; zeros where none has come in.
    """

    windows: Sequence[Window]
    sums: LossSums

    @classmethod
    def empty(cls, windows: Sequence[Window], exit_layers: Sequence[int]) -> TextSums:
        """Returns sums into which nothing has come."""
        return cls(windows, LossSums.zeros(len(windows), exit_layers))

    def items(self, windows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens `(items,)` and summed losses `(items, 1 + exits)`, the last layer's first.

        The items are the documents that some of `windows` are from or, of a single document, these windows.
        """
        losses = np.column_stack([self.sums.last, self.sums.exits])
        documents = [self.windows[index].document for index in windows]
        if len({window.document for window in self.windows}) == 1:
            return self.sums.tokens[windows], losses[windows]
        found, places = np.unique(documents, return_inverse=True)
        tokens, summed = np.zeros(len(found)), np.zeros((len(found), losses.shape[1]))
        np.add.at(tokens, places, self.sums.tokens[windows])
        np.add.at(summed, places, losses[windows])
        return tokens, summed
