"""Pictures show what they are given, are written whole or not at all, and leave the caller's matplotlib alone."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.text import Text

from layerskip.comparison import plots
from layerskip.comparison.prediction import Cell, MeasuredCell
from layerskip.comparison.quality import ExitQuality

pytestmark = pytest.mark.filterwarnings("error")

LAYERS = (1, 2, 4)
TOKENS = (" the", "$x$", "\n")
CHOICES = ((" a", "$x$", "日"), (" the", "$y$", "\n"), (" the", "$x$", "\n"))
DECIDED = (2, 4, 2)
COUNTS = {"chat": {1: 1, 4: 3}, "code $": {2: 4}}


@dataclass(frozen=True)
class Speed:
    """What the bars show of a measurement."""

    label: str
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    decode_tokens_per_second: float


SPEEDS: Any = [
    Speed("autoregressive", 1.0, 1.0, 1.0, 20.0),
    Speed("slow $", 0.5, 0.4, 0.55, 10.0),
    Speed("self_speculative E=2 γ=4", 1.5, 1.5, 1.8, 30.0),
]


def cell(exit_layer: int, num_draft_tokens: int, predicted: float) -> Cell:
    return Cell(exit_layer, num_draft_tokens, 1.5, 0.5, predicted)


def measured(predicted: Cell, speed: float) -> MeasuredCell:
    return MeasuredCell(predicted, speed, speed - 0.1, speed + 0.2, 1.5, 9, 10)


def quality(exit_layer: int, agreement: float, perplexity: float) -> ExitQuality:
    return ExitQuality(10, perplexity, agreement, agreement / 2, exit_layer, ())


CELLS = [cell(3, 1, 1.25), cell(3, 2, 0.5), cell(6, 1, 0.8)]
MEASURED = [measured(CELLS[0], 1.1), measured(CELLS[2], 0.9)]
QUALITY = [quality(6, 0.75, 8.0), quality(3, 0.5, math.inf), quality(9, 1.0, 2.0)]

PICTURES: dict[str, Callable[[Path], None]] = {
    "quality_by_layer": lambda path: plots.quality_by_layer(QUALITY, 9, path),
    "heat_map": lambda path: plots.heat_map(CELLS, (3, 1), MEASURED, path),
    "predicted_against_measured": lambda path: plots.predicted_against_measured(MEASURED, path),
    "tokens_by_layer": lambda path: plots.tokens_by_layer(TOKENS, CHOICES, LAYERS, DECIDED, path),
    "decided_histogram": lambda path: plots.decided_histogram(COUNTS, LAYERS, path),
    "benchmark_bars": lambda path: plots.benchmark_bars(SPEEDS, path),
}
every_picture = pytest.mark.parametrize("draw", PICTURES.values(), ids=list(PICTURES))


def said(texts: Iterable[Text]) -> list[str]:
    return [text.get_text() for text in texts]


def boxes(figure: Figure, texts: Iterable[Text]) -> np.ndarray:
    """Returns left, bottom, right and top of each text in pixels, `(texts, 4)`, after the layout."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    return np.array([text.get_window_extent().extents for text in texts])


def overlaps(found: np.ndarray) -> int:
    """Returns how many pairs of boxes overlap."""
    left, bottom, right, top = (found[:, side] for side in range(4))
    across = (left[:, None] < right[None]) & (left[None] < right[:, None])
    along = (bottom[:, None] < top[None]) & (bottom[None] < top[:, None])
    return int(np.triu(across & along, 1).sum())


def is_inside(figure: Figure, found: np.ndarray) -> bool:
    """Whether all boxes lie in the picture."""
    width, height = figure.bbox.size
    return bool((found[:, :2] >= 0).all() and (found[:, 2] <= width).all() and (found[:, 3] <= height).all())


# Files


@every_picture
def test_a_picture_is_a_png_and_the_only_file_and_the_callers_settings_stay(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture needs no pyplot, which would choose a backend and keep the figure."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    path = tmp_path / "picture.png"
    path.write_bytes(b"the one before")
    before = matplotlib.rcParams.copy()
    draw(path)
    assert matplotlib.rcParams.copy() == before
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in data[-12:]
    width, height = struct.unpack(">II", data[16:24])
    assert 500 <= width <= 3000
    assert 250 <= height <= 3000
    assert list(tmp_path.iterdir()) == [path]


@every_picture
def test_nothing_is_left_behind_where_saving_fails(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(b"the one before")
    begun = []

    def failing(self: Figure, where: Path, **options: Any) -> None:
        where.write_bytes(b"half")
        begun.append(where)
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", failing)
    with pytest.raises(OSError, match="no space left"):
        draw(path)
    assert begun[0].parent == tmp_path
    assert begun[0].name.startswith(".")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"the one before"


@every_picture
def test_without_matplotlib_the_error_says_what_to_install(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'pip install "layerskip\[plot\]"'):
        draw(tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []


def test_require_matplotlib_passes_where_it_is_installed() -> None:
    assert plots.require_matplotlib() is None


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda path: plots.quality_by_layer([], 9, path), "quality is of layers"),
        (lambda path: plots.quality_by_layer(QUALITY[2:], 9, path), r"quality is of layers \[9\]"),
        (lambda path: plots.quality_by_layer(QUALITY, 8, path), "below 8 and none above"),
        (lambda path: plots.heat_map([], None, [], path), "cells is empty"),
        (lambda path: plots.heat_map(CELLS, (9, 9), [], path), r"chosen has \(E, γ\) = \[\(9, 9\)\]"),
        (lambda path: plots.heat_map(CELLS[:1], None, MEASURED, path), r"measured has \(E, γ\) = \[\(6, 1\)\]"),
        (lambda path: plots.predicted_against_measured([], path), "measured is empty"),
        (lambda path: plots.tokens_by_layer([], [[]], [1], [], path), "tokens has 0 entries"),
        (lambda path: plots.tokens_by_layer(["a"] * 33, [["a"] * 33], [1], [1] * 33, path), "pass 1 to 32"),
        (lambda path: plots.tokens_by_layer(TOKENS, [], [], DECIDED, path), "choices has 0 rows for 0 layers"),
        (lambda path: plots.tokens_by_layer(TOKENS, CHOICES, [1, 4], DECIDED, path), "choices has 3 rows for 2 layers"),
        (lambda path: plots.tokens_by_layer(TOKENS[:2], CHOICES, LAYERS, (1, 1), path), "a row of choices has 3"),
        (lambda path: plots.tokens_by_layer(TOKENS, CHOICES, LAYERS, (1, 1), path), "decided has 2 entries"),
        (lambda path: plots.decided_histogram({}, LAYERS, path), "decided has no tokens"),
        (lambda path: plots.decided_histogram({"chat": {1: 0}}, LAYERS, path), "decided has no tokens"),
        (
            lambda path: plots.decided_histogram({"chat": {1: 1, 3: 1}}, LAYERS, path),
            r"decided\['chat'\] has layers \[3\], which are not among \[1, 2, 4\]",
        ),
        (lambda path: plots.benchmark_bars([], path), "measurements is empty"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(draw: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []


# Quality


def test_quality_stands_over_its_exits_and_the_last_layer_is_a_line() -> None:
    shares, perplexities = plots._quality_figure(QUALITY, 9).axes
    lines = {str(line.get_label()).split(",")[0]: line for line in shares.lines}
    assert list(lines["agreement"].get_xdata()) == [3, 6]
    assert list(lines["agreement"].get_ydata()) == [0.5, 0.75]
    assert list(lines["expected acceptance"].get_ydata()) == [0.25, 0.375]
    assert list(lines["last layer"].get_ydata()) == [1, 1]
    assert shares.get_ylim()[0] == 0
    assert 1 < shares.get_ylim()[1] < 1.1
    assert perplexities.get_yscale() == "log"
    assert {str(line.get_label()): list(line.get_ydata()) for line in perplexities.lines}["last layer: 2"] == [2, 2]
    assert all(axes.get_xlim() == (0.5, 9.5) and "exit layer E" in axes.get_xlabel() for axes in (shares, perplexities))


def test_an_infinite_perplexity_is_a_triangle_at_the_edge() -> None:
    _, perplexities = plots._quality_figure(QUALITY, 9).axes
    lines = {str(line.get_label()): line for line in perplexities.lines}
    assert list(lines["infinite"].get_xdata()) == [3]
    assert lines["infinite"].get_marker() == "^"
    drawn = np.asarray(lines["exit"].get_ydata())
    assert np.isnan(drawn[0])
    assert drawn[1] == 8.0


def test_infinite_perplexities_alone_and_no_last_layer_can_be_drawn(tmp_path: Path) -> None:
    plots.quality_by_layer([quality(3, 0.5, math.inf)], 9, tmp_path / "picture.png")
    _, perplexities = plots._quality_figure([quality(3, 0.5, math.inf)], 9).axes
    assert [str(line.get_label()) for line in perplexities.lines] == ["exit", "infinite"]


# The heat map


def test_every_cell_is_drawn_with_its_figure_and_the_missing_one_is_blank() -> None:
    axes = plots._heat_map_figure(CELLS, None, []).axes[0]
    mesh = axes.collections[0]
    assert isinstance(mesh, QuadMesh)
    values = np.ma.asarray(mesh.get_array())
    assert values.shape == (2, 2)
    assert values.filled(-1).tolist() == [[1.25, 0.5], [0.8, -1]]
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        (0.5, 0.5): "1.25",
        (1.5, 0.5): "0.50",
        (0.5, 1.5): "0.80",
    }
    assert said(axes.get_xticklabels()) == ["1", "2"]
    assert said(axes.get_yticklabels()) == ["3", "6"]


def test_colours_part_at_one() -> None:
    mesh: Any = plots._heat_map_figure(CELLS, None, []).axes[0].collections[0]
    assert mesh.norm(1.0) == 0.5
    red, _, blue, _ = mesh.cmap(mesh.norm(1.2))
    assert blue > red
    red, _, blue, _ = mesh.cmap(mesh.norm(0.8))
    assert red > blue


def test_measured_figures_stand_in_bold_below_the_predicted_ones() -> None:
    axes = plots._heat_map_figure(CELLS, None, MEASURED).axes[0]
    bold = {text.get_text(): text.get_position() for text in axes.texts if text.get_fontweight() == "bold"}
    plain = {text.get_text(): text.get_position() for text in axes.texts if text.get_fontweight() != "bold"}
    assert list(bold) == ["1.10", "0.90"]
    assert list(plain) == ["1.25", "0.50", "0.80"]
    for real, predicted in (("1.10", "1.25"), ("0.90", "0.80")):
        assert bold[real][0] == plain[predicted][0]
        assert 0 < plain[predicted][1] - bold[real][1] < 1


def test_the_chosen_cell_has_a_frame_and_the_title_names_it() -> None:
    axes = plots._heat_map_figure(CELLS, (3, 2), []).axes[0]
    (frame,) = axes.patches
    assert frame.get_extents().transformed(axes.transData.inverted()).bounds == pytest.approx((1, 0, 1, 1))
    assert axes.get_title() == "chosen: E=3, γ=2"


def test_without_a_chosen_cell_there_is_no_frame() -> None:
    axes = plots._heat_map_figure(CELLS, None, MEASURED).axes[0]
    assert list(axes.patches) == []
    assert axes.get_title() == "no exit pays"


def test_the_scale_says_what_was_measured() -> None:
    with_real = plots._heat_map_figure(CELLS, None, MEASURED).axes[1].get_ylabel()
    without = plots._heat_map_figure(CELLS, None, []).axes[1].get_ylabel()
    assert "predicted speed over\nautoregressive decoding (×)" in without
    assert with_real == f"{without}\nbold: measured, on {MEASURED[0].answers} answers"


@pytest.mark.parametrize("exits", [1, 3, 29])
def test_figures_of_a_heat_map_stay_apart_however_many_there_are(exits: int) -> None:
    cells = [
        cell(exit_layer, length, 0.05 * exit_layer + 0.1)
        for exit_layer in range(1, exits + 1)
        for length in range(1, 13)
    ]
    figure = plots._heat_map_figure(cells, (1, 1), [measured(each, each.predicted) for each in cells])
    texts = figure.axes[0].texts
    assert len(texts) == 2 * 12 * exits
    found = boxes(figure, [*texts, figure.axes[0].title])
    assert overlaps(found) == 0
    assert is_inside(figure, found)
    assert min(text.get_fontsize() for text in texts) >= 8


# Predicted against measured


def test_points_have_their_spread_and_their_label() -> None:
    axes = plots._predicted_figure(MEASURED).axes[0]
    (bars,) = axes.containers
    points, _, (spread,) = bars.lines
    assert list(points.get_xdata()) == [0.9, 1.1]
    assert list(points.get_ydata()) == [0.8, 1.25]
    segments = [np.asarray(segment).tolist() for segment in spread.get_segments()]
    assert segments == [
        pytest.approx(np.array([[0.8, 0.8], [1.1, 0.8]])),
        pytest.approx(np.array([[1.0, 1.25], [1.3, 1.25]])),
    ]
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("E=6, γ=1", (0.9, 0.8)), ("E=3, γ=1", (1.1, 1.25))]


def test_the_diagonal_and_the_band_cover_the_picture() -> None:
    axes = plots._predicted_figure(MEASURED).axes[0]
    low, high = axes.get_xlim()
    assert axes.get_ylim() == (low, high)
    assert low < 0.8
    assert high > 1.3
    diagonal = next(line for line in axes.lines if line.get_label() == "predicted = measured")
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [low, high]
    band = next(patch for patch in axes.collections if patch.get_label() == "within ±15%")
    corners = band.get_paths()[0].vertices
    assert {round(float(y / x), 6) for x, y in corners} == {0.85, 1.15}


@pytest.mark.parametrize("count", [1, 12, 40])
def test_labels_of_equal_points_stay_apart(count: int) -> None:
    equal = [measured(cell(3, length, 1.0), 1.0) for length in range(1, count + 1)]
    figure = plots._predicted_figure(equal)
    found = boxes(figure, figure.axes[0].texts)
    labels = np.array([Text.get_window_extent(text).extents for text in figure.axes[0].texts])
    assert len(labels) == count
    assert overlaps(labels) == 0
    assert is_inside(figure, found)


# Tokens by layer


def test_layers_grow_upwards_and_cells_are_coloured_by_the_last_layers_choice() -> None:
    axes = plots._tokens_figure(TOKENS, CHOICES, LAYERS, DECIDED).axes[0]
    mesh: Any = axes.collections[0]
    assert np.asarray(mesh.get_array()).tolist() == [[0, 1, 0], [2, 0, 2], [2, 2, 2]]
    assert [matplotlib.colors.to_hex(mesh.cmap(mesh.norm(level))) for level in range(3)] == list(plots.CHOICE_COLOURS)
    assert said(axes.get_yticklabels()) == ["1", "2", "4"]
    assert {text.get_text() for text in axes.texts if text.get_position()[1] < 1} == {"·a", "$x$", "□"}


def test_tokens_are_shown_as_they_stand_on_one_line() -> None:
    axes = plots._tokens_figure(TOKENS, CHOICES, LAYERS, DECIDED).axes[0]
    assert said(axes.get_xticklabels()) == ["·the", "$x$", "↵"]
    assert all(not text.get_parse_math() for text in (*axes.texts, *axes.get_xticklabels()))


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("kitchen", "kitchen"),
        (" kitchen", "·kitchen"),
        (" kitchens", "·kitche…"),
        ("\t\r", "⇥←"),
        ("日🙂\x07\u200b", "□□□□"),
        ("é\ufffd", "é\ufffd"),
        ("", ""),
    ],
)
def test_how_a_token_is_shown(token: str, shown: str) -> None:
    assert plots._token(token) == shown


def test_a_full_picture_of_tokens_has_room_for_every_one(tmp_path: Path) -> None:
    layers, tokens = list(range(1, 31)), ["W" * 9] * 32
    figure = plots._tokens_figure(tokens, [tokens] * 30, layers, [1] * 32)
    axes = figure.axes[0]
    texts = [*axes.texts, *axes.get_xticklabels(), axes.title]
    assert len(texts) == 32 * 31 + 1
    found = boxes(figure, texts)
    assert overlaps(found) == 0
    assert is_inside(figure, found)
    assert min(text.get_fontsize() for text in texts) >= 7


# Where tokens are decided


def test_a_histogram_shows_shares_and_their_sum_per_category_and_of_all() -> None:
    figure = plots._histogram_figure(COUNTS, LAYERS)
    assert [axes.get_title() for axes in figure.axes] == ["all\n8 tokens", "chat\n4 tokens", "code $\n4 tokens"]
    bars = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert bars == [[0.125, 0.5, 0.375], [0.25, 0, 0.75], [0, 1, 0]]
    sums = [list(axes.lines[0].get_ydata()) for axes in figure.axes]
    assert sums == [[0.125, 0.625, 1], [0.25, 0.25, 1], [0, 1, 1]]
    assert all(list(axes.lines[1].get_ydata()) == sums[0] for axes in figure.axes[1:])
    assert said(figure.axes[0].get_xticklabels()) == ["1", "2", "4"]
    assert all(axes.get_ylim() == (0, 1.05) for axes in figure.axes)


def test_a_category_called_all_is_taken_as_it_is_and_comes_first() -> None:
    figure = plots._histogram_figure({"chat": {4: 1}, "all": {1: 2}}, LAYERS)
    assert [axes.get_title() for axes in figure.axes] == ["all\n2 tokens", "chat\n1 tokens"]


def test_a_category_without_tokens_is_an_empty_picture_that_says_so() -> None:
    axes = plots._histogram_figure({"chat": {1: 1}, "code": {1: 0}}, LAYERS).axes[2]
    assert axes.get_title() == "code\n0 tokens"
    assert [bar.get_height() for bar in axes.patches] == [0, 0, 0]


def test_one_category_stands_alone() -> None:
    (axes,) = plots._histogram_figure({"chat": {1: 1}}, LAYERS).axes
    assert axes.get_title() == "chat\n1 tokens"
    assert len(axes.lines) == 1


def test_titles_of_ten_categories_stay_apart() -> None:
    layers = list(range(1, 31))
    figure = plots._histogram_figure({f"{number} {'W' * 30}": {30: 100_000} for number in range(10)}, layers)
    assert len(figure.axes) == 11
    found = boxes(figure, [axes.title for axes in figure.axes])
    assert overlaps(found) == 0
    assert is_inside(figure, found)
    assert said(figure.axes[0].get_xticklabels())[-1] == "30"


# Bars


def test_bars_stand_in_the_order_given_from_the_top_with_their_spread() -> None:
    axes = plots._bars_figure(SPEEDS).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 0.5, 1.5]
    assert said(axes.get_yticklabels()) == ["autoregressive", "slow $", "self_speculative E=2 γ=4"]
    assert axes.yaxis_inverted()
    whiskers = [list(line.get_xdata()) for line in axes.lines[:3]]
    assert whiskers == [[1.0, 1.0], [0.4, 0.55], [1.5, 1.8]]
    assert list(axes.lines[3].get_xdata()) == [1, 1]
    assert [text.get_text().split() for text in axes.texts] == [
        ["1.00×", "20.0", "tokens/s"],
        ["0.50×", "10.0", "tokens/s"],
        ["1.50×", "30.0", "tokens/s"],
    ]
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] > 1.8
    assert "speed over autoregressive decoding (×)" in axes.get_xlabel()


def test_texts_of_many_bars_stay_apart() -> None:
    many: Any = [Speed("W" * 60, 1.5, 1.4, 1.6, 12345.6) for _ in range(40)]
    figure = plots._bars_figure(many)
    axes = figure.axes[0]
    found = boxes(figure, [*axes.texts, *axes.get_yticklabels()])
    assert overlaps(found) == 0
    assert is_inside(figure, found)
