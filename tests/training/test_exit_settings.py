"""Which exits are on at a step and how much they count, from the settings of a run."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip.training.clock import Clock
from layerskip.training.exit_settings import ExitSettings

L = 8


def on(settings: ExitSettings, step: int, total_steps: int = 160) -> dict[int, float]:
    return settings.weights_at(Clock(total_steps, step), L)


def test_the_papers_weights_are_normalised_over_what_is_on() -> None:
    settings = ExitSettings(exit_layers=(2, 4), e_scale=0.5)
    # e of the paper's layers 1, 3 and 7: 0.5·1, 0.5·6 and 7 + 0.5·21.
    assert on(settings, 0) == pytest.approx({2: 0.5 / 21, 4: 3 / 21, 8: 17.5 / 21})


def test_all_layers_of_four_at_scale_one() -> None:
    weights = ExitSettings().weights_at(Clock(1), 4)
    assert weights == pytest.approx({2: 0.1, 3: 0.3, 4: 0.6})


def test_equal_weights_include_the_last_layer() -> None:
    settings = ExitSettings(exit_layers=(2, 3, 4), weights="equal", curriculum="rotational", rotation=3)
    assert on(settings, 0) == {2: 0.5, 8: 0.5}
    assert on(settings, 1) == {3: 0.5, 8: 0.5}
    assert on(ExitSettings(exit_layers=(1, 2, 3), weights="equal"), 9) == dict.fromkeys((1, 2, 3, 8), 0.25)


def test_given_weights_stand_beside_the_last_layers_one() -> None:
    assert on(ExitSettings(exit_layers=(2, 3), weights={2: 0.5, 3: 2.5}), 0) == {2: 0.125, 3: 0.625, 8: 0.25}


@pytest.mark.parametrize("weights", [{2: 0.0, 3: 0.0}, "paper"])
def test_exits_of_no_weight_cost_nothing(weights: Any) -> None:
    assert on(ExitSettings(exit_layers=(2, 3), weights=weights, e_scale=0.0), 0) == {8: 1.0}


def test_without_exits_only_the_last_layer_is_trained() -> None:
    assert on(ExitSettings(exit_layers=()), 0) == {8: 1.0}


def test_rotation_over_layers_is_the_papers() -> None:
    """C(t, l) = 1 iff (l − t) mod R = 0 or l = L − 1, for the paper's l = E − 1."""
    settings = ExitSettings(curriculum="rotational", rotation=3, weights="equal")
    for step in range(7):
        expected = {layer + 1 for layer in range(L) if (layer - step) % 3 == 0 or layer == L - 1}
        assert set(on(settings, step)) == expected


def test_rotation_of_all_layers_may_leave_the_last_alone() -> None:
    settings = ExitSettings(curriculum="rotational", rotation=L, weights="equal")
    assert set(on(settings, L - 1)) == {L}


def test_gradual_exits_follow_the_clock() -> None:
    settings = ExitSettings(curriculum="gradual", weights="equal")
    assert [set(on(settings, step)) for step in (0, 10, 20)] == [{8}, {7, 8}, {6, 7, 8}]
    assert set(on(settings, 159)) == set(range(1, 9))


def test_exits_are_trained_lowest_first_whatever_their_order() -> None:
    assert ExitSettings(exit_layers=(6, 2)).layers(L) == (2, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_layers": "some"}, "exit_layers='some'"),
        ({"curriculum": "random"}, "curriculum='random' is unknown; allowed are rotational, gradual, fixed"),
        ({"curriculum": "rotational"}, "rotation=None with curriculum='rotational'"),
        ({"rotation": 3}, "rotation=3 with curriculum='fixed'"),
        ({"weights": "linear"}, "weights='linear' is unknown"),
        ({"e_scale": 1.1}, "e_scale=1.1 is out of range; allowed is 0 ≤ e_scale ≤ 1"),
        ({"e_scale": -0.1}, "e_scale=-0.1"),
        ({"loss": "mse"}, "loss='mse' is unknown; allowed are cross_entropy, self_distillation, acceptance"),
        ({"guard_weight": -1.0}, "guard_weight=-1.0"),
        ({"guard_weight": float("nan")}, "guard_weight=nan"),
        ({"logit_rows": 0}, "logit_rows=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExitSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit_layers": (0, 2)}, r"exit_layers=\[0, 2\] must be different layers from 1 to 7"),
        ({"exit_layers": (8,)}, r"exit_layers=\[8\] must be different layers from 1 to 7; the model has 8"),
        ({"exit_layers": (2, 2)}, r"exit_layers=\[2, 2\]"),
        ({"exit_layers": (1, 2)}, r"exit 1, whose weight in the paper is e\(0\) = 0"),
        ({"curriculum": "rotational", "rotation": 9}, "rotation=9 is out of range; allowed are 1 to 8, L"),
        (
            {"exit_layers": (2, 3), "curriculum": "rotational", "rotation": 3},
            "rotation=3 is out of range; allowed are 1 to 2, the number of exits",
        ),
        ({"curriculum": "rotational", "rotation": 0}, "rotation=0"),
        ({"exit_layers": (2, 3), "weights": {2: 1.0}}, r"weights={2: 1.0} must hold one number for each of the exits"),
        ({"exit_layers": (2,), "weights": {2: -1.0}}, r"weights={2: -1.0} must be numbers of 0 or more"),
        ({"exit_layers": (2,), "weights": {2: float("nan")}}, r"weights={2: nan} must be numbers of 0 or more"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExitSettings(**settings).layers(L)
