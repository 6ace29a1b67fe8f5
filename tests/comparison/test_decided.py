"""From which layer on a token's choice stays the last layer's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.comparison.decided import decided_counts, decided_layers
from layerskip.comparison.quality import Reading


@pytest.mark.parametrize(
    ("column", "decided"),
    [
        ([7, 7, 7, 7], 1),
        ([5, 7, 7, 7], 3),
        ([5, 5, 7, 7], 4),
        ([5, 5, 5, 7], 8),
        # Right early, then wrong, then right again: decided where it is right for good.
        ([7, 5, 7, 7], 4),
        ([7, 7, 5, 7], 8),
    ],
)
def test_a_token_is_decided_where_its_choice_is_right_for_good(column: list[int], decided: int) -> None:
    assert decided_layers([[choice] for choice in column], [1, 3, 4, 8]) == [decided]


def test_tokens_are_decided_one_by_one() -> None:
    choices = [[1, 2, 9, 4], [1, 9, 9, 4], [1, 2, 3, 9], [1, 2, 3, 4]]
    assert decided_layers(choices, [2, 3, 5, 6]) == [2, 5, 5, 6]


def test_without_exits_and_without_tokens() -> None:
    assert decided_layers([[1, 2]], [4]) == [4, 4]
    assert decided_layers([[], []], [2, 4]) == []


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Returns choices of few kinds, so that layers often agree, and the layers they are of."""
    layers = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=6)))
    row = st.lists(st.integers(0, 2), min_size=(width := draw(st.integers(0, 8))), max_size=width)
    return [draw(row) for _ in layers], layers


def naive(column: list[int], layers: list[int]) -> int:
    """Returns the lowest layer of which none from it on has another choice than the last."""
    return min(layer for place, layer in enumerate(layers) if set(column[place:]) == {column[-1]})


@given(tables())
def test_it_is_the_lowest_layer_from_which_on_all_agree(table: tuple[list[list[int]], list[int]]) -> None:
    choices, layers = table
    columns = [list(column) for column in zip(*choices, strict=True)]
    assert decided_layers(choices, layers) == [naive(column, layers) for column in columns]


@given(st.lists(tables(), min_size=1, max_size=3))
def test_counts_add_up_to_the_tokens_and_name_every_layer(made: list[tuple[list[list[int]], list[int]]]) -> None:
    layers = made[0][1]
    readings = [Reading([], choices, [], []) for choices, others in made if len(others) == len(layers)]
    counts = decided_counts(readings, layers)
    assert list(counts) == layers
    assert sum(counts.values()) == sum(reading.tokens for reading in readings)
    columns = [list(column) for reading in readings for column in zip(*reading.choices, strict=True)]
    assert counts == {layer: sum(naive(column, layers) == layer for column in columns) for layer in layers}
