"""The table of costs: what rounds take, the speed that follows, and what a table may hold."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from layerskip.decoding.cost import CostTable

PARTS: dict[str, Any] = {
    "exit_layers": (2, 5),
    "draft_steps": (0.25, 0.5),
    "verifications": ((1.0, 1.25, 1.5), (1.0, 1.125, 1.25)),
    "autoregressive_step": 1.0,
    "head": 0.0625,
    "draft_head": 0.03125,
    "measured_on": {"device": "cpu", "context": 9},
    "rows": 1,
}
TABLE = CostTable(**PARTS)


def table(**changes: Any) -> CostTable:
    return CostTable(**{**PARTS, **changes})


def test_a_round_takes_its_draft_steps_and_its_verification() -> None:
    assert [TABLE.round_seconds(2, drafts) for drafts in (0, 1, 2)] == [1.0, 1.5, 2.0]
    assert TABLE.round_seconds(5, 2) == 2 * 0.5 + 1.25


def test_the_cost_of_a_verification_is_over_a_plain_step() -> None:
    assert [TABLE.verify_cost(2, drafts) for drafts in (0, 1, 2)] == [1.0, 1.25, 1.5]
    assert table(autoregressive_step=2.0).verify_cost(5, 2) == 0.625


def test_c_is_a_draft_step_over_a_plain_step() -> None:
    assert (TABLE.c(2), TABLE.c(5)) == (0.25, 0.5)
    assert table(autoregressive_step=2.0).c(5) == 0.25


def test_the_speed_up_is_plain_seconds_over_those_of_the_rounds() -> None:
    # Two full rounds of three tokens and one of a token without drafts: 7 · 1 over 2 · 2 + 1.
    assert TABLE.speed_up(2, {2: 2, 0: 1}, 7) == 7 / 5
    assert table(autoregressive_step=0.5).speed_up(2, {2: 2, 0: 1}, 7) == 3.5 / 5


def test_rounds_that_emit_too_little_are_slower_than_plain_decoding() -> None:
    assert TABLE.speed_up(5, {2: 4}, 4) == 1 / 2.25 < 1


def test_a_round_without_drafts_is_as_fast_as_plain_decoding() -> None:
    assert TABLE.speed_up(5, {0: 3}, 3) == 1


def test_the_longest_round_is_one_draft_shorter_than_the_widest_verification() -> None:
    assert TABLE.max_num_draft_tokens == 2


@pytest.mark.parametrize("rounds", [{}, {2: 0}])
def test_no_rounds_have_no_speed(rounds: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="rounds holds none"):
        TABLE.speed_up(2, rounds, 3)


@pytest.mark.parametrize(
    ("exit_layer", "drafts", "message"),
    [
        (3, 1, r"exit_layer=3 was not measured; measured are \[2, 5\]"),
        (2, 3, "drafts=3 were not measured; measured are 0 to 2"),
        (2, -1, "drafts=-1 were not measured"),
    ],
)
def test_what_was_not_measured_has_no_cost(exit_layer: int, drafts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TABLE.round_seconds(exit_layer, drafts)
    with pytest.raises(ValueError, match=message):
        TABLE.speed_up(exit_layer, {drafts: 1}, 1)


def test_an_exit_that_was_not_measured_has_no_c() -> None:
    with pytest.raises(ValueError, match="exit_layer=4 was not measured"):
        TABLE.c(4)


def test_a_table_comes_back_from_json_as_it_was() -> None:
    assert CostTable.read(json.loads(json.dumps(TABLE.to_dict())), "config.json") == TABLE
    assert json.loads(json.dumps(TABLE.to_dict()))["verifications"] == [[1.0, 1.25, 1.5], [1.0, 1.125, 1.25]]


def test_whole_numbers_of_seconds_are_read_as_floats() -> None:
    read = CostTable.read({**TABLE.to_dict(), "autoregressive_step": 1, "head": 2}, "config.json")
    assert (read.autoregressive_step, read.head) == (1.0, 2.0)
    assert {type(read.autoregressive_step), type(read.head)} == {float}


def test_a_table_of_several_rows_comes_back_and_one_that_says_nothing_is_of_one_row() -> None:
    several = table(rows=8)
    assert CostTable.read(json.loads(json.dumps(several.to_dict())), "config.json") == several
    assert several != TABLE
    stored = TABLE.to_dict()
    del stored["rows"]
    assert CostTable.read(stored, "config.json") == TABLE
    assert CostTable(**stored).rows == 1


def test_latencies_are_of_all_rows_and_a_step_gives_a_token_for_each() -> None:
    several = table(rows=4)
    assert several.round_seconds(2, 2) == TABLE.round_seconds(2, 2)
    assert (several.c(5), several.verify_cost(5, 2)) == (TABLE.c(5), TABLE.verify_cost(5, 2))
    # Twenty tokens are five steps, which take five seconds; two rounds take four.
    assert several.speed_up(2, {2: 2}, 20) == 5 / 4


@pytest.mark.parametrize("rows", [0, -1])
def test_less_than_one_row_is_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"rows={rows} is out of range; allowed are integers from 1 on"):
        table(rows=rows)


def test_a_table_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TABLE.head = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("exit_layers", [(), (0, 5), (5, 2), (2, 2)])
def test_exits_that_do_not_rise_from_one_on_are_refused(exit_layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"exit_layers=\[.*\] must be one or more layers from 1 on, rising"):
        table(exit_layers=exit_layers)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_steps": (0.25,)},
        {"verifications": ((1.0, 1.25),)},
        {"verifications": ((1.0, 1.25), (1.0,))},
        {"verifications": ((), ())},
    ],
    ids=str,
)
def test_parts_of_different_lengths_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"2 exit_layers have .* draft_steps and .* verifications"):
        table(**changes)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["autoregressive_step", "head", "draft_head", "draft_steps", "verifications"])
def test_latencies_that_are_no_positive_numbers_are_refused(name: str, seconds: float) -> None:
    value = {"draft_steps": (0.25, seconds), "verifications": ((1.0, 1.0), (1.0, seconds))}.get(name, seconds)
    with pytest.raises(ValueError, match="latencies must be positive numbers of seconds"):
        table(**{name: value})


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        "fast",
        {name: value for name, value in PARTS.items() if name != "head"},
        {**PARTS, "speed": 2.0},
    ],
)
def test_what_is_no_table_is_refused_with_the_place_it_stands_in(stored: Any) -> None:
    with pytest.raises(ValueError, match=r"^config\.json has .* where a table of costs has exit_layers, draft_steps"):
        CostTable.read(stored, "config.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exit_layers", [2, 5.0]),
        ("exit_layers", [True, 5]),
        ("exit_layers", 2),
        ("exit_layers", [5, 2]),
        ("draft_steps", [0.25, "fast"]),
        ("draft_steps", None),
        ("verifications", [1.0, 2.0]),
        ("verifications", [[1.0, True], [1.0, 1.0]]),
        ("autoregressive_step", True),
        ("autoregressive_step", None),
        ("head", "0.1"),
        ("head", [0.1]),
        ("draft_head", -1.0),
        ("rows", 0),
        ("rows", 1.0),
        ("rows", True),
        ("rows", None),
        ("measured_on", None),
        ("measured_on", "here"),
        # Found a fault: taken for an empty mapping.
        ("measured_on", []),
        # Found a fault: an OverflowError, since JSON holds integers of any size.
        pytest.param("head", 10**400, id="head-too large"),
    ],
)
def test_a_part_that_is_wrong_is_refused_with_the_place_it_stands_in(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: "):
        CostTable.read({**TABLE.to_dict(), name: value}, "config.json")


def test_a_table_takes_over_what_another_one_expects_of_all_its_exits() -> None:
    known = dataclasses.replace(TABLE, acceptance=tuple(0.5 + exit_layer / 100 for exit_layer in TABLE.exit_layers))
    assert TABLE.acceptance == () and TABLE.expecting(known) == known
    assert TABLE.expecting(TABLE) == TABLE.expecting(None) == TABLE
    fewer = dataclasses.replace(
        known,
        **{name: getattr(known, name)[:1] for name in ("exit_layers", "draft_steps", "verifications", "acceptance")},
    )
    assert TABLE.expecting(fewer) == TABLE and fewer.expecting(known) == fewer


@pytest.mark.parametrize("acceptance", [(0.5,), (0.5, 1.5), (0.5, -0.1), (0.5, float("nan"))])
def test_what_is_expected_must_be_a_rate_for_each_exit(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"acceptance=.*must be one rate of 0 to 1 for each"):
        dataclasses.replace(TABLE, acceptance=acceptance)
