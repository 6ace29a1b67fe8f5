"""Recipes: every mistake in a file is named, and the shipped ones are what they say."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from layerskip.training.recipe import SETTINGS, FromConfig, Recipe, read_recipe, recipe_of

ROOT = Path(__file__).parents[2]
SMALLEST = {"model": "some/model", "data": {"train": "rows.jsonl"}, "output_dir": "runs/one"}


def changed(key: str, value: Any) -> dict[str, Any]:
    """Returns the smallest recipe with one dotted key changed."""
    written: dict[str, Any] = yaml.safe_load(yaml.safe_dump(SMALLEST))
    *parents, last = key.split(".")
    place = written
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return written


def write(path: Path, written: Any) -> Path:
    path.write_text(yaml.safe_dump(written), encoding="utf-8")
    return path


def test_three_keys_are_enough() -> None:
    recipe = recipe_of(SMALLEST)
    assert (recipe.method, recipe.exits.exit_layers, recipe.dropout.p_max, recipe.trainer) == ("full", "all", 0.0, {})


def test_values_get_the_types_of_their_keys(tmp_path: Path) -> None:
    """YAML takes 3e-4 for text and layer numbers may come as such from a shell."""
    changes = [
        "exits.exit_layers=[2, 3]",
        "exits.weights={2: 1, 3: 0.5}",
        "trainer.learning_rate=3e-4",
        "trainer.max_steps=7",
        "trainer.bf16=false",
        "data.columns.prompt=question",
        "method=lora",
        "lora.targets=[q_proj, v_proj]",
    ]
    recipe = read_recipe(write(tmp_path / "r.yaml", SMALLEST), changes)
    assert recipe.exits.exit_layers == (2, 3)
    assert recipe.exits.weights == {2: 1.0, 3: 0.5}
    assert recipe.trainer == {"learning_rate": 3e-4, "max_steps": 7, "bf16": False}
    assert recipe.data.columns == {"prompt": "question"}
    assert recipe.lora is not None and recipe.lora.targets == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("epochs", 3, "epochs is no key of a recipe"),
        ("exits.exits", [2], "exits.exits is no key of a recipe"),
        ("data.path", "x", "data.path is no key of a recipe"),
        ("dropout.max", 0.1, "dropout.max is no key"),
        ("lora.r", 8, "lora.r is no key"),
        ("trainer.lr", 1e-4, "trainer.lr is no field of transformers' TrainingArguments"),
        ("trainer.output_dir", "x", "trainer.output_dir is set by the recipe itself"),
        ("trainer.max_steps", "many", "trainer.max_steps='many': input should be a valid integer"),
        ("trainer.learning_rate", "fast", "trainer.learning_rate='fast'"),
        ("method", "qlora", "method='qlora': input should be 'full' or 'lora'"),
        ("dtype", "int8", "dtype='int8'"),
        ("exits.e_scale", 2.0, "exits: e_scale=2.0 is out of range; allowed is 0 ≤ e_scale ≤ 1"),
        ("exits.exit_layers", 3, "exits.exit_layers=3"),
        ("exits.loss", "mse", "exits: loss='mse' is unknown"),
        ("dropout.p_max", 1.0, "dropout: p_max=1.0 is out of range"),
        ("dropout.schedule", "linear", "dropout: schedule='linear' is unknown"),
        ("lora.rank", 0, "lora: rank=0, alpha"),
        ("lora.rank_pattern", {"layers": 0}, "lora: rank_pattern={'layers': 0}.* ranks must be at least 1"),
        ("lora.alpha_pattern", {"layers": -1.0}, "lora: .*alphas above 0"),
        ("lora.alpha_pattern", {"layers": float("nan")}, "lora: .*alphas above 0"),
        ("lora.rank_pattern", {"layers[": 4}, "lora: 'layers\\[' in rank_pattern or alpha_pattern is no regular expr"),
        ("lora", {"rank": 4, "continue_from": "x"}, "lora: continue_from='x': these adapters keep the shape"),
        ("draft_vocab_size", 0, "draft_vocab_size=0 is out of range"),
        ("max_minutes", 0, "max_minutes=0.0 is out of range"),
        ("data.streaming", True, "data.streaming=true has no length.*trainer.max_steps"),
        ("model", {"from_config": {"hidden_size": 4}, "tokenizer": "t"}, "from_config has no model_type"),
        ("model", {"from_config": {"model_type": "llama"}}, "model.tokenizer is missing"),
        ("data", {}, "data.train is missing"),
        ("lora", {"rank": 4}, "lora is given, but method=full"),
    ],
)
def test_mistakes_are_named_by_their_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_of(changed(key, value))


def test_several_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"method='x'.*output_dir is missing"):
        recipe_of({"model": "m", "data": {"train": "t"}, "method": "x"})


@pytest.mark.parametrize("change", [{"method": "lora"}, {"revision": "main"}])
def test_what_needs_trained_weights_is_refused_for_a_model_from_scratch(change: dict[str, str]) -> None:
    written = changed("model", {"from_config": {"model_type": "llama"}, "tokenizer": "t"})
    with pytest.raises(ValueError, match="a model from_config has no trained weights"):
        recipe_of({**written, **change})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("exits.curriculum", "gradual", "does not go with exits.curriculum=gradual, which needs the number of steps"),
        ("dropout.schedule", "exponential", "does not go with dropout.schedule=exponential, which needs the number"),
    ],
)
def test_what_a_limit_of_minutes_does_not_go_with(key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_of({**changed(key, value), "max_minutes": 5})


def test_draft_tokens_cannot_be_counted_in_a_stream() -> None:
    written = {**changed("data.streaming", True), "trainer": {"max_steps": 100}, "draft_vocab_size": 64}
    with pytest.raises(ValueError, match=r"draft_vocab_size=64 counts the tokens.*data.streaming=true"):
        recipe_of(written)


def test_a_stream_needs_a_number_of_steps_in_any_spelling() -> None:
    written = {**changed("data.streaming", True), "trainer": {"max_steps": "100"}}
    assert recipe_of(written).trainer["max_steps"] == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [("a: [1", "is no YAML"), ("- a", "must hold keys and values"), ("", "must hold keys and values")],
)
def test_files_that_are_no_recipes_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    ("change", "message"), [("max_steps", "is no change of a key"), ("a=[", "the value is no YAML")]
)
def test_changes_that_are_none_are_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(write(tmp_path / "r.yaml", SMALLEST), [change])


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.__name__)
def test_every_key_is_documented(settings: type) -> None:
    text = inspect.getdoc(settings)
    assert text is not None
    for entry in dataclasses.fields(settings):
        assert f"\n    {entry.name}: " in text, entry.name


# The shipped recipes

NUM_LAYERS = {
    "llama2-7b-continual": 32,
    "llama3.2-1b-continual": 16,
    "llama-1.5b-scratch": 24,
    "llama-7b-code": 32,
    "llama-1.5b-topv2": 24,
    "smollm2-135m-full": 30,
    "smollm2-135m-lora": 30,
    "smollm2-135m-commands": 30,
}
# p_max, e_scale, rotation (None: gradual) and schedule of the paper's table.
PAPER = {
    "llama2-7b-continual": (0.1, 0.2, 8, "constant"),
    "llama3.2-1b-continual": (0.1, 0.1, 8, "constant"),
    "llama-1.5b-scratch": (0.1, 0.2, 23, "exponential"),
    "llama-7b-code": (0.1, 1.0, 16, "constant"),
    "llama-1.5b-topv2": (0.2, 1.0, None, "constant"),
}


def test_every_shipped_recipe_is_tested_here() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(NUM_LAYERS)


def shipped(name: str) -> Recipe:
    return read_recipe(ROOT / "configs" / f"{name}.yaml")


@pytest.mark.parametrize("name", list(NUM_LAYERS))
def test_shipped_recipes_can_be_read_and_fit_their_models(name: str) -> None:
    recipe = shipped(name)
    assert recipe.exits.layers(NUM_LAYERS[name])
    if isinstance(recipe.model, FromConfig):
        assert recipe.model.from_config["num_hidden_layers"] == NUM_LAYERS[name]


@pytest.mark.parametrize("name", list(PAPER))
def test_the_papers_recipes_have_its_numbers(name: str) -> None:
    recipe = shipped(name)
    rotation = recipe.exits.rotation
    assert (recipe.dropout.p_max, recipe.exits.e_scale, rotation, recipe.dropout.schedule) == PAPER[name]
    assert recipe.exits.curriculum == ("gradual" if rotation is None else "rotational")
    assert (recipe.exits.weights, recipe.exits.loss, recipe.exits.exit_layers) == ("paper", "cross_entropy", "all")


@pytest.mark.parametrize("name", list(NUM_LAYERS))
def test_a_recipes_header_says_where_it_is_from_how_it_runs_and_what_was_measured(name: str) -> None:
    header = (ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8").split("\nmodel:")[0]
    assert f"training/finetune.py configs/{name}.yaml" in header
    assert "Source:" in header
    assert re.search(r"Measured: \d|Not run here", header)
