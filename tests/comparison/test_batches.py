"""Which prompts are asked, and which of them together."""

from __future__ import annotations

from layerskip import Engine
from layerskip.comparison.batches import Batch, first_rows, make_batches
from layerskip.prompt_file import PromptRow
from tests import kit

ROWS = [
    PromptRow(f"line {number}", f"w{number}", category)
    for number, category in enumerate(("a", "a", "b", None, "a", "b"), 1)
]


def words(batch: Batch) -> list[list[int]]:
    return [
        [int(token) for token, seen in zip(*row, strict=True) if seen]
        for row in zip(batch.ids, batch.mask, strict=True)
    ]


def test_rows_of_different_lengths_are_padded_on_the_left() -> None:
    batch = Batch.of([[5, 6, 7], [8]])
    assert batch.ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch.mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_the_first_rows_are_counted_by_category_and_then_in_all() -> None:
    assert first_rows(ROWS, None, None) == ROWS
    assert first_rows(ROWS, 2, None) == ROWS[:2]
    assert first_rows(ROWS, None, 1) == [ROWS[0], ROWS[2], ROWS[3]]
    assert first_rows(ROWS, 2, 1) == [ROWS[0], ROWS[2]]


def test_batches_hold_rows_of_one_category() -> None:
    engine = Engine(kit.l4(), kit.word_tokenizer(kit.VOCAB))
    batches, categories = make_batches(ROWS, engine, 2)
    assert categories == ["a", "b", None, "a"]
    assert [words(batch) for batch in batches] == [[[1], [2]], [[3], [6]], [[4]], [[5]]]


def test_single_prompts_stay_in_their_order() -> None:
    engine = Engine(kit.l4(), kit.word_tokenizer(kit.VOCAB))
    batches, categories = make_batches(ROWS, engine, 1)
    assert categories == [row.category for row in ROWS]
    assert [words(batch) for batch in batches] == [[[number]] for number in range(1, 7)]
