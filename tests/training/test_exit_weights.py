"""Exit-loss weights and curricula against values worked out by hand."""

from __future__ import annotations

import pytest

from layerskip.training.exit_weights import gradual_exits, normalised, paper_weight, rotational_exits


def test_paper_weights_of_four_layers() -> None:
    assert [paper_weight(exit_layer, 4, 1.0) for exit_layer in (1, 2, 3, 4)] == [0, 1, 3, 6]
    shares = normalised({exit_layer: paper_weight(exit_layer, 4, 1.0) for exit_layer in (1, 2, 3, 4)})
    assert list(shares.values()) == pytest.approx([0, 0.1, 0.3, 0.6])


@pytest.mark.parametrize(("e_scale", "share"), [(0.1, 0.135), (0.2, 0.111), (1.0, 0.091)])
def test_the_last_layers_share_with_all_exits_of_32_layers(e_scale: float, share: float) -> None:
    shares = normalised({exit_layer: paper_weight(exit_layer, 32, e_scale) for exit_layer in range(1, 33)})
    assert shares[32] == pytest.approx(share, abs=5e-4)


def test_without_e_scale_only_the_last_layer_counts() -> None:
    shares = normalised({exit_layer: paper_weight(exit_layer, 8, 0.0) for exit_layer in range(1, 9)})
    assert shares == {**dict.fromkeys(range(1, 8), 0.0), 8: 1.0}


@pytest.mark.parametrize("weights", [{1: 0.0}, {1: -1.0, 2: 2.0}])
def test_weights_that_cannot_be_normalised_are_refused(weights: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="weights="):
        normalised(weights)


def test_rotation_turns_by_one_exit_a_step() -> None:
    exits = [2, 3, 4, 6]
    assert [rotational_exits(step, exits, 4) for step in range(5)] == [[2], [3], [4], [6], [2]]
    assert [rotational_exits(step, exits, 2) for step in range(3)] == [[2, 4], [3, 6], [2, 4]]
    assert rotational_exits(7, exits, 1) == exits


def test_over_all_layers_every_one_has_its_turn_in_a_rotation() -> None:
    exits = list(range(1, 32))
    turns = [rotational_exits(step, exits, 8) for step in range(8)]
    assert sorted(exit_layer for turn in turns for exit_layer in turn) == exits
    assert {len(turn) for turn in turns} == {3, 4}


def test_a_rotation_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="rotation=0 must be at least 1"):
        rotational_exits(0, [2, 3, 4, 6], 0)


def test_gradual_curriculum_adds_a_layer_every_t_over_2l_steps() -> None:
    exits = list(range(1, 8))
    assert [gradual_exits(step, exits, 8, 160) for step in (0, 9, 10, 20, 79, 159)] == [
        [],
        [],
        [7],
        [6, 7],
        exits,
        exits,
    ]
