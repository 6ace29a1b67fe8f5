"""Pictures of what was compared and measured, each a PNG that appears whole or not at all; needs the extra `plot`.

Figures are made without pyplot, so that a caller's own figures, backend and settings stay as they are. Layers grow
upwards, blue is good, and the colours can be told apart by colour-blind readers (Okabe and Ito's, and RdBu).

Every function that takes a `path`, the PNG, raises ValueError for what is empty or does not fit together, ImportError
where matplotlib is missing, and OSError where `path` cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerskip.comparison.prediction import Cell, MeasuredCell
from layerskip.comparison.quality import ExitQuality
from layerskip.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from layerskip.comparison.benchmark import Measurement

DPI = 150
MAX_TOKENS = 32
TOLERANCE = 0.15
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#666666"
# Another choice than the last layer's, the same, the same from here on.
CHOICE_COLOURS = ("#f2f2f2", "#cfe4f3", "#7dbbe3")
_SIGNS = str.maketrans({" ": "·", "\n": "↵", "\r": "←", "\t": "⇥"})
_SPEED_UP = "speed over autoregressive decoding (×)"


def require_matplotlib() -> None:
    """Raises ImportError, which says what to install, where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError('plots need matplotlib, which is missing: run `pip install "layerskip[plot]"`.') from error


def quality_by_layer(quality: Sequence[ExitQuality], num_layers: int, path: Path) -> None:
    """Draws agreement, expected acceptance and perplexity of every exit; the last layer's are lines to compare with.

    An infinite perplexity is a triangle at the upper edge.

    Args:
        quality: of at least one exit, in any order, and the last layer's where it is to be a line of perplexity.
        num_layers: L.

    Raises:
        ValueError: no exit below L, or a layer above it.
    """
    write_figure(_quality_figure(quality, num_layers), path)


def heat_map(
    cells: Sequence[Cell], chosen: tuple[int, int] | None, measured: Sequence[MeasuredCell], path: Path
) -> None:
    """Draws the predicted speed-up of every cell, and in bold below it what was measured where it was run for real.

    Args:
        cells: at least one; pairs of E and γ that are not among them stay blank.
        chosen: E and γ of the cell to frame, one of these; `None` where no exit pays.
        measured: of some of these; may be empty.

    Raises:
        ValueError: no cells, or a chosen or measured one that is not among them.
    """
    write_figure(_heat_map_figure(cells, chosen, measured), path)


def predicted_against_measured(measured: Sequence[MeasuredCell], path: Path) -> None:
    """Draws predicted over measured speed-ups, with the spread of the repeats and a band of `TOLERANCE` either way."""
    write_figure(_predicted_figure(measured), path)


def tokens_by_layer(
    tokens: Sequence[str], choices: Sequence[Sequence[str]], layers: Sequence[int], decided: Sequence[int], path: Path
) -> None:
    """Draws what each layer would have written in place of every token of one text.

    Blue where that is the last layer's choice, strong blue from the layer on at which the token is decided. A space
    is shown as `·`, a line's end as `↵`, and what the font lacks as `□`; long tokens are cut.

    Args:
        tokens: what the model wrote, 1 to `MAX_TOKENS`.
        choices: for each layer its choice in place of each token.
        layers: the exits in rising order, then L; at least one.
        decided: for each token the layer from which on all choose it.
    """
    write_figure(_tokens_figure(tokens, choices, layers, decided), path)


def decided_histogram(decided: Mapping[str, Mapping[int, int]], layers: Sequence[int], path: Path) -> None:
    """Draws at which layer the tokens of each category are decided, and the share that is decided up to each layer.

    Args:
        decided: for each category how many tokens are decided at which layer, at least one in all. Where there are
            several categories and none is called `all`, their sum comes first under that name.
        layers: the exits in rising order, then L.
    """
    write_figure(_histogram_figure(decided, layers), path)


def benchmark_bars(measurements: Sequence[Measurement], path: Path) -> None:
    """Draws the speed of each way to generate over autoregressive decoding, from top to bottom as they are given.

    Bars are medians over the repeats, whiskers go from the lowest to the highest. Beside them stand tokens per second.
    """
    write_figure(_bars_figure(measurements), path)


def _quality_figure(quality: Sequence[ExitQuality], num_layers: int) -> Figure:
    exits = sorted((each for each in quality if each.exit_layer < num_layers), key=lambda each: each.exit_layer)
    last = next((each for each in quality if each.exit_layer == num_layers), None)
    if not exits or len(exits) + (last is not None) < len(quality):
        found = [each.exit_layer for each in quality]
        raise ValueError(f"quality is of layers {found}; pass one exit or more below {num_layers} and none above it.")
    figure = new_figure(10, 4.6)
    shares, perplexities = figure.subplots(1, 2)
    at = [each.exit_layer for each in exits]
    style: dict[str, Any] = {"linewidth": 1.8, "markersize": 5}
    shares.plot(at, [each.agreement for each in exits], "o-", color=BLUE, label="agreement", **style)
    accepted = [each.expected_acceptance for each in exits]
    shares.plot(at, accepted, "s--", color=ORANGE, label="expected acceptance, Σ min(p, q)", **style)
    shares.axhline(1, color=GREY, linestyle=":", label="last layer")
    shares.set(ylim=(0, 1.04), ylabel="mean over the answers' tokens (0 to 1)", title="Agreement with the last layer")
    finite = [each.perplexity if math.isfinite(each.perplexity) else math.nan for each in exits]
    perplexities.plot(at, finite, "o-", color=BLUE, label="exit", **style)
    endless = [each.exit_layer for each in exits if math.isinf(each.perplexity)]
    if endless:
        top = perplexities.get_xaxis_transform()
        perplexities.plot(endless, [0.97] * len(endless), "^", color=ORANGE, transform=top, label="infinite")
    if last is not None and math.isfinite(last.perplexity):
        label = f"last layer: {last.perplexity:.3g}"
        perplexities.axhline(last.perplexity, color=GREY, linestyle=":", label=label)
    perplexities.set_yscale("log", subs=(2, 5))
    perplexities.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    perplexities.set(ylabel="perplexity of the answers' tokens (log scale)", title="Perplexity of the model's answers")
    for axes in (shares, perplexities):
        axes.set(xlim=(0.5, num_layers + 0.5), xlabel=f"exit layer E (of {num_layers} layers)")
        axes.locator_params(axis="x", integer=True)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=8.5)
    return figure


def _heat_map_figure(cells: Sequence[Cell], chosen: tuple[int, int] | None, measured: Sequence[MeasuredCell]) -> Figure:
    if not cells:
        raise ValueError("cells is empty; pass at least one exit and draft length.")
    predicted = {cell.place: cell.predicted for cell in cells}
    real = {each.cell.place: each.measured for each in measured}
    for name, keys in (("chosen", set() if chosen is None else {chosen}), ("measured", set(real))):
        if unknown := keys - set(predicted):
            raise ValueError(f"{name} has (E, γ) = {sorted(unknown)}, which are not among cells; add them there.")
    exits, lengths = (sorted(set(numbers)) for numbers in zip(*predicted, strict=True))
    grid = np.full((len(exits), len(lengths)), np.nan)
    for (exit_layer, length), value in predicted.items():
        grid[exits.index(exit_layer), lengths.index(length)] = value
    figure = new_figure(max(0.62 * len(lengths) + 2.2, 5), max(0.4 * len(exits) + 1.6, 3.4))
    axes = figure.subplots()

    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.patches import Rectangle

    # White at 1, full blue at the best cell or further up, so that noise is pale.
    best = max(1.3, *predicted.values())
    norm = TwoSlopeNorm(1, vmin=0, vmax=best)
    mesh = axes.pcolormesh(np.ma.masked_invalid(grid), cmap="RdBu", norm=norm, edgecolors="white", linewidth=1)
    for key, value in predicted.items():
        x, y = lengths.index(key[1]) + 0.5, exits.index(key[0]) + 0.5
        red, green, blue, _ = mesh.cmap(norm(value))
        is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": "white" if is_dark else "black"}
        axes.text(x, y + (0.22 if key in real else 0), f"{value:.2f}", fontsize=8, **style)
        if key in real:
            axes.text(x, y - 0.22, f"{real[key]:.2f}", fontsize=8.5, fontweight="bold", **style)
        if key == chosen:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="black", lw=3, clip_on=False))
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [str(length) for length in lengths])
    axes.set_yticks(np.arange(len(exits)) + 0.5, [str(exit_layer) for exit_layer in exits])
    axes.tick_params(length=0)
    axes.set(xlabel="γ: draft tokens per round, at most", ylabel="exit layer E")
    axes.set_title("no exit pays" if chosen is None else f"chosen: {_setting(*chosen)}", fontweight="bold")
    ticks = [0, 0.25, 0.5, 0.75, 1, (1 + best) / 2, best]
    bar = figure.colorbar(mesh, ax=axes, ticks=ticks, format="{x:.2f}", aspect=max(20, 2 * len(exits)))
    bar.set_label(
        "predicted speed over\nautoregressive decoding (×)"
        + (f"\nbold: measured, on {measured[0].answers} answers" if real else "")
    )
    return figure


def _predicted_figure(measured: Sequence[MeasuredCell]) -> Figure:
    if not measured:
        raise ValueError("measured is empty; run at least one cell for real.")
    figure = new_figure(7, max(5.4, 0.22 * len(measured) + 1))
    axes = figure.subplots()
    points = sorted(measured, key=lambda each: (round(each.cell.predicted, 2), -each.measured))
    values = [value for each in points for value in (each.lowest, each.highest, each.cell.predicted)]
    low, high = min(values) * 0.92, max(values) * 1.08
    line, band = np.array([low, high]), f"within ±{TOLERANCE:.0%}"
    axes.fill_between(line, line * (1 - TOLERANCE), line * (1 + TOLERANCE), color=BLUE, alpha=0.13, lw=0, label=band)
    axes.plot(line, line, color=GREY, linestyle="--", label="predicted = measured")
    # The labels stand in a column beside the picture, so that none covers another, and in an order in which the lines
    # to the points hardly cross: from below, and of points at one height the right one first.
    gap = min(0.05, 1 / len(points))
    places = [(each.cell.predicted - low) / (high - low) for each in points]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + gap)
    places = [min(place, 1 - gap * (len(places) - 1 - index)) for index, place in enumerate(places)]
    arrow = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5}
    for each, place in zip(points, places, strict=True):
        point = (each.measured, each.cell.predicted)
        name = _setting(*each.cell.place)
        axes.annotate(
            name, point, (1.03, place), textcoords="axes fraction", va="center", fontsize=8.5, arrowprops=arrow
        )
    x = [each.measured for each in points]
    spread = [[each.measured - each.lowest for each in points], [each.highest - each.measured for each in points]]
    style: dict[str, Any] = {"color": ORANGE, "capsize": 3, "label": "median, slowest to fastest repeat"}
    axes.errorbar(x, [each.cell.predicted for each in points], xerr=spread, fmt="o", **style)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", title="Predicted against measured speed-up")
    axes.set(xlabel=f"measured {_SPEED_UP}", ylabel=f"predicted {_SPEED_UP}")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _tokens_figure(
    tokens: Sequence[str], choices: Sequence[Sequence[str]], layers: Sequence[int], decided: Sequence[int]
) -> Figure:
    if not 1 <= len(tokens) <= MAX_TOKENS:
        raise ValueError(f"tokens has {len(tokens)} entries; pass 1 to {MAX_TOKENS}, which is what fits.")
    if not layers or len(choices) != len(layers):
        raise ValueError(f"choices has {len(choices)} rows for {len(layers)} layers; pass one for each, at least one.")
    for name, row in (*(("a row of choices", row) for row in choices), ("decided", decided)):
        if len(row) != len(tokens):
            raise ValueError(f"{name} has {len(row)} entries for {len(tokens)} tokens; pass one for each.")
    same = np.array([[mine == last for mine, last in zip(row, choices[-1], strict=True)] for row in choices])
    is_decided = np.array(layers)[:, None] >= np.array(decided)[None, :]
    figure = new_figure(max(0.53 * len(tokens) + 1, 8), 0.21 * len(layers) + 1.3)
    axes = figure.subplots()

    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours: dict[str, Any] = {"cmap": ListedColormap(CHOICE_COLOURS), "vmin": 0, "vmax": 2}
    axes.pcolormesh(same * (1 + is_decided), edgecolors="white", linewidth=1, **colours)
    style: dict[str, Any] = {"family": "monospace", "fontsize": 7, "parse_math": False}
    for y, row in enumerate(choices):
        for x, choice in enumerate(row):
            colour = "black" if same[y, x] else GREY
            axes.text(x + 0.5, y + 0.46, _token(choice), ha="center", va="center", color=colour, **style)
    axes.set_xticks(np.arange(len(tokens)) + 0.5, [_token(token) for token in tokens], fontweight="bold", **style)
    axes.set_yticks(np.arange(len(layers)) + 0.5, [str(layer) for layer in layers], fontsize=8)
    axes.tick_params(length=0, labelbottom=False, labeltop=True)
    axes.set_ylabel("layer")
    axes.set_title("What each layer would have written (on top: what the model wrote)", fontsize=10, pad=8)
    names = ("another token than the last layer's", "the last layer's token", "the same from this layer on: decided")
    patches = [Patch(color=colour, label=name) for colour, name in zip(CHOICE_COLOURS, names, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    return figure


def _token(text: str) -> str:
    return _fitting(text.translate(_SIGNS), "monospace", 8)


def _fitting(text: str, family: str, most: int) -> str:
    """Returns at most so many characters of `text`, all of which the font has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=[family])))
    drawn = "".join(sign if sign.isprintable() and font.get_char_index(ord(sign)) else "□" for sign in text)
    return drawn if len(drawn) <= most else drawn[: most - 1] + "…"


def _histogram_figure(decided: Mapping[str, Mapping[int, int]], layers: Sequence[int]) -> Figure:
    if not any(sum(counts.values()) for counts in decided.values()):
        raise ValueError("decided has no tokens; pass at least one category with one.")
    for name, counts in decided.items():
        if unknown := set(counts) - set(layers):
            raise ValueError(f"decided[{name!r}] has layers {sorted(unknown)}, which are not among {list(layers)}.")
    panels = decided
    if len(decided) > 1:
        together = {layer: sum(counts.get(layer, 0) for counts in decided.values()) for layer in layers}
        panels = {"all": together, **decided}
    columns, rows = min(4, len(panels)), math.ceil(len(panels) / 4)
    figure = new_figure(max(3.1 * columns, 5), 2.3 * rows + 0.9)
    at, step = np.arange(len(layers)), math.ceil(len(layers) / 8)
    totals = {name: np.cumsum([counts.get(layer, 0) for layer in layers]) for name, counts in panels.items()}
    for index, (name, total) in enumerate(totals.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        shares = total / max(total[-1], 1)
        axes.bar(at, np.diff(shares, prepend=0), width=0.85, color=BLUE, zorder=2, label="decided at this layer")
        axes.plot(at, shares, color=ORANGE, marker=".", label="decided up to this layer")
        if name != "all" and "all" in totals:
            overall = totals["all"] / totals["all"][-1]
            axes.plot(at, overall, ":", color=GREY, label="decided up to this layer, all categories")
        axes.set_title(f"{_fitting(name, 'sans-serif', 20)}\n{total[-1]} tokens", fontsize=9.5, parse_math=False)
        axes.set(ylim=(0, 1.05), xlim=(-0.6, len(layers) - 0.4))
        axes.set_xticks(at[::-step][::-1], [str(layer) for layer in layers[::-step][::-1]])
        axes.grid(alpha=0.25, axis="y")
        axes.tick_params(labelsize=8)
    figure.supxlabel("layer from which on all choose the last layer's token", fontsize=10)
    figure.supylabel("share of tokens (0 to 1)", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def _bars_figure(measurements: Sequence[Measurement]) -> Figure:
    if not measurements:
        raise ValueError("measurements is empty; pass at least one.")
    figure = new_figure(9, 0.38 * len(measurements) + 1.3)
    axes = figure.subplots()
    for at, each in enumerate(measurements):
        axes.barh(at, each.ratio, height=0.68, color=BLUE if each.ratio > 1 else ORANGE if each.ratio < 1 else GREY)
        axes.plot((each.lowest_ratio, each.highest_ratio), (at, at), color="black", marker="|", linewidth=1.2)
        label = f"{each.ratio:.2f}×  {each.decode_tokens_per_second:7.1f} tokens/s"
        axes.text(1.02, at, label, va="center", fontsize=9, transform=axes.get_yaxis_transform())
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    labels = [_fitting(each.label, "sans-serif", 40) for each in measurements]
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    reach = max(1, *(max(each.ratio, each.highest_ratio) for each in measurements))
    axes.set(xlim=(0, 1.05 * reach), ylim=(len(labels) - 0.4, -0.6), title="Decoding speed")
    axes.set_xlabel(f"{_SPEED_UP}: median; whiskers: lowest and highest repeat")
    return figure


def _setting(exit_layer: int, num_draft_tokens: int) -> str:
    return f"E={exit_layer}, γ={num_draft_tokens}"


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of this size in inches, which makes room for its labels by itself."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: Figure, path: Path) -> None:
    """Writes a PNG, whole or not at all."""
    with replacing(path) as draft:
        figure.savefig(draft, format="png", dpi=DPI, facecolor="white")
