"""How sure a difference between two series is that were measured on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Drawn items that are held at a time.
DRAWN_ITEMS = 2**22


@dataclass(frozen=True)
class Interval:
    """A difference and its bootstrap interval.

    Attributes:
        difference: the mean of the first series minus that of the second.
        low, high: ends of the percentile interval.
    """

    difference: float
    low: float
    high: float


def paired_bootstrap(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
    weights: Sequence[float] | np.ndarray | None = None,
) -> Interval:
    """Returns the difference of two means over the same items, and the percentile bootstrap interval around it.

    A resample draws as many items as there are, with replacement, and takes both values of each, so that what makes an
    item hard for both cancels out (Efron and Tibshirani, An Introduction to the Bootstrap, 13.3). Two series exchanged
    give the interval with its sign turned.

    Args:
        first: a value for each item, `(items,)`.
        second: likewise, of the same items in the same order.
        resamples: how many are drawn.
        seed: of the draws; the same seed gives the same interval on every machine.
        level: share of the resampled differences that lie inside.
        weights: what an item counts in both means, such as its number of tokens, `(items,)`; all the same by default.

    Raises:
        ValueError: no items, series of different lengths, a number out of range, or weights that are not positive.
    """
    differences = np.asarray(first, dtype=np.float64) - _like(first, second, "second")
    counts = np.ones_like(differences) if weights is None else _like(first, weights, "weights")
    if differences.ndim != 1 or not len(differences):
        raise ValueError(f"first has shape {differences.shape}; pass one value for each item, at least one.")
    if resamples < 1:
        raise ValueError(f"resamples={resamples} is out of range; allowed are integers from 1 on.")
    if not 0 < level < 1:
        raise ValueError(f"level={level} is out of range; allowed is 0 < level < 1.")
    if not (counts > 0).all():
        raise ValueError("weights must be numbers above 0; leave out what does not count.")
    weighted, items = differences * counts, len(differences)
    generator = np.random.default_rng(seed)
    at_once = max(1, DRAWN_ITEMS // items)
    parts = []
    for begun in range(0, resamples, at_once):
        drawn = generator.integers(items, size=(min(at_once, resamples - begun), items))
        parts.append(weighted[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(parts), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(weighted.sum() / counts.sum()), float(low), float(high))


def _like(first: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    """Returns values as an array; raises ValueError by name where they are not as many as the first series has."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != np.shape(first):
        raise ValueError(f"{name} has shape {array.shape}, but first has {np.shape(first)}; pass values of one series.")
    return array
