"""A file of answers that ranks make in parts: nothing written is lost, and the order is that of the prompts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip.answer_parts import AnswerParts
from layerskip.prompt_file import Prompt

PROMPTS: list[Prompt] = ["a", "b", "c", "d", "e"]
SETTINGS = {"max_new_tokens": 8, "stop_strings": None, "temperature": 0.1}


def answer_to(index: int) -> dict[str, Any]:
    # With a line separator and a number that has no short form, which must come through as they are.
    return {"prompt": PROMPTS[index], "text": f"\u2028γ{index}", "seconds": 0.1 + index / 3}


def expected() -> str:
    return "".join(json.dumps(answer_to(index), ensure_ascii=False) + "\n" for index in range(len(PROMPTS)))


@pytest.fixture
def parts(tmp_path: Path) -> AnswerParts:
    return AnswerParts(tmp_path / "out.jsonl", PROMPTS)


@pytest.fixture
def interrupted(parts: AnswerParts) -> AnswerParts:
    """Parts of a run that two ranks have begun."""
    with parts.held():
        parts.begin(SETTINGS)
        parts.add(0, {4: answer_to(4), 0: answer_to(0)})
        parts.add(1, {2: answer_to(2)})
    return parts


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(len(PROMPTS))),
    ranks=st.lists(st.integers(0, 11), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    cut=st.integers(0, 10_000),
)
def test_ranks_of_several_runs_make_one_file_in_order(order: list[int], ranks: list[int], cut: int) -> None:
    """The part that was written last loses its end, and the next run makes what is missing."""
    with tempfile.TemporaryDirectory() as folder:
        parts = AnswerParts(Path(folder, "out.jsonl"), PROMPTS)
        with parts.held():
            parts.begin(SETTINGS)
            for index, rank in zip(order, ranks, strict=True):
                parts.add(rank, {index: answer_to(index)})
        last = parts.folder / f"rank-{ranks[-1]}.jsonl"
        content = last.read_bytes()
        line = content.splitlines(keepends=True)[-1]
        last.write_bytes(content[: len(content) - 1 - cut % len(line)])
        resumed = AnswerParts(Path(folder, "out.jsonl"), PROMPTS)
        assert resumed.answers() == {index: answer_to(index) for index in order[:-1]}
        resumed.begin(SETTINGS)
        resumed.add(ranks[-1], {order[-1]: answer_to(order[-1])})
        assert resumed.merge() == {index: answer_to(index) for index in order}
        assert resumed.output.read_text(encoding="utf-8") == expected()
        assert [path.name for path in Path(folder).iterdir()] == ["out.jsonl"]


def test_what_was_killed_behind_the_file_is_finished(interrupted: AnswerParts) -> None:
    """The file is there, which is written as a whole, and so are parts."""
    interrupted.output.write_text(expected(), encoding="utf-8")
    assert interrupted.check_place(resume=True)
    assert interrupted.output.read_text(encoding="utf-8") == expected()
    assert not interrupted.folder.exists()


def test_a_file_that_lacks_answers_is_not_written(interrupted: AnswerParts) -> None:
    with pytest.raises(KeyError):
        interrupted.merge()
    assert not interrupted.output.exists()
    assert sorted(interrupted.answers()) == [0, 2, 4]


def test_a_run_is_gone_on_with_by_its_own_settings_alone(interrupted: AnswerParts) -> None:
    interrupted.check_settings(SETTINGS)
    interrupted.check_settings({"temperature": 0.1})
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens, seed differ\)"):
        interrupted.check_settings({**SETTINGS, "max_new_tokens": 9, "seed": 1})


def test_where_no_run_has_begun_any_settings_will_do(parts: AnswerParts) -> None:
    parts.check_settings(SETTINGS)
    assert parts.answers() == {}


@pytest.mark.parametrize("stored", [None, "", "[1]"])
def test_parts_without_their_settings_are_not_gone_on_with(interrupted: AnswerParts, stored: str | None) -> None:
    path = interrupted.folder / "settings.json"
    path.unlink() if stored is None else path.write_text(stored)
    with pytest.raises(ValueError, match=r"settings\.json, which says .* cannot be read .* remove .*out\.jsonl\.parts"):
        interrupted.check_settings(SETTINGS)


@pytest.mark.parametrize(
    "line",
    [
        {"index": 3},
        {"index": 3, "answer": None},
        {"index": 3, "answer": {}},
        {"index": 3, "answer": answer_to(4)},
        {"index": [3], "answer": answer_to(3)},
        {"index": 5, "answer": answer_to(3)},
        {"index": -2, "answer": answer_to(3)},
        {"index": True, "answer": answer_to(1)},
    ],
)
def test_a_line_that_no_rank_has_written_is_named(interrupted: AnswerParts, line: dict[str, Any]) -> None:
    with (interrupted.folder / "rank-1.jsonl").open("a") as part:
        part.write(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*rank-1\.jsonl is no answer of this run"):
        interrupted.answers()


def test_another_run_is_kept_out_while_one_writes(parts: AnswerParts) -> None:
    with parts.held():
        with pytest.raises(ValueError, match=r"another run is writing into .*out\.jsonl\.parts"), parts.held():
            pytest.fail("It was let in.")
        assert parts.folder.is_dir()
    # Nothing was written, so that nothing stays.
    assert not parts.folder.exists()
    with parts.held():
        parts.begin(SETTINGS)
        parts.add(0, {0: answer_to(0)})
    assert parts.answers() == {0: answer_to(0)}


def test_what_others_have_put_there_stays(interrupted: AnswerParts) -> None:
    (interrupted.folder / "notes.txt").write_text("mine")
    interrupted.add(2, {1: answer_to(1), 3: answer_to(3)})
    interrupted.merge()
    assert [path.name for path in interrupted.folder.iterdir()] == ["notes.txt"]


# Where answers go


def test_leftovers_are_gone_on_with_only_if_that_is_asked_for(interrupted: AnswerParts) -> None:
    assert not interrupted.check_place(resume=True)
    with pytest.raises(ValueError, match=r"out\.jsonl\.parts holds answers of an interrupted run; go on with --resume"):
        interrupted.check_place(resume=False)


def test_a_finished_file_is_gone_on_with_only_for_the_same_prompts(parts: AnswerParts) -> None:
    parts.output.write_text(expected(), encoding="utf-8")
    assert parts.check_place(resume=True)
    with pytest.raises(ValueError, match="is there already; go on with --resume"):
        parts.check_place(resume=False)
    for others in (PROMPTS[:-1], PROMPTS[::-1], [*PROMPTS, "f"]):
        with pytest.raises(ValueError, match="holds something else than answers to --prompts"):
            AnswerParts(parts.output, others).check_place(resume=True)


def test_folders_and_files_are_not_taken_for_each_other(parts: AnswerParts) -> None:
    parts.folder.write_text("")
    with pytest.raises(ValueError, match=r"out\.jsonl\.parts is a file"):
        parts.check_place(resume=True)
    parts.output.mkdir()
    with pytest.raises(ValueError, match=r"out\.jsonl is a folder"):
        parts.check_place(resume=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [("out.json", "ends with '.json'; allowed is .jsonl"), ("missing/out.jsonl", "missing is not there or cannot be")],
)
def test_places_where_nothing_can_be_written_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnswerParts(tmp_path / name, PROMPTS).check_place(resume=True)
