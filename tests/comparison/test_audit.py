"""Telling near ties from faults."""

from __future__ import annotations

import math

import pytest
import torch

from layerskip.comparison.audit import NEAR_TIE_UNITS, first_difference, spacing

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1.0, torch.bfloat16, 2**-7),
        (1.99, torch.bfloat16, 2**-7),
        (20.0, torch.bfloat16, 2**-3),
        (-20.0, torch.bfloat16, 2**-3),
        (1.0, torch.float16, 2**-10),
    ],
)
def test_spacing_is_the_distance_to_the_next_number(value: float, dtype: torch.dtype, expected: float) -> None:
    assert spacing(value, dtype) == expected
    number = torch.tensor(abs(value), dtype=dtype)
    assert float(torch.nextafter(number, torch.tensor(torch.inf, dtype=dtype)) - number) == expected


def test_equal_outputs_have_no_difference() -> None:
    assert first_difference([1, 2], [1, 2], torch.zeros(2, 5), BF16) is None


@pytest.mark.parametrize("units", [0.0, 1.0, NEAR_TIE_UNITS, NEAR_TIE_UNITS + 1, 50.0])
def test_a_difference_is_excused_within_a_few_units(units: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 3] = 16.0
    logits[1, 4] = 16.0 - units * 0.125
    difference = first_difference([1, 3], [1, 4], logits, BF16)
    assert difference is not None
    assert (difference.position, difference.reference_token, difference.other_token) == (1, 3, 4)
    assert (difference.gap, difference.unit) == (units * 0.125, 0.125)
    assert difference.is_near_tie == (units <= NEAR_TIE_UNITS)


@pytest.mark.parametrize(("reference", "other"), [([1, 2, 3], [1, 2]), ([1, 2], [1, 2, 3])])
def test_an_output_that_ends_early_is_never_excused(reference: list[int], other: list[int]) -> None:
    difference = first_difference(reference, other, torch.zeros(len(reference), 5), BF16)
    assert difference is not None
    assert (difference.position, difference.gap) == (2, math.inf)
    assert not difference.is_near_tie
