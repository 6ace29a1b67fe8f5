"""Where tokens are decided: the lowest exit from which on every layer that is looked at has the last layer's choice."""

from __future__ import annotations

from collections.abc import Sequence

from layerskip.comparison.quality import Reading


def decided_layers(choices: Sequence[Sequence[int]], layers: Sequence[int]) -> list[int]:
    """Returns, for each token, the earliest of `layers` whose choice is the last layer's and stays so.

    Args:
        choices: of each layer, one choice a token; in the order of `layers`.
        layers: in rising order, the last layer last; those between are not looked at.
    """
    decided = []
    for column in zip(*choices, strict=True):
        place = len(layers) - 1
        while place and column[place - 1] == column[-1]:
            place -= 1
        decided.append(layers[place])
    return decided


def decided_counts(readings: Sequence[Reading], layers: Sequence[int]) -> dict[int, int]:
    """Returns how many tokens of some answers are decided at each of `layers`, as in `decided_layers`; zeros too."""
    counts = dict.fromkeys(layers, 0)
    for reading in readings:
        for layer in decided_layers(reading.choices, layers):
            counts[layer] += 1
    return counts
