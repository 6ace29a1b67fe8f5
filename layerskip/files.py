"""Files that are whole at any time: the new one takes the old one's place once it is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a hidden file beside `path` to write to, which takes its place when the block ends.

    Where the block fails `path` stays as it was, and the hidden file is removed.
    """
    # The ending is kept, since some libraries tell the format by it.
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file in UTF-8, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def whole_lines(path: Path) -> bytes:
    """Returns a file without the unfinished last line that a killed run may have left; nothing where there is no file.

    Raises:
        OSError: the file cannot be read.
    """
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def drop_unfinished_line(path: Path) -> None:
    """Cuts a file, where there is one, to its whole lines, so that more can be added.

    Raises:
        OSError: the file cannot be read or written to.
    """
    if path.exists():
        os.truncate(path, len(whole_lines(path)))


def add_lines(path: Path, lines: Sequence[str]) -> None:
    """Adds lines to a file, written as one piece, so that an interruption leaves whole ones."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))
