"""The picture of costs by context and rows: panels, lines, and crosses where drafting does not pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from layerskip.comparison import scaling_plot
from layerskip.comparison.scaling_plot import PAYS_NOT, cost_by_context
from tests.comparison.test_scaling import point
from tests.comparison.test_scaling_report import POINTS

pytestmark = pytest.mark.filterwarnings("error")


def lines(axes: Axes) -> dict[str, list[list[float]]]:
    """Returns x and y of each line by its label."""
    return {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}


def figure_of(points: list[Any]) -> Any:
    return scaling_plot._cost_figure(points)


def test_a_panel_for_each_number_of_rows_shows_both_strategies() -> None:
    one, eight = figure_of(POINTS).axes
    assert [axes.get_title() for axes in (one, eight)] == ["E=2, 1 row", "E=2, 8 rows"]
    assert lines(one)["autoregressive"] == [[128, 1000], [512, 1000]]
    assert lines(one)["self_speculative, best γ, α=0.5"] == [[128, 500], [512, 500]]
    assert lines(eight)["autoregressive"] == [[128, 1000], [512, 250]]
    assert lines(eight)["self_speculative, best γ, α=0.5"] == [[128, 1250], [512, 125]]


def test_crosses_stand_where_drafting_does_not_pay_and_nowhere_else() -> None:
    one, eight = figure_of(POINTS).axes
    assert lines(one)[PAYS_NOT] == [[128, 2000], [512, 2000]]
    assert lines(eight)[PAYS_NOT] == [[128, 1250]]
    assert PAYS_NOT not in lines(figure_of([point()]).axes[0])


def test_the_legend_names_what_any_panel_has_once() -> None:
    figure = figure_of([point(), point(rows=8, self_speculative_seconds=1.25)])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["autoregressive", "self_speculative, best γ, α=0.5", PAYS_NOT]


def test_exits_have_panels_of_their_own_and_acceptances_the_same_colour_in_all() -> None:
    figure = figure_of([point(), point(acceptance=0.9), point(exit_layer=3, acceptance=0.9)])
    assert [axes.get_title() for axes in figure.axes] == ["E=2, 1 row", "E=3, 1 row"]
    colours = [
        {line.get_label(): line.get_color() for line in axes.get_lines()}["self_speculative, best γ, α=0.9"]
        for axes in figure.axes
    ]
    assert colours[0] == colours[1]
    assert len({tuple(map(str, [line.get_color()])) for line in figure.axes[0].get_lines()}) == 3


def test_contexts_are_the_ticks() -> None:
    axes = figure_of(POINTS).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["128", "512"]


def test_the_picture_is_a_whole_png(tmp_path: Path) -> None:
    cost_by_context(POINTS, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="points is empty"):
        cost_by_context([], tmp_path / "scaling.png")
    assert not list(tmp_path.iterdir())
