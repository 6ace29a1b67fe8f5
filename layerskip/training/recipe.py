"""A training run written down: every key of a recipe, and how a YAML file becomes one."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from transformers import TrainingArguments

from layerskip.training.data import DataSettings
from layerskip.training.exit_settings import ExitSettings
from layerskip.training.layer_dropout import DropoutSettings
from layerskip.training.strict import UNKNOWN_KEYS_FAIL

# Set by the recipe's own keys.
_RESERVED = ("output_dir", "resume_from_checkpoint")


@dataclass(frozen=True)
class FromConfig:
    """A model to train from scratch.

    Attributes:
        from_config: a transformers configuration: `model_type` and whatever differs from its defaults.
        tokenizer: folder or hub id of the tokenizer; its vocabulary must fit the configuration's.
    """

    __pydantic_config__ = UNKNOWN_KEYS_FAIL

    from_config: dict[str, Any]
    tokenizer: str

    def __post_init__(self) -> None:
        """Checks the configuration; raises ValueError without a model type."""
        if "model_type" not in self.from_config:
            raise ValueError("from_config has no model_type, such as model_type: llama.")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters, for method: lora.

    Attributes:
        rank: of the update of each projection.
        alpha: the update is scaled by alpha / rank.
        rank_pattern: other ranks for some projections, as PEFT takes them: a regular expression that ends like the
            names of modules, such as `layers\\.[0-5]\\..*` for the six lowest layers, which have the most to learn.
        alpha_pattern: other alphas, likewise.
        dropout: of the adapters' input.
        targets: names of projections, such as [q_proj, v_proj], or "all-linear" for all but the head.
        merge: save the merged model, a plain checkpoint; false saves the adapters alone.
        continue_from: a folder of adapters to train further. They keep their ranks, alphas and targets, so that of the
            other keys only merge may be given.
    """

    __pydantic_config__ = UNKNOWN_KEYS_FAIL

    rank: int = 16
    alpha: float = 32.0
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    merge: bool = True
    continue_from: str | None = None

    def __post_init__(self) -> None:
        """Checks the settings; raises ValueError by name."""
        if self.rank < 1 or not 0.0 < self.alpha < float("inf") or not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}: rank must be at least 1, alpha above "
                "0, and 0 ≤ dropout < 1."
            )
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"{pattern!r} in rank_pattern or alpha_pattern is no regular expression: {error}."
                ) from error
        alphas = self.alpha_pattern.values()
        if min(self.rank_pattern.values(), default=1) < 1 or not all(0.0 < alpha < float("inf") for alpha in alphas):
            raise ValueError(
                f"rank_pattern={self.rank_pattern}, alpha_pattern={self.alpha_pattern}: ranks must be at least 1, "
                "alphas above 0."
            )
        if (
            self.continue_from is not None
            and dataclasses.replace(self, merge=True, continue_from=None) != LoraSettings()
        ):
            raise ValueError(
                f"continue_from={self.continue_from!r}: these adapters keep the shape that they have; leave "
                "every other key but merge out."
            )


@dataclass(frozen=True)
class Recipe:
    """A whole run.

    Attributes:
        model: a local folder, a hub id, "demo-base", or `{from_config: …, tokenizer: …}` to train from scratch.
        data: what to train and evaluate on.
        output_dir: folder of the run: the trained checkpoint, and checkpoint-N folders to continue from.
        method: "full" trains all weights, "lora" adapters on frozen ones.
        lora: the adapters of method lora; by default its defaults.
        exits: exits, their weights, curriculum and loss.
        dropout: layer dropout.
        dtype: of the weights in training: float32, bfloat16, float16, or auto as they are stored.
        attn_implementation: sdpa or eager; null for the family's default.
        revision: of a model on the hub.
        draft_vocab_size: how many token ids a draft may choose from, the most frequent ones of the training data, which
            makes drafting cheaper and changes no output; null for the whole vocabulary.
        max_minutes: end training after this time, with the learning rate falling to 0 by then; null for no limit. A run
            that was interrupted and is resumed has the whole time again.
        resume: continue the run in `output_dir` from its last whole checkpoint; its recipe must be this one.
        trainer: any field of transformers' TrainingArguments, such as learning_rate, max_steps, seed, bf16,
            per_device_train_batch_size, gradient_accumulation_steps, eval_strategy, save_steps, report_to. YAML takes a
            bare no for false: write save_strategy: "no".
    """

    __pydantic_config__ = UNKNOWN_KEYS_FAIL

    model: str | FromConfig
    data: DataSettings
    output_dir: str
    method: Literal["full", "lora"] = "full"
    lora: LoraSettings | None = None
    exits: ExitSettings = field(default_factory=ExitSettings)
    dropout: DropoutSettings = field(default_factory=DropoutSettings)
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    attn_implementation: Literal["sdpa", "eager"] | None = None
    revision: str | None = None
    draft_vocab_size: int | None = None
    max_minutes: float | None = None
    resume: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks what concerns several keys, and gives trainer's their types; raises ValueError by name."""
        object.__setattr__(self, "trainer", _trainer_fields(self.trainer))
        if self.resume and self.trainer.get("save_only_model"):
            raise ValueError(
                "trainer.save_only_model=true keeps no optimizer, without which a run cannot go on as if nothing had "
                "happened; use its last checkpoint as the model of a new run."
            )
        if self.method == "lora" and self.lora is None:
            object.__setattr__(self, "lora", LoraSettings())
        if self.method == "full" and self.lora is not None:
            raise ValueError("lora is given, but method=full trains all weights; choose method=lora or leave it out.")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            if self.trainer.get(name, 1) < 1:
                raise ValueError(f"trainer.{name}={self.trainer[name]} must be at least 1.")
        if self.max_minutes is not None and not 0.0 < self.max_minutes < float("inf"):
            raise ValueError(f"max_minutes={self.max_minutes} is out of range; give minutes above 0, or null.")
        if self.max_minutes is not None:
            for clash, why in (
                (self.exits.curriculum == "gradual" and "exits.curriculum=gradual", "needs the number of steps"),
                (
                    self.dropout.schedule == "exponential" and "dropout.schedule=exponential",
                    "needs the number of steps",
                ),
            ):
                if clash:
                    raise ValueError(
                        f"max_minutes={self.max_minutes} does not go with {clash}, which {why}; leave one of them out."
                    )
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} is out of range; give at least 1, or null.")
        if self.draft_vocab_size is not None and self.data.streaming:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} counts the tokens of the training data, and "
                "data.streaming=true does not know them; leave one of them out."
            )
        reserved = [name for name in _RESERVED if name in self.trainer]
        if reserved:
            raise ValueError(f"trainer.{reserved[0]} is set by the recipe itself: use output_dir and resume.")
        if self.data.streaming and self.trainer.get("max_steps", 0) < 1:
            raise ValueError(
                "data.streaming=true has no length, so that the curriculum and schedules need trainer.max_steps."
            )
        if isinstance(self.model, FromConfig) and (self.method == "lora" or self.revision is not None):
            raise ValueError(
                "a model from_config has no trained weights, which method=lora and revision are for; use method=full "
                "and leave revision out."
            )


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as the number that YAML 1.2 takes it for; PyYAML follows 1.1, where it is text."""


_NUMBER = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))

SETTINGS = (Recipe, FromConfig, DataSettings, ExitSettings, DropoutSettings, LoraSettings)


def read_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Returns the recipe in a YAML file.

    Args:
        path: the file.
        changes: `key=value` each, with a dotted key such as `trainer.learning_rate` and a value in YAML.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no YAML mapping, a key is unknown or missing, or a value cannot be.
    """
    try:
        written = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(written, dict):
        raise ValueError(f"{path} must hold keys and values, such as `model: demo-base`.")
    for change in changes:
        _apply(written, change)
    return recipe_of(written)


def recipe_of(written: Mapping[str, Any]) -> Recipe:
    """Returns the recipe that nested mappings of plain values describe.

    Raises:
        ValueError: a key is unknown or missing, or a value cannot be; every such place is named.
    """
    recipe: Recipe = _validated(TypeAdapter(Recipe), written, ())
    return recipe


def _apply(written: dict[str, Any], change: str) -> None:
    key, equals, value = change.partition("=")
    if not equals or not key:
        raise ValueError(f"{change!r} is no change of a key; write key=value, such as trainer.max_steps=100.")
    *parents, last = key.split(".")
    place = written
    for parent in parents:
        if not isinstance(place.get(parent), dict):
            place[parent] = {}
        place = place[parent]
    try:
        place[last] = yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{change!r}: the value is no YAML: {error}") from error


def _trainer_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of TrainingArguments in their own types."""
    types = typing.get_type_hints(TrainingArguments)
    known = {entry.name for entry in dataclasses.fields(TrainingArguments) if entry.init}
    for name in given:
        if name not in known:
            raise ValueError(f"trainer.{name} is no field of transformers' TrainingArguments; see its documentation.")
    loose = ConfigDict(arbitrary_types_allowed=True)
    return {
        name: _validated(TypeAdapter(types[name], config=loose), value, ("trainer", name))
        for name, value in given.items()
    }


def _validated(adapter: TypeAdapter[Any], value: Any, place: tuple[str, ...]) -> Any:
    """Returns `value` in the type of `adapter`; every mistake in it is named by its dotted key."""
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        found = {_message(value, place, problem["loc"], problem["msg"], problem["type"]) for problem in error.errors()}
        raise ValueError("; ".join(sorted(found))) from error


def _message(value: Any, place: tuple[str, ...], location: Sequence[Any], message: str, kind: str) -> str:
    """Returns one line about one mistake, whose `location` may also name the alternatives of a type."""
    keys, inner = list(place), value
    for part in location:
        if kind == "missing" and part == location[-1]:
            return f"{'.'.join([*keys, str(part)])} is missing"
        if isinstance(inner, dict) and part in inner:
            keys.append(str(part))
            inner = inner[part]
    name = ".".join(keys)
    if kind == "unexpected_keyword_argument":
        return f"{name} is no key of a recipe; `python training/finetune.py --help` lists them all"
    if kind == "value_error":
        return f"{name}: {message.removeprefix('Value error, ')}" if name else message.removeprefix("Value error, ")
    return f"{name}={inner!r}: {message[0].lower()}{message[1:]}"
