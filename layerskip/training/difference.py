"""The difference that a run with adapters made, small enough to be shipped without its base model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from layerskip.model.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, is_adapter_folder
from layerskip.model.draft_head import TENSORS_FILE, read_draft_token_ids, write_draft_token_ids
from layerskip.model.metadata import ADAPTER_FILE, Metadata
from layerskip.training.checkpoint import write_adapter_metadata


def export_difference(
    run: str | Path,
    folder: str | Path,
    *,
    base: str,
    exit_layer: int,
    num_draft_tokens: int,
    draft_vocab_size: int | None = None,
) -> int:
    """Writes the adapters of a run into a folder, in half precision, and returns how many bytes of tensors these are.

    Names of folders of this machine do not go along: of a path in the recipe that is absolute, or that exists, only the
    last part stays, and `base` is what the adapters say they belong to.

    Args:
        run: folder of a run with lora.merge=false, or one of its checkpoints.
        folder: another one; made where it is missing. Tensors and settings that are there are replaced, once all new
            ones are written; everything else, such as a model card, is left as it is.
        base: how the adapters call the model beneath them: a hub id, or a name that their card explains.
        exit_layer: the recommended exit layer, one that was trained.
        num_draft_tokens: the recommended draft length, at least 1.
        draft_vocab_size: from how many of the run's draft tokens a draft chooses; `None` for all that it has.

    Raises:
        ValueError: the run holds no adapters, numbers out of range, or weights that half precision cannot hold.
        OSError: a file cannot be read or written.
    """
    run, folder = Path(run), Path(folder)
    if not is_adapter_folder(run):
        raise ValueError(f"run={str(run)!r} holds no adapters; train with method: lora and lora.merge: false.")
    if folder.resolve() == run.resolve():
        raise ValueError(f"folder={str(folder)!r} is the run itself, whose adapters would be lost; choose another.")
    if (folder / "config.json").is_file():
        raise ValueError(f"folder={str(folder)!r} holds a whole model (config.json); choose a folder of its own.")
    metadata = dict(AdapterFolder.read(run, base).metadata or {})
    trained = Metadata.read(metadata or None, str(run)).exit_layers
    if not trained:
        raise ValueError(
            f"run={str(run)!r} does not say which exits it trained: it has no {ADAPTER_FILE} that names some."
        )
    if exit_layer not in trained:
        raise ValueError(f"exit_layer={exit_layer} was not trained; allowed are {', '.join(map(str, trained))}.")
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} is out of range; allowed are integers from 1 on.")
    ids = read_draft_token_ids(run)
    stored = None if ids is None else len(ids)
    size = stored if draft_vocab_size is None else draft_vocab_size
    if size is not None and not 1 <= size <= (stored or 0):
        raise ValueError(f"draft_vocab_size={size} is out of range; the run has {stored or 'no'} draft tokens.")

    try:
        weights = {name: tensor.to(torch.float16) for name, tensor in load_file(run / WEIGHTS_FILE).items()}
    except SafetensorError as error:
        raise ValueError(f"{WEIGHTS_FILE} in run={str(run)!r} is damaged: {error}.") from error
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} in run={str(run)!r} has numbers that half precision cannot hold.")
    config = json.loads((run / CONFIG_FILE).read_text(encoding="utf-8"))
    config |= {"base_model_name_or_path": base, "revision": None, "inference_mode": True}
    metadata |= {
        "exit_layer": exit_layer,
        "num_draft_tokens": num_draft_tokens,
        "draft_vocab_size": size,
        "recipe": _without_paths(metadata.get("recipe", {})),
    }

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder) as made:
        save_file(weights, Path(made, WEIGHTS_FILE), metadata={"format": "pt"})
        Path(made, CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        write_adapter_metadata(made, metadata)
        if ids is not None:
            write_draft_token_ids(made, ids)
        for path in Path(made).iterdir():
            # safetensors makes files that their owner alone can read.
            shutil.copymode(run / CONFIG_FILE, path)
            path.replace(folder / path.name)
    if ids is None:
        (folder / TENSORS_FILE).unlink(missing_ok=True)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _without_paths(value: Any) -> Any:
    """Returns plain values in which every text that is a path is its last part."""
    if isinstance(value, Mapping):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner) for inner in value]
    if isinstance(value, str) and (Path(value).is_absolute() or Path(value).exists()):
        return Path(value).name
    return value
