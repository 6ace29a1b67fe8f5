"""The folder of a run: whether it may be used, where it goes on, and what stands in it at the end."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from layerskip.training.checkpoint import saved_with, write_adapter_metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE_FILE = "recipe.json"


def checkpoint_to_continue(output_dir: str, written: Mapping[str, Any], resume: bool) -> str | None:
    """Returns the checkpoint to continue from, or `None` to begin.

    Raises:
        ValueError: the folder holds something else than the run that is asked for.
    """
    folder, recipe_file = Path(output_dir), Path(output_dir, RECIPE_FILE)
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not recipe_file.is_file():
        raise ValueError(f"output_dir={output_dir!r} is not empty and holds no run; choose another folder.")
    if taken and not resume:
        raise ValueError(
            f"output_dir={output_dir!r} holds another run; continue it with resume=true, or choose another folder."
        )
    checkpoint = None
    if taken:
        before = json.loads(recipe_file.read_text(encoding="utf-8"))
        changed = sorted(key for key in {*before, *written} if before.get(key) != written.get(key))
        if changed:
            raise ValueError(
                f"output_dir={output_dir!r} holds a run with another recipe ({', '.join(changed)} differ); to continue "
                "it, give its own recipe; for a new run choose another folder."
            )
        checkpoint = last_whole_checkpoint(folder)
    return None if checkpoint is None else str(checkpoint)


def last_whole_checkpoint(folder: str | Path) -> Path | None:
    """Returns the latest checkpoint-N in a folder that was written to its end, or `None`.

    Trainer writes its state last, so that a checkpoint whose state can be read is whole.
    """
    whole = {}
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            whole[json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]] = path
        except (OSError, ValueError, KeyError):
            continue
    return whole[max(whole)] if whole else None


def is_finished(checkpoint: str) -> bool:
    """Returns whether a checkpoint is that of a run's last step."""
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    return state.global_step >= state.max_steps


def check_space(model: torch.nn.Module, output_dir: str) -> None:
    """Checks that the disk has room for one checkpoint: weights, and two moments of each trained one.

    Raises:
        OSError: it has not.
    """
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    needed, free = 3 * weights, shutil.disk_usage(output_dir).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes about {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; free some, or choose "
            "another output_dir than",
            output_dir,
        )


def save_trained(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str,
    metadata: Mapping[str, Any],
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Saves a trained model at the root of the run's folder; what is there stays whole until all of it is written.

    Args:
        model: a causal LM, or a PEFT model, of which only the adapters are saved.
        tokenizer: saved beside it.
        output_dir: the run's folder.
        metadata: what the checkpoint says of itself.
        state_dict: the weights, where they are not the model's own, as with sharded ones.

    Raises:
        OSError: it could not be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=output_dir) as made:
            if is_peft_model(model):
                model.save_pretrained(made, state_dict=state_dict)
                write_adapter_metadata(made, metadata)
            else:
                with saved_with(model.config, metadata):
                    model.save_pretrained(made, state_dict=state_dict)
            tokenizer.save_pretrained(made)
            for path in Path(made).iterdir():
                path.replace(Path(output_dir, path.name))
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the trained model could not be written to {output_dir!r}; checkpoints there are whole. Free some space "
            f"and continue with resume=true. The cause: {error}"
        ) from error
