"""An adapter-only folder: PEFT's LoRA files and what they say about exits, but not the model that they adapt."""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.model.metadata import ADAPTER_FILE, KEY, Metadata

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# PEFT's own names.
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterFolder:
    """A folder of LoRA adapters.

    Attributes:
        folder: where they lie.
        base: folder or hub id of the model beneath them.
        is_base_given: the caller said what `base` is, not the adapters.
        revision: of `base` on the hub.
        metadata: what stands in `layerskip.json`; `None` where there is no such file.
    """

    folder: Path
    base: str | os.PathLike[str]
    is_base_given: bool
    revision: str | None
    metadata: dict[str, Any] | None

    @classmethod
    def read(cls, folder: Path, base: str | os.PathLike[str] | None = None) -> AdapterFolder:
        """Returns what a folder with an adapter_config.json says; no weights are read.

        Args:
            folder: where the adapters lie.
            base: folder or hub id of the model beneath them, in place of the one, and its revision, that they name.

        Raises:
            ImportError: peft is not installed.
            ValueError: a file that is missing or damaged, other adapters than LoRA, or no base model.
        """
        try:
            import peft  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"path_or_id={str(folder)!r} holds adapters, for which the package peft is missing: run "
                '`pip install "layerskip[lora]"`.'
            ) from error
        where = f"{CONFIG_FILE} in path_or_id={str(folder)!r}"
        config = _read_json(folder / CONFIG_FILE)
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            found = config.get("peft_type") if isinstance(config, dict) else config
            raise ValueError(f"{where} has peft_type={found!r}; supported is 'LORA'.")
        is_base_given, revision = base is not None, None
        if base is None:
            base, revision = config.get("base_model_name_or_path"), config.get("revision")
        named = "base" if is_base_given else f"{where} has base_model_name_or_path"
        if not base or not isinstance(base, str | os.PathLike):
            raise ValueError(
                f"{named}={base!r}; write there, or pass as base, which model the adapters were trained on: a folder "
                "or a hub id."
            )
        if Path(base).resolve() == folder.resolve():
            raise ValueError(f"{named}={os.fspath(base)!r}, the folder of the adapters itself.")
        if not (folder / WEIGHTS_FILE).is_file():
            raise ValueError(f"path_or_id={str(folder)!r} is a folder of adapters without {WEIGHTS_FILE}.")
        metadata = None
        if (folder / ADAPTER_FILE).is_file():
            metadata = _read_json(folder / ADAPTER_FILE)
            Metadata.read(metadata, str(folder / ADAPTER_FILE))
        return cls(folder, base, is_base_given, revision, metadata)

    def attach_to(self, model: PreTrainedModel, *, trainable: bool = False) -> PeftModel:
        """Returns `model` with the adapters in place, standing apart from its weights, which are frozen.

        Args:
            model: the base, on the CPU.
            trainable: whether the adapters are to be trained further.

        Raises:
            ValueError: the adapters do not fit the model.
        """
        from peft import LoraConfig, PeftModel

        try:
            with warnings.catch_warnings():
                # The keys that it warns about are told below.
                warnings.filterwarnings("ignore", message="Found missing adapter keys")
                config = LoraConfig.from_pretrained(str(self.folder))
                config.inference_mode = not trainable
                adapted = PeftModel(model, config)
                result = adapted.load_adapter(
                    str(self.folder), adapted.active_adapter, is_trainable=trainable, torch_device="cpu"
                )
        except (ValueError, TypeError, RuntimeError, AttributeError, re.error) as error:
            # Of the weights that do not fit the first is enough.
            reason = " ".join(" ".join(str(error).splitlines()[:2]).split())
            raise ValueError(f"{self._misfit()}: {reason}") from error
        for kind, keys in (("lack", result.missing_keys), ("hold beside what fits", result.unexpected_keys)):
            if keys:
                raise ValueError(f"{self._misfit()}: they {kind} {keys[0]} ({len(keys)} in all).")
        for name, weight in adapted.named_parameters():
            if "lora_" in name and not weight.isfinite().all():
                raise ValueError(f"{WEIGHTS_FILE} in path_or_id={str(self.folder)!r}: {name} has no finite numbers.")
        return adapted

    def merge_into(self, model: PreTrainedModel) -> PreTrainedModel:
        """Returns `model`, changed in place: the adapters are added to its weights, and its configuration tells theirs.

        The sums are rounded to the weights' own type. In an fp32 model, which `load_checkpoint` passes and rounds
        once afterwards, they are those of the adapters standing apart.

        Args:
            model: the base, on the CPU.

        Raises:
            ValueError: the adapters do not fit the model.
        """
        merged: Any = self.attach_to(model).merge_and_unload()
        # PEFT has frozen it, and to train it further it would name the base model without these adapters.
        merged.requires_grad_(True)
        merged.name_or_path = merged.config.name_or_path = str(self.folder)
        if self.metadata is not None:
            setattr(merged.config, KEY, self.metadata)
        return merged

    def _misfit(self) -> str:
        base = os.fspath(self.base)
        return f"the adapters in path_or_id={str(self.folder)!r} do not fit their base model {base!r}"


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds adapters alone."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error
