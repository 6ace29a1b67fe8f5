"""What a trained checkpoint says of itself: `config.json["layerskip"]`, or `layerskip.json` beside adapters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.model.metadata import ADAPTER_FILE, FORMAT, KEY

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def recipe_metadata(
    exit_layers: Sequence[int],
    recipe: Mapping[str, Any],
    data: str | None = None,
    draft_vocab_size: int | None = None,
) -> dict[str, Any]:
    """Returns the metadata of a checkpoint whose exits were trained but not compared yet.

    Args:
        exit_layers: the exits that were trained.
        recipe: settings by name, plain values.
        data: fingerprint of the training data.
        draft_vocab_size: how many token ids a draft chooses from; `None` for the whole vocabulary.
    """
    versions = {name: version(name) for name in ("layerskip", "transformers", "torch")}
    return {
        "format": FORMAT,
        "exit_layers": list(exit_layers),
        "draft_vocab_size": draft_vocab_size,
        # Through JSON, so that it is what a reader will find: keys are strings, tuples lists.
        "recipe": json.loads(json.dumps(recipe)),
        "data": data,
        "versions": versions,
    }


@contextmanager
def saved_with(config: PreTrainedConfig, metadata: Mapping[str, Any]) -> Iterator[None]:
    """Puts the metadata into a configuration while the block saves it, in place of what stood there before."""
    before = vars(config).get(KEY)
    setattr(config, KEY, dict(metadata))
    try:
        yield
    finally:
        delattr(config, KEY)
        if before is not None:
            setattr(config, KEY, before)


def write_adapter_metadata(folder: str | os.PathLike[str], metadata: Mapping[str, Any]) -> None:
    """Writes the metadata of an adapter-only folder, which has no config.json."""
    Path(folder, ADAPTER_FILE).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
