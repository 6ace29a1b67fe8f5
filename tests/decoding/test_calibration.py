"""Calibration: the confidence itself at first, then what was observed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.decoding.calibration import Calibration

shares = st.floats(0, 1)


@pytest.mark.parametrize("confidence", [0.0, 0.07, 0.5, 0.9, 0.993, 1.0])
def test_unseen_confidences_are_taken_at_their_word(confidence: float) -> None:
    assert Calibration().probability(confidence) == pytest.approx(confidence)


def test_rounding_above_one_is_one() -> None:
    assert Calibration().probability(1.0000001) == 1


def test_the_prior_counts_as_two_observations() -> None:
    calibration = Calibration()
    calibration.observe(0.7, 0.0)
    calibration.observe(0.7, 0.0)
    assert calibration.probability(0.7) == pytest.approx(0.35)


def test_observations_outweigh_the_confidence() -> None:
    calibration = Calibration()
    for round_ in range(200):
        calibration.observe(0.99, float(round_ % 4 == 0))
    assert calibration.probability(0.99) == pytest.approx(0.25, abs=0.01)


def test_other_confidences_learn_nothing() -> None:
    calibration = Calibration()
    calibration.observe(0.96, 0.0)
    assert calibration.probability(0.94) == 0.94
    assert calibration.probability(0.985) == 0.985
    assert calibration.probability(0.97) < 0.97


def test_acceptance_probabilities_count_in_part() -> None:
    calibration = Calibration()
    for _ in range(1000):
        calibration.observe(0.4, 0.8)
    assert calibration.probability(0.4) == pytest.approx(0.8, abs=0.01)


@given(st.lists(st.tuples(shares, shares), max_size=50), shares)
def test_probabilities_are_probabilities(seen: list[tuple[float, float]], confidence: float) -> None:
    calibration = Calibration()
    for each, accepted in seen:
        calibration.observe(each, accepted)
    assert 0 <= calibration.probability(confidence) <= 1
