"""Changing what a checkpoint says about its exits, and the table of costs that an engine finds there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerskip import Engine
from layerskip.decoding.cost import CostTable
from layerskip.model.metadata import Metadata, update_metadata
from tests import kit

COSTS = CostTable((1, 2), (0.25, 0.5), ((1.0, 1.25), (1.0, 1.5)), 1.0, 0.25, 0.125, {"device": "cpu"})
CONFIG = {"zeta": 1, "model_type": "llama", "layerskip": {"format": 1, "recipe": {"lr": 0.1}}, "alpha": "γ"}


def written(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def engine_with(metadata: dict[str, Any]) -> Engine:
    return Engine(kit.l4(layerskip=metadata))


# Changing them


def test_all_other_entries_stay_as_they_are_and_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    update_metadata(tmp_path, {"exit_layer": 2})
    found = written(tmp_path / "config.json")
    assert found == {**CONFIG, "layerskip": {"format": 1, "recipe": {"lr": 0.1}, "exit_layer": 2}}
    assert list(found) == list(CONFIG)


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    before = path.stat().st_ino
    update_metadata(tmp_path, {"exit_layer": 2})
    assert path.stat().st_ino != before
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_change_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    update_metadata(tmp_path, {"exit_layer": 2, "num_draft_tokens": 3})
    update_metadata(tmp_path, {"exit_layer": None})
    stored = written(tmp_path / "config.json")["layerskip"]
    assert (stored["exit_layer"], stored["num_draft_tokens"]) == (None, 3)


def test_a_model_that_says_nothing_gets_metadata_of_this_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    update_metadata(tmp_path, {"exit_layer": None})
    assert written(tmp_path / "config.json") == {
        "model_type": "llama",
        "layerskip": {"format": 1, "exit_layer": None},
    }


@pytest.mark.parametrize("before", [None, {"format": 1, "exit_layers": [1, 2]}])
def test_adapters_have_a_file_of_their_own(tmp_path: Path, before: dict[str, Any] | None) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    if before is not None:
        (tmp_path / "layerskip.json").write_text(json.dumps(before))
    update_metadata(tmp_path, {"exit_layer": 1})
    assert written(tmp_path / "layerskip.json") == {"format": 1, **(before or {}), "exit_layer": 1}
    assert written(tmp_path / "adapter_config.json") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "config.json is no JSON object"),
        ('{"layerskip": {"format": 2}}', "is not in format 1"),
        ('{"layerskip": 3}', "is not in format 1"),
    ],
)
def test_a_file_that_cannot_be_changed_is_named_and_stays(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        update_metadata(tmp_path, {"exit_layer": 1})
    assert (tmp_path / "config.json").read_text() == content


def test_metadata_that_are_no_json_are_named_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "layerskip.json").write_text("{")
    with pytest.raises(ValueError, match=r"layerskip\.json"):
        update_metadata(tmp_path, {"exit_layer": 1})


def test_what_json_cannot_hold_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(TypeError):
        update_metadata(tmp_path, {"exit_layer": object()})
    assert written(tmp_path / "config.json") == CONFIG


# The table of costs


def test_an_engine_has_the_table_that_the_checkpoint_holds() -> None:
    stored = json.loads(json.dumps(COSTS.to_dict()))
    assert engine_with({"format": 1, "cost_table": stored}).cost_table == COSTS


@pytest.mark.parametrize("metadata", [{"format": 1}, {"format": 1, "cost_table": None}])
def test_without_a_table_there_is_none(metadata: dict[str, Any]) -> None:
    assert engine_with(metadata).cost_table is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": -1.0}, "latencies must be"),
        ({"draft_steps": [0.25]}, "2 exit_layers have 1 draft_steps"),
        ({"head": "fast"}, "'fast' is a str, not a number of seconds"),
        ({"more": 1}, "'more'"),
    ],
)
def test_a_damaged_table_is_named(change: dict[str, Any], message: str) -> None:
    """Where it is asked for: generation does without."""
    engine = engine_with({"format": 1, "cost_table": {**COSTS.to_dict(), **change}})
    with pytest.raises(ValueError, match=f"the checkpoint's cost_table.*{message}"):
        _ = engine.cost_table


def test_a_table_that_is_no_object_is_named() -> None:
    with pytest.raises(ValueError, match=r"config\.json: cost_table is a list, not an object"):
        Metadata.read({"format": 1, "cost_table": [1]}, "config.json")


def test_metadata_are_shown_without_the_table() -> None:
    metadata = Metadata.read({"format": 1, "cost_table": COSTS.to_dict()}, "config.json")
    assert metadata.cost_table == COSTS.to_dict()
    assert "draft_steps" not in repr(metadata)
