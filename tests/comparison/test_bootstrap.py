"""The paired bootstrap against distributions that can be written down."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from layerskip.comparison import bootstrap
from layerskip.comparison.bootstrap import Interval, paired_bootstrap


def enumerated(differences: list[float], level: float, weights: list[float]) -> tuple[float, float]:
    """The interval over all equally likely resamples; its ends are some of their means."""
    pairs = list(zip(differences, weights, strict=True))
    means = [
        sum(value * weight for value, weight in drawn) / sum(weight for _, weight in drawn)
        for drawn in itertools.product(pairs, repeat=len(pairs))
    ]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)


@pytest.mark.parametrize("level", [0.4, 0.6, 0.95])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 5.0]])
def test_the_interval_is_that_of_all_resamples(level: float, weights: list[float]) -> None:
    """Three items have 27 resamples; none of these levels cuts where one of their values ends."""
    found = paired_bootstrap([1.0, 0.0, 4.0], [0.0, 2.0, 1.0], level=level, weights=weights)
    assert (found.low, found.high) == pytest.approx(enumerated([1.0, -2.0, 3.0], level, weights))
    assert found.difference == pytest.approx(np.average([1.0, -2.0, 3.0], weights=weights))


def test_two_items_by_hand() -> None:
    """Means 0, ½ and 1 with chances ¼, ½ and ¼: the middle half is ½ alone, and 95 % takes all."""
    assert paired_bootstrap([1, 1], [1, 0], level=0.4) == Interval(0.5, 0.5, 0.5)
    assert paired_bootstrap([1, 1], [1, 0]) == Interval(0.5, 0.0, 1.0)


def test_exchanged_series_turn_the_sign() -> None:
    first, second = np.random.default_rng(1).random((2, 40))
    one, other = paired_bootstrap(first, second), paired_bootstrap(second, first)
    turned = (-other.difference, -other.high, -other.low)
    assert (one.difference, one.low, one.high) == pytest.approx(turned)
    assert one.low < one.difference < one.high


def test_equal_series_differ_by_nothing() -> None:
    values = [0.1, 0.7, 0.3]
    assert paired_bootstrap(values, values) == Interval(0.0, 0.0, 0.0)


def test_what_both_share_cancels_out() -> None:
    """Items of very different difficulty and a constant difference leave no doubt."""
    hard = np.arange(100.0)
    found = paired_bootstrap(hard + 0.25, hard)
    assert found == Interval(0.25, 0.25, 0.25)


def test_the_seed_decides_and_the_chunks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = np.random.default_rng(2).random((2, 30))
    whole = paired_bootstrap(first, second, resamples=500)
    assert paired_bootstrap(first, second, resamples=500, seed=1) != whole
    monkeypatch.setattr(bootstrap, "DRAWN_ITEMS", 210)
    assert paired_bootstrap(first, second, resamples=500) == whole


def test_the_interval_holds_the_true_difference_as_often_as_it_says() -> None:
    """Answers of two models, right with chances 0.6 and 0.5 and not independent of each other; 200 experiments."""
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        ease = generator.random(100)
        found = paired_bootstrap(ease < 0.6, (ease + generator.random(100)) / 2 < 0.5, resamples=400)
        held += found.low <= 0.1 <= found.high
    assert 0.90 <= held / 200 <= 0.99


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first": [], "second": []}, r"first has shape \(0,\)"),
        ({"second": [1.0]}, r"second has shape \(1,\), but first has \(2,\)"),
        ({"weights": [1.0]}, r"weights has shape \(1,\)"),
        ({"weights": [1.0, 0.0]}, "weights must be numbers above 0"),
        ({"resamples": 0}, "resamples=0"),
        ({"level": 1.0}, "level=1.0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(**{"first": [1.0, 2.0], "second": [1.0, 2.0], **arguments})
