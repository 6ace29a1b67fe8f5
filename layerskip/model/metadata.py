"""What a checkpoint says about its exits: `config.json["layerskip"]`, or `layerskip.json` beside adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.files import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "layerskip"
ADAPTER_FILE = "layerskip.json"
FORMAT = 1


@dataclass(frozen=True)
class Metadata:
    """The part of a checkpoint's metadata that generation needs.

    Attributes:
        compared: the exits were compared, so that `exit_layer` is an answer. A checkpoint that says nothing about its
            exit layer has not been compared yet.
        exit_layer: the recommended exit layer, counted from 1; `None` with `compared` means that no exit pays.
        num_draft_tokens: the recommended draft length, or `None`.
        exit_layers: the exits that were trained, as far as the checkpoint tells.
        draft_vocab_size: how many of the stored draft token ids to draft from, or `None` for all of them.
        cost_table: what rounds cost where the exits were compared, as JSON holds it, or `None`.
    """

    compared: bool = False
    exit_layer: int | None = None
    num_draft_tokens: int | None = None
    exit_layers: tuple[int, ...] = ()
    draft_vocab_size: int | None = None
    cost_table: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Metadata:
        """Returns the metadata that stands in a model's configuration; an empty one where there is none.

        Raises:
            ValueError: as `read`.
        """
        return cls.read(config.to_dict().get(KEY), f"config.json[{KEY!r}]")

    @classmethod
    def read(cls, stored: Any, where: str) -> Metadata:
        """Returns the metadata that was stored as JSON; an empty one for `None`.

        Args:
            stored: what the JSON holds.
            where: how messages call the place it stands in.

        Raises:
            ValueError: metadata in a format that this version does not know, or a number that is no integer.
        """
        if stored is None:
            return cls()
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise ValueError(
                f"{where}={stored!r} is not in format {FORMAT}, the one that this version reads; update layerskip or "
                "remove the entry."
            )
        exit_layers = [] if stored.get("exit_layers") is None else stored["exit_layers"]
        if not isinstance(exit_layers, list):
            raise ValueError(f"{where}: exit_layers={exit_layers!r} is a {type(exit_layers).__name__}, not a list.")
        numbers = [(name, stored.get(name)) for name in ("exit_layer", "num_draft_tokens", "draft_vocab_size")]
        numbers = [(name, value) for name, value in numbers if value is not None]
        numbers += [(f"exit_layers[{index}]", layer) for index, layer in enumerate(exit_layers)]
        for name, value in numbers:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{where}: {name}={value!r} is a {type(value).__name__}, not an integer.")
        cost_table = stored.get("cost_table")
        if not isinstance(cost_table, dict | None):
            raise ValueError(f"{where}: cost_table is a {type(cost_table).__name__}, not an object; remove it.")
        return cls(
            compared="exit_layer" in stored,
            exit_layer=stored.get("exit_layer"),
            num_draft_tokens=stored.get("num_draft_tokens"),
            exit_layers=tuple(exit_layers),
            draft_vocab_size=stored.get("draft_vocab_size"),
            cost_table=cost_table,
        )


def update_metadata(folder: Path, changes: Mapping[str, Any]) -> None:
    """Changes entries of the metadata in a checkpoint's folder; all else in its file stays as it is.

    Args:
        folder: of a whole model, or of adapters, which get a file of their own where they have none.
        changes: new values by name, as JSON takes them.

    Raises:
        OSError: the file cannot be read or written; it is whole all the same.
        ValueError: it is no JSON object, or its metadata are of another format.
    """
    config = folder / "config.json"
    path = config if config.is_file() else folder / ADAPTER_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object.")
    stored = content.get(KEY) if path == config else content
    Metadata.read(stored or None, str(path))
    entries = {"format": FORMAT, **(stored or {}), **changes}
    write_text(path, json.dumps({**content, KEY: entries} if path == config else entries, indent=2) + "\n")
