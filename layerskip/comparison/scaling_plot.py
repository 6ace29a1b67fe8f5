"""A picture of what a token costs by context and rows, and where drafting stops paying; needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.comparison.plots import GREY, ORANGE, new_figure, write_figure
from layerskip.comparison.scaling import ScalingPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAYS_NOT = "drafting does not pay: plain decoding is faster"


def cost_by_context(points: Sequence[ScalingPoint], path: Path) -> None:
    """Draws milliseconds a token over the context, in a panel for each number of rows, exit by exit.

    One line is plain decoding's, the others are those of drafting at each acceptance, with a cross where it does not
    pay.

    Args:
        points: at least one.
        path: the PNG.

    Raises:
        ValueError: no points.
        ImportError: matplotlib is missing.
        OSError: `path` cannot be written.
    """
    write_figure(_cost_figure(points), path)


def _cost_figure(points: Sequence[ScalingPoint]) -> Figure:
    if not points:
        raise ValueError("points is empty; pass at least one.")
    exits = sorted({point.exit_layer for point in points})
    batch_sizes = sorted({point.rows for point in points})
    figure = new_figure(max(6.5, 2.6 * len(batch_sizes) + 1), 3 * len(exits) + 1.2)
    grid = figure.subplots(len(exits), len(batch_sizes), sharex=True, sharey=True, squeeze=False)
    for line, exit_layer in zip(grid, exits, strict=True):
        for axes, rows in zip(line, batch_sizes, strict=True):
            _draw_panel(axes, [each for each in points if (each.exit_layer, each.rows) == (exit_layer, rows)], points)
            axes.set_title(f"E={exit_layer}, {rows} {'row' if rows == 1 else 'rows'}", fontsize=9.5)
    figure.supxlabel("tokens of each row in the cache (log scale)", fontsize=10)
    figure.supylabel("milliseconds a token (log scale)", fontsize=10)
    # A panel may lack what others show.
    named = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _draw_panel(axes: Axes, mine: Sequence[ScalingPoint], points: Sequence[ScalingPoint]) -> None:
    """Draws the points of one exit and number of rows, in the colours that acceptances have in the whole picture."""
    from matplotlib import colormaps

    acceptances = sorted({point.acceptance for point in points})
    style: dict[str, Any] = {"linewidth": 1.6, "markersize": 4}
    by_context = sorted(mine, key=lambda point: point.context)
    plain = {point.context: 1e3 * point.autoregressive_seconds for point in by_context}
    axes.plot(list(plain), list(plain.values()), "s--", color=GREY, label="autoregressive", **style)
    for place, acceptance in enumerate(acceptances):
        line = [point for point in by_context if point.acceptance == acceptance]
        colour = colormaps["viridis"](0.85 * place / max(1, len(acceptances) - 1))
        x, y = [point.context for point in line], [1e3 * point.self_speculative_seconds for point in line]
        axes.plot(x, y, "o-", color=colour, label=f"self_speculative, best γ, α={acceptance:g}", **style)
    losing = [point for point in by_context if not point.pays]
    if losing:
        x, y = [point.context for point in losing], [1e3 * point.self_speculative_seconds for point in losing]
        axes.plot(x, y, "x", color=ORANGE, markersize=8, markeredgewidth=2, zorder=3, label=PAYS_NOT)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", subs=(2, 5))
    contexts = sorted({point.context for point in points})
    axes.set_xticks(contexts, [str(context) for context in contexts])
    axes.set_xticks([], minor=True)
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
