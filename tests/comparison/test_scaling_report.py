"""Files and tables of costs by context and rows hold what was measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from layerskip.comparison.memory import CacheSizes
from layerskip.comparison.scaling_report import cache_table, limits, limits_table, points_table, write_scaling
from layerskip.decoding.cost import CostTable
from tests.comparison.test_scaling import COSTS, point

# At 128 tokens drafting pays for one row and not for eight, at 512 for both; at the other acceptance for none.
POINTS = [
    point(),
    point(rows=8, self_speculative_seconds=1.25),
    point(context=512),
    point(context=512, rows=8, autoregressive_seconds=0.25, self_speculative_seconds=0.125, num_draft_tokens=2),
    *(point(context=context, acceptance=0.25, self_speculative_seconds=2.0) for context in (128, 512)),
]
SIZES = CacheSizes(context=4096, shared=4000, dynamic=2500, num_layers=4, sliding_layers=2)


def cells(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()]


def test_both_files_hold_every_point_and_the_json_the_tables_too(tmp_path: Path) -> None:
    write_scaling(tmp_path, POINTS, [COSTS], SIZES, {"complete": True, "device": "cpu"})
    found: dict[str, Any] = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))
    assert (found["complete"], found["device"]) == (True, "cpu")
    assert [CostTable.read(table, "here") for table in found["cost_tables"]] == [COSTS]
    assert found["cache_bytes"] == {
        "context": 4096, "shared": 4000, "dynamic": 2500, "num_layers": 4, "sliding_layers": 2,
    }  # fmt: skip
    assert found["points"] == [each.to_dict() for each in POINTS]
    assert found["points"][1]["speed_up"] == 0.8
    with (tmp_path / "scaling.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{name: str(value) for name, value in each.to_dict().items()} for each in POINTS]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scaling.csv", "scaling.json"]


def test_files_are_written_anew_and_need_no_sizes_of_caches(tmp_path: Path) -> None:
    write_scaling(tmp_path, POINTS, [COSTS], SIZES, {})
    write_scaling(tmp_path, POINTS[:1], [], None, {})
    found = json.loads((tmp_path / "scaling.json").read_text(encoding="utf-8"))
    assert (len(found["points"]), found["cost_tables"], found["cache_bytes"]) == (1, [], None)
    assert len((tmp_path / "scaling.csv").read_text(encoding="utf-8").splitlines()) == 2


def test_a_line_of_the_table_shows_both_strategies_and_what_is_chosen() -> None:
    header, _, *lines, legend = cells(points_table(POINTS[:2]))
    assert header[:2] == ["context", "rows"]
    assert lines == [
        ["128", "1", "2", "0.5", "1000.000", "500.000", "3", "2.00", "3"],
        ["128", "8", "2", "0.5", "1000.000", "1250.000", "3", "0.80", "0"],
    ]
    assert legend[0] == "ms:"


def test_limits_say_up_to_how_many_rows_drafting_pays() -> None:
    assert [(each["acceptance"], each["context"], each["pays_up_to"]) for each in limits(POINTS)] == [
        (0.25, 128, None),
        (0.25, 512, None),
        (0.5, 128, 1),
        (0.5, 512, 8),
    ]
    header, _, *lines = cells(limits_table(POINTS))
    assert header[-2:] == ["128", "512"]
    assert lines == [["E=2", "α=0.25", "–", "–"], ["E=2", "α=0.5", "1", "8"]]


def test_a_point_that_was_not_measured_has_no_limit() -> None:
    assert cells(limits_table(POINTS[2:5]))[2:] == [["E=2", "α=0.25", "–", "–"], ["E=2", "α=0.5", "–", "8"]]


def test_sizes_of_caches_say_what_makes_them_differ() -> None:
    shown = cache_table(SIZES)
    assert "one row of 4096 tokens" in shown
    assert ["shared", "cache", "4000"] in cells(shown)
    assert ["DynamicCache", "2500"] in cells(shown)
    assert "2 of 4 layers have a sliding window, which the DynamicCache cuts them to" in shown
    without = cache_table(CacheSizes(context=9, shared=100, dynamic=90, num_layers=4, sliding_layers=0))
    assert without.endswith("0 of 4 layers have a sliding window")
