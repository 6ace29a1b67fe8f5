"""Copied spans: what followed the last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerskip.decoding.ngrams import CONFIDENCE, SIZES, NgramIndex

# Few tokens, so that n-grams recur.
TOKENS = st.lists(st.integers(0, 3), max_size=30)


def by_search(tokens: Sequence[int], count: int) -> list[int]:
    """Looks at every place, the latest first, and appends what it copies token by token."""
    for size in SIZES:
        for end in reversed(range(size, len(tokens))):
            if list(tokens[end - size : end]) == list(tokens[len(tokens) - size :]):
                text = list(tokens)
                for offset in range(count):
                    text.append(text[end + offset])
                return text[len(tokens) :]
    return []


@settings(max_examples=400, deadline=None)
@given(prompt=TOKENS, pieces=st.lists(TOKENS, max_size=4), count=st.integers(0, 40))
def test_a_continuation_is_the_one_that_a_search_finds(prompt: list[int], pieces: list[list[int]], count: int) -> None:
    """However the text comes in, and after every piece of it."""
    index, text = NgramIndex(prompt), list(prompt)
    assert index.continuation(count).tokens == by_search(text, count)
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert index.continuation(count).tokens == by_search(text, count)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([], [], id="no text"),
        pytest.param([7], [], id="one token"),
        pytest.param([1, 2, 3], [], id="nothing recurs"),
        pytest.param([5, 1, 9, 5], [], id="a single token that recurs"),
        pytest.param([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3], id="a pair"),
        pytest.param([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9, 1], id="the last occurrence"),
        pytest.param([0, 1, 2, 8, 7, 1, 2, 9, 0, 1, 2], [8, 7, 1, 2, 9], id="three before two"),
        pytest.param([4, 4, 4], [4, 4, 4, 4, 4], id="a copy of itself"),
    ],
)
def test_what_is_copied(tokens: list[int], expected: list[int]) -> None:
    assert NgramIndex(tokens).continuation(5).tokens == expected


def test_asking_changes_nothing() -> None:
    index = NgramIndex([1, 2, 3, 1, 2])
    assert index.continuation(3).tokens == index.continuation(3).tokens == [3, 1, 2]
    index.extend([3])
    assert index.continuation(3).tokens == [1, 2, 3]


def test_a_copy_says_how_much_was_alike_and_is_trusted_by_it() -> None:
    pair, three = NgramIndex([1, 2, 8, 1, 2]).continuation(1), NgramIndex([0, 1, 2, 8, 0, 1, 2]).continuation(1)
    assert (pair.size, three.size) == (2, 3)
    assert (pair.confidence, three.confidence) == (CONFIDENCE[2], CONFIDENCE[3])
    assert 0 < pair.confidence < three.confidence < 1
    assert NgramIndex([1, 2, 3]).continuation(1).size == 0
