"""Which tokens a draft may choose from."""

from __future__ import annotations

import pytest

from layerskip.training.draft_vocabulary import BLOCK, draft_vocabulary, kept_token_ids
from tests import kit

LABELS = [[-100, 5, 5, 9], [5, 9, 2, -100, 7]]


def test_kept_tokens_come_first_then_the_most_frequent_ones() -> None:
    assert draft_vocabulary(LABELS, 4, [30, 1], vocab_size=40).tolist()[2:] == [5, 9]
    assert sorted(draft_vocabulary(LABELS, 4, [30, 1, 30], vocab_size=40).tolist()[:2]) == [1, 30]


def test_a_kept_token_that_is_frequent_as_well_counts_once() -> None:
    assert draft_vocabulary(LABELS, 3, [5], vocab_size=40).tolist() == [5, 9, 2]


def test_the_lowest_ids_fill_what_the_data_leave_open() -> None:
    assert draft_vocabulary(LABELS, 8, [], vocab_size=40).tolist() == [5, 9, 2, 7, 0, 1, 3, 4]


def test_a_list_of_the_whole_vocabulary_is_every_token() -> None:
    assert sorted(draft_vocabulary(LABELS, 40, [3], vocab_size=40).tolist()) == list(range(40))


@pytest.mark.parametrize("size", [1, 41])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"draft_vocab_size={size} is out of range; allowed are 2 .* to 40"):
        draft_vocabulary(LABELS, size, [1, 2], vocab_size=40)


def test_rows_of_all_blocks_count_and_an_empty_one_ends_nothing() -> None:
    labels = ([], *([[3]] * BLOCK), *([[4, 4]] * BLOCK), [5], *([[-100]] * BLOCK), [5])
    assert draft_vocabulary(iter(labels), 3, [], vocab_size=40).tolist() == [4, 3, 5]


@pytest.mark.parametrize(("ends", "expected"), [(None, [0, 9]), (7, [0, 7, 9]), ([7, 9], [0, 7, 9])])
def test_ends_of_answers_and_special_tokens_are_kept(ends: int | list[int] | None, expected: list[int]) -> None:
    """The unknown word is 0."""
    tokenizer = kit.word_tokenizer()
    tokenizer.eos_token = "w9"
    assert sorted(kept_token_ids(kit.mixed(eos_token_id=ends), tokenizer)) == expected
