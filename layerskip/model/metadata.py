"""What a checkpoint says about its exits: `config.json["layerskip"]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """

    compared: bool = False
    exit_layer: int | None = None
    num_draft_tokens: int | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Metadata:
        """Returns the metadata that stands in a model's configuration; an empty one where there is none.

        Raises:
            ValueError: metadata in a format that this version does not know, or a number that is no integer.
        """
        stored = config.to_dict().get(KEY)
        if stored is None:
            return cls()
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise ValueError(
                f"config.json[{KEY!r}]={stored!r} is not in format {FORMAT}, the one that this version reads; "
                "update layerskip or remove the entry."
            )
        for name in ("exit_layer", "num_draft_tokens"):
            value = stored.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"config.json's {KEY}.{name}={value!r} is a {type(value).__name__}, not an integer.")
        return cls("exit_layer" in stored, stored.get("exit_layer"), stored.get("num_draft_tokens"))
