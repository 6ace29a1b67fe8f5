"""What a checkpoint says about its exits: `config.json["layerskip"]`, or `layerskip.json` beside adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """

    compared: bool = False
    exit_layer: int | None = None
    num_draft_tokens: int | None = None
    exit_layers: tuple[int, ...] = ()
    draft_vocab_size: int | None = None

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
        return cls(
            compared="exit_layer" in stored,
            exit_layer=stored.get("exit_layer"),
            num_draft_tokens=stored.get("num_draft_tokens"),
            exit_layers=tuple(exit_layers),
            draft_vocab_size=stored.get("draft_vocab_size"),
        )
