"""How exits are trained: which, when, how much each counts, and by which loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerskip.training.clock import Clock
from layerskip.training.exit_loss import LOSSES
from layerskip.training.exit_weights import gradual_exits, normalised, paper_weight, rotational_exits
from layerskip.training.strict import UNKNOWN_KEYS_FAIL

ALL = "all"
CURRICULA = ("rotational", "gradual", "fixed")
WEIGHTS = ("paper", "equal")


@dataclass(frozen=True)
class ExitSettings:
    """How exits are trained. The last layer is always in the loss, by cross entropy.

    Attributes:
        exit_layers: the exits to train, counted from 1, or "all" for 1 to L − 1. An empty list trains the last layer
            alone, which is plain fine-tuning.
        curriculum: which of them are on at a step. "rotational": the j-th of the list (from 0) at step t iff
            (j − t) mod R = 0. "gradual": from the last layer down, one more every T / 2L steps. "fixed": all, always.
        rotation: R of the rotational curriculum, how many steps a rotation takes; given with that curriculum only.
        weights: what each exit that is on counts, before all are divided by their sum. "paper": e(l) of the paper,
            which needs billions of tokens to reach low exits. "equal": every one the same, the last layer included;
            the choice for a short fine-tune of a few low exits. Or a number for each exit, as {2: 0.5, 4: 1}, beside
            the last layer's 1.
        e_scale: e_scale of the paper's weights, 0 to 1; at 0 only the last layer counts.
        loss: of an exit. "cross_entropy": against the labels. "self_distillation": KL(last layer ‖ exit).
            "acceptance": −log Σ min(p, q), the chance that a sampled draft is accepted. The last two learn from the
            last layer, whose own layers they do not move, in a pass of its own where layers are dropped.
        guard_weight: weight of KL(original ‖ last layer), added to the loss, which holds the last layer to the model
            that training began with, or where adapters are trained to the model beneath them; 0 for none. Rows of data
            whose `guard` is false are free of it. With method full a frozen copy of the model is kept for it.
        logit_rows: how many rows of logits, of all exits together, are made at a time; at least one token's.
    """

    __pydantic_config__ = UNKNOWN_KEYS_FAIL

    exit_layers: tuple[int, ...] | str = ALL
    curriculum: str = "fixed"
    rotation: int | None = None
    weights: str | Mapping[int, float] = "paper"
    e_scale: float = 1.0
    loss: str = "cross_entropy"
    guard_weight: float = 0.0
    logit_rows: int = 1024

    def __post_init__(self) -> None:
        """Checks what can be checked without a model; raises ValueError by name."""
        if isinstance(self.exit_layers, str) and self.exit_layers != ALL:
            raise ValueError(f"exit_layers={self.exit_layers!r}: give a list of layers, such as [2, 3, 4], or {ALL!r}.")
        if not isinstance(self.exit_layers, str) and not (
            isinstance(self.exit_layers, tuple | list) and all(type(layer) is int for layer in self.exit_layers)
        ):
            raise ValueError(f"exit_layers={self.exit_layers!r} must be a list of layer numbers, such as [2, 3, 4].")
        if self.curriculum not in CURRICULA:
            raise ValueError(f"curriculum={self.curriculum!r} is unknown; allowed are {', '.join(CURRICULA)}.")
        if (self.rotation is None) == (self.curriculum == "rotational"):
            raise ValueError(
                f"rotation={self.rotation} with curriculum={self.curriculum!r}: the rotational curriculum needs a "
                "rotation R, and only that one takes it."
            )
        if isinstance(self.weights, str) and self.weights not in WEIGHTS:
            raise ValueError(
                f"weights={self.weights!r} is unknown; allowed are {', '.join(WEIGHTS)}, or a number for each exit."
            )
        if not 0.0 <= self.e_scale <= 1.0:
            raise ValueError(f"e_scale={self.e_scale} is out of range; allowed is 0 ≤ e_scale ≤ 1.")
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r} is unknown; allowed are {', '.join(LOSSES)}.")
        if not 0.0 <= self.guard_weight < float("inf"):
            raise ValueError(f"guard_weight={self.guard_weight} must be a number of 0 or more.")
        if self.logit_rows < 1:
            raise ValueError(f"logit_rows={self.logit_rows} must be at least 1.")

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the exits that are trained in a model of `num_layers` layers, lowest first.

        Raises:
            ValueError: an exit outside 1..L−1 or named twice, exit 1 under the paper's weights (its e(l) is 0), a
                rotation in which some step would train none, or weights that do not belong to the exits.
        """
        if isinstance(self.exit_layers, str):
            exits = tuple(range(1, num_layers))
            longest, of_what = num_layers, "L"
        else:
            exits = tuple(sorted(self.exit_layers))
            longest, of_what = len(exits), "the number of exits"
        if any(not 1 <= exit_layer < num_layers for exit_layer in exits) or len(set(exits)) < len(exits):
            raise ValueError(
                f"exit_layers={list(exits)} must be different layers from 1 to {num_layers - 1}; the model has "
                f"{num_layers}, of which the last is always trained."
            )
        if self.exit_layers != ALL and self.weights == "paper" and 1 in exits:
            raise ValueError(
                "exit_layers has exit 1, whose weight in the paper is e(0) = 0, so that it would not be trained; "
                "leave it out, or choose weights: equal."
            )
        if self.rotation is not None and not 1 <= self.rotation <= longest:
            raise ValueError(f"rotation={self.rotation} is out of range; allowed are 1 to {longest}, {of_what}.")
        if isinstance(self.weights, Mapping) and set(self.weights) != set(exits):
            raise ValueError(
                f"weights={dict(self.weights)} must hold one number for each of the exits {list(exits)}, and no other."
            )
        given = self.weights.values() if isinstance(self.weights, Mapping) else ()
        if not all(0 <= weight < float("inf") for weight in given):
            raise ValueError(f"weights={self.weights} must be numbers of 0 or more.")
        return exits

    def weights_at(self, clock: Clock, num_layers: int) -> dict[int, float]:
        """Returns ẽ(t, l): the weight of each exit that is on and of the last layer, L; their sum is 1.

        An exit whose weight is 0 is left out, so that it costs nothing.
        """
        exits = self.layers(num_layers)
        on = list(exits)
        if self.curriculum == "rotational" and self.rotation is not None:
            on = rotational_exits(clock.step, exits, self.rotation)
        elif self.curriculum == "gradual":
            on = gradual_exits(clock.step, exits, num_layers, clock.total_steps)
        weights = normalised({layer: self._weight(layer, num_layers) for layer in (*on, num_layers)})
        return {layer: weight for layer, weight in weights.items() if weight > 0 or layer == num_layers}

    def _weight(self, layer: int, num_layers: int) -> float:
        if self.weights == "equal":
            return 1.0
        if isinstance(self.weights, Mapping):
            return 1.0 if layer == num_layers else self.weights[layer]
        return paper_weight(layer, num_layers, self.e_scale)
