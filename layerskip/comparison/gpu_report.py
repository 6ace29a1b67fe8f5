"""The tables of a benchmark of a device, and what follows from its figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from layerskip.comparison.gpu import Shape, compiled_name
from layerskip.comparison.levers import costs_table
from layerskip.comparison.scaling import scaling_points
from layerskip.comparison.table import format_table
from layerskip.comparison.time_limit import DONE, Finding
from layerskip.decoding.cost import CostTable, expected_tokens

ACCEPTANCES = (0.6, 0.8, 0.9)
# Of the tables: figures by name, and what they are divided by.
EXACTNESS = {name: (name, 1) for name in ("same", "first_difference", "tokens", "rounds", "drafted", "accepted")}
SPEEDS = {
    "tokens/s": ("tokens_per_second", 1),
    **{name: (name, 1) for name in ("lowest", "highest")},
    "rounds/s": ("rounds_per_second", 1),
    "tokens_per_round": ("tokens_per_round", 1),
    "prefill_ms": ("prefill_seconds", 1e-3),
    "first_call_seconds": ("first_call_seconds", 1),
    **{f"{name}_MB": (f"{name}_bytes", 1e6) for name in ("weight", "loaded", "peak")},
}
LEVERS = {
    "E": ("exit_layer", 1),
    "γ": ("num_draft_tokens", 1),
    "tokens/s": ("decode_tokens_per_second", 1),
    **{name: (name, 1) for name in ("ratio", "lowest_ratio", "highest_ratio", "predicted", "tokens_per_round")},
    **{name: (name, 1) for name in ("draft_acceptance_rate", "same_as_first", "answers", "first_call_seconds")},
}
Columns = Mapping[str, tuple[str, float]]


# --- What follows from the figures ------------------------------------------------------------------------------------


def compiled_predictions(shape: Shape, found: Mapping[str, Finding]) -> dict[str, Any]:
    """Returns what the compiled rounds of a shape would give, as far as they were measured.

    Args:
        shape: whose rounds they are.
        found: the findings of its speeds, by name.

    Returns:
        `seconds_per_draft`: what one draft more adds to a round, its share of the verification included, between the
        shortest and the longest draft length; `None` with fewer than two. `round_cost`: {name: what a round takes in
        compiled plain steps}. `ratios`: {name: {α: speed over compiled plain decoding}}, where a round of γ drafts
        gives 1 + α + … + α^γ tokens on average. Both are `None` where plain decoding was not measured.
    """
    rates = {name: each.figures["rounds_per_second"] for name, each in found.items() if each.status == DONE}
    rounds = {
        drafts: 1 / rates[compiled_name(shape, drafts)]
        for drafts in shape.compiled_num_draft_tokens
        if compiled_name(shape, drafts) in rates
    }
    first, last = min(rounds, default=0), max(rounds, default=0)
    added = (rounds[last] - rounds[first]) / (last - first) if first < last else None
    plain = rates.get("compiled-autoregressive")
    return {
        "seconds_per_draft": added,
        "round_cost": {compiled_name(shape, drafts): plain and seconds * plain for drafts, seconds in rounds.items()},
        "ratios": {
            compiled_name(shape, drafts): {
                str(rate): plain and expected_tokens(rate, drafts) / (seconds * plain) for rate in ACCEPTANCES
            }
            for drafts, seconds in rounds.items()
        },
    }


def eager_predictions(shape: Shape, costs: CostTable) -> list[dict[str, Any]]:
    """Returns for each exit and assumed acceptance the speed over eager plain decoding, at the best draft length."""
    return [point.to_dict() for point in scaling_points(costs, shape.context, ACCEPTANCES)]


# --- As tables --------------------------------------------------------------------------------------------------------


def findings_table(found: Sequence[Finding], columns: Columns) -> str:
    """Returns a line for each finding, with those columns that any of them has."""
    return figures_table([(each.name, each.figures) for each in found if each.status == DONE], columns)


def figures_table(rows: Sequence[tuple[str, Mapping[str, Any]]], columns: Columns) -> str:
    """Returns a line for each name with its figures; columns without any are left out, and so is a table."""
    shown = {
        title: (name, unit)
        for title, (name, unit) in columns.items()
        if any(figures.get(name) is not None for _, figures in rows)
    }
    lines = [[name, *(_in_unit(figures.get(key), unit) for key, unit in shown.values())] for name, figures in rows]
    return format_table(["", *shown], lines) if rows else ""


def _in_unit(value: Any, unit: float) -> Any:
    return value if unit == 1 or value is None else value / unit


def costs_report(table: CostTable) -> str:
    """Returns a line for each exit of a table of costs; and what a plain step and the heads take."""
    milliseconds = [1e3 * each for each in (table.autoregressive_step, table.head, table.draft_head)]
    beside = "plain step {:.2f} ms, head {:.2f} ms, draft head {:.2f} ms".format(*milliseconds)
    return f"{costs_table(table)}\n{beside}"


def predictions_table(shape: Shape, predictions: Mapping[str, Any]) -> str:
    """Returns a line for each compiled draft length: what a round costs, and ratios at assumed acceptances."""
    header = ["predicted over compiled-autoregressive", "round in steps", *(f"α={rate}" for rate in ACCEPTANCES)]
    rows = [[name, predictions["round_cost"][name], *ratios.values()] for name, ratios in predictions["ratios"].items()]
    seconds = predictions["seconds_per_draft"]
    added = "" if seconds is None else f"\na draft more adds {1e3 * seconds:.3f} ms to a compiled round"
    return format_table(header, rows) + added if rows else ""


def eager_table(points: Sequence[Mapping[str, Any]]) -> str:
    """Returns a line for each exit: eager ratios at assumed acceptances, each with the draft length that it takes."""
    by_exit = itertools.groupby(points, key=lambda point: point["exit_layer"])
    rows = [
        [f"E={layer}", *(f"{point['speed_up']:.2f} (γ={point['num_draft_tokens']})" for point in group)]
        for layer, group in by_exit
    ]
    return format_table(["predicted over autoregressive", *(f"α={rate}" for rate in ACCEPTANCES)], rows)
