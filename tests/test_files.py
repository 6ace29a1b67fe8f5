"""A file that is replaced is whole at any time, and one that grows has whole lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerskip.files import add_lines, drop_unfinished_line, replacing, whole_lines, write_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is there already."""
    path = tmp_path / "table.csv"
    path.write_text("old\n")
    return path


def names(path: Path) -> list[str]:
    return [file.name for file in path.parent.iterdir()]


def test_the_old_file_stays_until_the_new_one_is_written(path: Path) -> None:
    with replacing(path) as draft:
        draft.write_text("new\n")
        assert path.read_text() == "old\n"
        assert (draft.parent, draft.suffix) == (path.parent, path.suffix)
    assert path.read_text() == "new\n"
    assert names(path) == ["table.csv"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_beside_it(path: Path, error: type[BaseException]) -> None:
    def fail(draft: Path) -> None:
        draft.write_text("ne")
        raise error

    with pytest.raises(error), replacing(path) as draft:
        fail(draft)
    assert path.read_text() == "old\n"
    assert names(path) == ["table.csv"]


def test_a_block_that_fails_before_it_writes_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing yet"), replacing(tmp_path / "table.csv"):
        raise ValueError("nothing yet")
    assert not list(tmp_path.iterdir())


def test_text_is_written_in_utf_8(path: Path) -> None:
    write_text(path, "γ = 4\n")
    assert path.read_bytes() == "γ = 4\n".encode()


def test_text_that_cannot_be_written_leaves_the_old_file(path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half a pair: \ud800")
    assert path.read_text() == "old\n"
    assert names(path) == ["table.csv"]


def test_lines_are_added_behind_those_that_are_there(path: Path) -> None:
    add_lines(path, ["one", "γ"])
    add_lines(path, [])
    add_lines(path, ["three"])
    assert path.read_bytes() == "old\none\nγ\nthree\n".encode()


def test_the_first_line_makes_the_file(tmp_path: Path) -> None:
    add_lines(tmp_path / "lines.jsonl", ["one"])
    assert (tmp_path / "lines.jsonl").read_text() == "one\n"


@pytest.mark.parametrize(
    ("content", "whole"),
    [(b"one\ntwo\n", b"one\ntwo\n"), (b"one\ntw", b"one\n"), (b"on", b""), (b"", b""), (b"one\n\xce", b"one\n")],
)
def test_an_unfinished_last_line_is_not_read_and_can_be_cut_off(path: Path, content: bytes, whole: bytes) -> None:
    path.write_bytes(content)
    assert whole_lines(path) == whole
    assert path.read_bytes() == content
    drop_unfinished_line(path)
    assert path.read_bytes() == whole


def test_a_missing_file_has_no_lines_and_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    drop_unfinished_line(path)
    assert whole_lines(path) == b""
    assert not list(tmp_path.iterdir())
