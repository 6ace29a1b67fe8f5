"""The files of a comparison of exits: exits.json, exits.csv and pictures, each whole at any time; and its tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerskip.comparison.decided import decided_layers
from layerskip.comparison.exit_comparison import ALL, CSV_HEADER, ExitComparison, Recommendation
from layerskip.comparison.plots import (
    MAX_TOKENS,
    decided_histogram,
    heat_map,
    predicted_against_measured,
    quality_by_layer,
    tokens_by_layer,
)
from layerskip.comparison.prediction import best_cell
from layerskip.comparison.table import format_table
from layerskip.files import replacing, write_text


def write_report(
    folder: Path,
    comparison: ExitComparison,
    recommendation: Recommendation | None,
    about: Mapping[str, Any],
) -> None:
    """Writes exits.json and exits.csv from what there is.

    Args:
        recommendation: what real runs recommend; `None` before them, when the comparison is not complete.
        about: settings and versions, which go into exits.json.
    """
    found = {
        "complete": recommendation is not None,
        **about,
        "recommendation": None if recommendation is None else vars(recommendation),
        **comparison.to_dict(),
    }
    write_text(folder / "exits.json", json.dumps(found, indent=1) + "\n")
    with replacing(folder / "exits.csv") as draft, draft.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([CSV_HEADER, *comparison.csv_rows()])


def draw(
    folder: Path, comparison: ExitComparison, recommendation: Recommendation | None, decode: Callable[[int], str]
) -> list[Path]:
    """Draws what there is data for, and returns the files.

    Args:
        decode: gives the text of a token.
    """
    quality, cells = comparison.quality()[ALL], comparison.cells()
    chosen = None
    if recommendation is not None and recommendation.exit_layer is not None:
        chosen = (recommendation.exit_layer, recommendation.num_draft_tokens or 0)
    drawn = []
    if quality:
        drawn += [folder / "quality.png", folder / "decided.png", folder / "tokens.png"]
        quality_by_layer(quality, comparison.num_layers, drawn[0])
        decided_histogram(comparison.decided(), comparison.layers, drawn[1])
        _draw_tokens(comparison, decode, drawn[2])
    if cells and recommendation is not None:
        drawn.append(folder / "heatmap.png")
        heat_map(cells, chosen, comparison.measured, drawn[-1])
    if comparison.measured:
        drawn.append(folder / "predicted.png")
        predicted_against_measured(comparison.measured, drawn[-1])
    return drawn


def _draw_tokens(comparison: ExitComparison, decode: Callable[[int], str], path: Path) -> None:
    """Draws what every layer would have written for the beginning of the answer that is most varied there."""
    answers = [answer for answer in comparison.groups()[ALL] if answer.reading.tokens]
    answer = max(answers, key=lambda each: len(set(each.token_ids[1 : MAX_TOKENS + 1])))
    choices = [row[:MAX_TOKENS] for row in answer.reading.choices]
    texts = {
        token: decode(token) for token in {*answer.token_ids[1 : MAX_TOKENS + 1], *(t for row in choices for t in row)}
    }
    tokens_by_layer(
        [texts[token] for token in answer.token_ids[1 : MAX_TOKENS + 1]],
        [[texts[token] for token in row] for row in choices],
        comparison.layers,
        decided_layers(choices, comparison.layers),
        path,
    )


def exits_table(comparison: ExitComparison) -> str:
    """Returns a line for each exit: its quality and, where costs are known, its best predicted draft length.

    `decided_by_then` is the share of tokens that are decided at this exit or a lower one.
    """
    quality, decided, cells = comparison.quality()[ALL], comparison.decided()[ALL], comparison.cells()
    header = ["exit_layer", "perplexity", "agreement", "expected_acceptance", "decided_by_then"]
    header += ["c", "best γ", "tokens_per_round", "predicted"] if cells else []
    rows: list[list[Any]] = []
    total = 0
    for each in quality:
        total += decided[each.exit_layer]
        share = total / each.tokens
        name = f"{each.exit_layer} (last)" if each.exit_layer == comparison.num_layers else str(each.exit_layer)
        rows.append([name, each.perplexity, f"{each.agreement:.3f}", f"{each.expected_acceptance:.3f}", f"{share:.3f}"])
        mine = [cell for cell in cells if cell.exit_layer == each.exit_layer]
        if mine and comparison.costs is not None:
            best = best_cell(mine)
            c = comparison.costs.c(each.exit_layer)
            rows[-1] += [c, best.num_draft_tokens, best.tokens_per_round, best.predicted]
        elif cells:
            rows[-1] += [None] * 4
    return format_table(header, rows)


def categories_table(comparison: ExitComparison) -> str:
    """Returns the agreement of each exit in each category, one line each; empty without categories."""
    groups = {name: exits for name, exits in comparison.quality().items() if name != ALL and exits}
    header = ["agreement", "tokens", *(f"E={layer}" for layer in comparison.exit_layers)]
    rows: list[Sequence[Any]] = [
        [name, exits[0].tokens, *(f"{each.agreement:.3f}" for each in exits[:-1])] for name, exits in groups.items()
    ]
    return format_table(header, rows) if rows else ""


def measured_table(comparison: ExitComparison) -> str:
    """Returns a line for each cell that was run for real, beside what was predicted, and what the columns mean."""
    header = ["E", "γ", "tokens_per_round", "replayed", "predicted_run", "measured", "spread", "error", "same_as_plain"]
    rows = [
        [
            str(each.cell.exit_layer),
            each.cell.num_draft_tokens,
            each.tokens_per_round,
            each.cell.tokens_per_round,
            each.cell.predicted,
            each.measured,
            f"{each.lowest:.2f}–{each.highest:.2f}",
            f"{each.error:+.0%}",
            f"{each.same_as_plain} of {each.answers}",
        ]
        for each in comparison.measured
    ]
    if not rows:
        return ""
    legend = (
        f"replayed, predicted_run: on the {comparison.measured[0].answers} answers that were run; error: predicted_run "
        "over measured, minus 1; spread: the slowest and the fastest pass"
    )
    return f"{format_table(header, rows)}\n{legend}"
