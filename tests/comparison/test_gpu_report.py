"""What follows from the figures of a device, by hand, and what its tables show."""

from __future__ import annotations

from typing import Any

import pytest

from layerskip.comparison.gpu import SHAPES
from layerskip.comparison.gpu_report import (
    EXACTNESS,
    SPEEDS,
    compiled_predictions,
    costs_report,
    eager_predictions,
    eager_table,
    figures_table,
    findings_table,
    predictions_table,
)
from layerskip.comparison.time_limit import Finding
from layerskip.decoding.cost import CostTable

TINY = SHAPES["tiny"]
# A plain step takes 8 ms; a draft 1 ms; a verification 8 ms and another 1 for each draft.
TABLE = CostTable((1, 2), (0.001, 0.002), ((0.008, 0.009, 0.010), (0.008, 0.009, 0.010)), 0.008, 0.0005, 0.0004)


def rates(**changes: float) -> dict[str, Finding]:
    """Returns compiled findings by rounds a second: 100 plain ones; 50 and 40 of one and two drafts."""
    numbers = {"compiled-autoregressive": 100.0, "compiled E=2 γ=1": 50.0, "compiled E=2 γ=2": 40.0, **changes}
    return {name: Finding(name, "done", figures={"rounds_per_second": rate}) for name, rate in numbers.items()}


def test_compiled_rounds_are_told_in_plain_steps_and_at_assumed_acceptances() -> None:
    found = compiled_predictions(TINY, rates())
    assert found["seconds_per_draft"] == pytest.approx(0.025 - 0.020)
    assert found["round_cost"] == pytest.approx({"compiled E=2 γ=1": 2.0, "compiled E=2 γ=2": 2.5})
    assert found["ratios"]["compiled E=2 γ=1"] == pytest.approx({"0.6": 0.8, "0.8": 0.9, "0.9": 0.95})
    assert found["ratios"]["compiled E=2 γ=2"]["0.8"] == pytest.approx((1 + 0.8 + 0.64) / 2.5)
    lines = predictions_table(TINY, found).splitlines()
    assert lines[2].split() == ["compiled", "E=2", "γ=1", "2.00", "0.80", "0.90", "0.95"]
    assert lines[-1] == "a draft more adds 5.000 ms to a compiled round"


@pytest.mark.parametrize("missing", ["compiled-autoregressive", "compiled E=2 γ=1"])
def test_what_was_not_measured_leaves_what_follows_from_it_open(missing: str) -> None:
    found = rates()
    found[missing] = Finding(missing, "not reached")
    predicted = compiled_predictions(TINY, found)
    if missing == "compiled-autoregressive":
        assert predicted["seconds_per_draft"] == pytest.approx(0.005)
        assert predicted["round_cost"] == {"compiled E=2 γ=1": None, "compiled E=2 γ=2": None}
        assert set(predicted["ratios"]["compiled E=2 γ=2"].values()) == {None}
    else:
        assert predicted["seconds_per_draft"] is None
        assert list(predicted["ratios"]) == ["compiled E=2 γ=2"]
        assert "a draft more" not in predictions_table(TINY, predicted)


def test_without_compiled_rounds_nothing_is_predicted() -> None:
    predicted = compiled_predictions(TINY, {})
    assert predicted == {"seconds_per_draft": None, "round_cost": {}, "ratios": {}}
    assert predictions_table(TINY, predicted) == ""


def test_eager_predictions_are_at_the_best_draft_length() -> None:
    points = eager_predictions(TINY, TABLE)
    assert [(point["exit_layer"], point["acceptance"]) for point in points] == [
        (layer, rate) for layer in (1, 2) for rate in (0.6, 0.8, 0.9)
    ]
    assert points[1]["speed_up"] == pytest.approx((1 + 0.8 + 0.64) * 8 / 12)
    assert eager_table(points).splitlines()[2].split()[:3] == ["E=1", "1.31", "(γ=2)"]
    assert "plain step 8.00 ms, head 0.50 ms, draft head 0.40 ms" in costs_report(TABLE)


def test_tables_have_the_columns_that_any_row_has_and_the_rows_that_are_done() -> None:
    figures: dict[str, Any] = {"same": True, "first_difference": None, "tokens": 64}
    found = [Finding("static", "done", figures=figures), Finding("auto", "failed", figures=figures)]
    assert findings_table(found, EXACTNESS).splitlines()[0].split() == ["same", "tokens"]
    assert len(findings_table(found, EXACTNESS).splitlines()) == 3
    assert findings_table(found[1:], EXACTNESS) == ""
    speeds = [("plain", {"prefill_seconds": 0.004, "peak_bytes": 2_500_000}), ("other", {"prefill_seconds": None})]
    assert figures_table(speeds, SPEEDS).splitlines()[2].split() == ["plain", "4.00", "2.50"]
