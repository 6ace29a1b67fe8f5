"""How much each exit's loss counts, and which exits are on at a step: pure functions of the step.

Layers are counted from 1 here; the paper's layer l is exit l + 1 (Elhoushi et al., "LayerSkip", arXiv 2404.16710).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def paper_weight(exit_layer: int, num_layers: int, e_scale: float) -> float:
    """Returns e(l) of the paper for l = `exit_layer` − 1, before normalisation.

    e(l) = e_scale · Σ_{i=0..l} i for l < L − 1, and e(L − 1) = (L − 1) + e_scale · Σ_{i=0..L−2} i.

    Args:
        exit_layer: 1 to L; L is the last layer.
        e_scale: e_scale, 0 to 1; at 0 only the last layer counts.
    """
    index = exit_layer - 1
    if exit_layer < num_layers:
        return e_scale * index * (index + 1) / 2
    return index + e_scale * (index - 1) * index / 2


def normalised(weights: Mapping[int, float]) -> dict[int, float]:
    """Returns the weights divided by their sum: ẽ(t, l), where `weights` holds the exits that are on at step t.

    Raises:
        ValueError: a negative weight, or no positive one.
    """
    total = sum(weights.values())
    if total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"weights={dict(weights)} must be 0 or more, and at least one of them above 0.")
    return {exit_layer: weight / total for exit_layer, weight in weights.items()}


def rotational_exits(step: int, exit_layers: Sequence[int], rotation: int) -> list[int]:
    """Returns the exits that are on at a step: the j-th of the list (from 0) iff (j − t) mod R = 0.

    Over all exits 1..L−1 this is C_rot,R of the paper, where j is its l. The last layer is not in the list: its loss is
    always on.

    Args:
        step: t, the global step from 0.
        rotation: R, how many steps a rotation takes.

    Raises:
        ValueError: R below 1.
    """
    if rotation < 1:
        raise ValueError(f"rotation={rotation} must be at least 1.")
    return [exit_layer for index, exit_layer in enumerate(exit_layers) if (index - step) % rotation == 0]


def gradual_exits(step: int, exit_layers: Sequence[int], num_layers: int, total_steps: int) -> list[int]:
    """Returns the exits that are on at a step of C_grad: from the last layer down, one more every T / 2L steps.

    Args:
        step: t, the global step from 0.
        exit_layers: the exits that may be on.
        num_layers: L.
        total_steps: T.

    Raises:
        ValueError: T below 1.
    """
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1.")
    layers_on = 1 + 2 * num_layers * step // total_steps
    return [exit_layer for exit_layer in exit_layers if exit_layer > num_layers - layers_on]
