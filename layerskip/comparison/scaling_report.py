"""The files of a measurement of costs by context and rows: scaling.json, scaling.csv, scaling.png; and its tables."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layerskip.comparison.memory import CacheSizes
from layerskip.comparison.scaling import ScalingPoint, pays_up_to
from layerskip.comparison.table import format_table
from layerskip.decoding.cost import CostTable
from layerskip.files import replacing, write_text

CSV_HEADER = (
    "context",
    "rows",
    "exit_layer",
    "acceptance",
    "autoregressive_seconds",
    "self_speculative_seconds",
    "speed_up",
    "num_draft_tokens",
    "chosen_num_draft_tokens",
)


def write_scaling(
    folder: Path,
    points: Sequence[ScalingPoint],
    costs: Sequence[CostTable],
    cache_sizes: CacheSizes | None,
    about: Mapping[str, Any],
) -> None:
    """Writes scaling.json and scaling.csv from what there is.

    Args:
        folder: that is there.
        costs: the tables that the points follow from.
        about: settings and machine, which go into scaling.json.
    """
    rows = [point.to_dict() for point in points]
    found = {
        **about,
        "points": rows,
        "cost_tables": [table.to_dict() for table in costs],
        "cache_bytes": None if cache_sizes is None else asdict(cache_sizes),
    }
    write_text(folder / "scaling.json", json.dumps(found, indent=1) + "\n")
    with replacing(folder / "scaling.csv") as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_HEADER)
        writer.writeheader()
        writer.writerows(rows)


def points_table(points: Sequence[ScalingPoint]) -> str:
    """Returns a line for each point: milliseconds a token of both strategies, and what a controller would choose."""
    header = ["context", "rows", "E", "α", "autoregressive_ms", "self_speculative_ms", "best γ", "speed_up", "chosen γ"]
    rows = [
        [
            str(point.context),
            point.rows,
            point.exit_layer,
            f"{point.acceptance:g}",
            f"{1e3 * point.autoregressive_seconds:.3f}",
            f"{1e3 * point.self_speculative_seconds:.3f}",
            point.num_draft_tokens,
            point.speed_up,
            point.chosen_num_draft_tokens,
        ]
        for point in points
    ]
    return f"{format_table(header, rows)}\nms: of a token, those of all rows counted; chosen γ: 0 is plain decoding"


def limits(points: Sequence[ScalingPoint]) -> list[dict[str, Any]]:
    """Returns for each exit, acceptance and context up to how many rows drafting pays; see `pays_up_to`."""

    def place(point: ScalingPoint) -> tuple[int, float, int]:
        return point.exit_layer, point.acceptance, point.context

    return [
        {"exit_layer": exit_layer, "acceptance": acceptance, "context": context, "pays_up_to": pays_up_to(list(group))}
        for (exit_layer, acceptance, context), group in itertools.groupby(sorted(points, key=place), key=place)
    ]


def limits_table(points: Sequence[ScalingPoint]) -> str:
    """Returns a line for each exit and acceptance, a column for each context: up to how many rows drafting pays."""
    contexts = sorted({point.context for point in points})
    settings = sorted({(point.exit_layer, point.acceptance) for point in points})
    found = {(each["exit_layer"], each["acceptance"], each["context"]): each["pays_up_to"] for each in limits(points)}
    rows = [
        [f"E={exit_layer} α={acceptance:g}", *(found.get((exit_layer, acceptance, context)) for context in contexts)]
        for exit_layer, acceptance in settings
    ]
    return format_table(["pays up to how many rows, by context", *map(str, contexts)], rows)


def cache_table(sizes: CacheSizes) -> str:
    """Returns the size of both caches, in bytes, and what makes them differ."""
    rows = [["shared cache", sizes.shared], ["DynamicCache", sizes.dynamic]]
    note = f"{sizes.sliding_layers} of {sizes.num_layers} layers have a sliding window"
    if sizes.sliding_layers:
        note += ", which the DynamicCache cuts them to; the shared cache keeps them at full length"
    return f"{format_table([f'one row of {sizes.context} tokens', 'bytes'], rows)}\n{note}"
