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
        try:
            before = json.loads(recipe_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{recipe_file} is damaged ({error}); choose another output_dir.") from error
        changed = sorted(key for key in {*before, *written} if before.get(key) != written.get(key))
        if changed:
            raise ValueError(
                f"output_dir={output_dir!r} holds a run with another recipe ({', '.join(changed)} differ); to continue "
                "it, give its own recipe; for a new run choose another folder."
            )
        checkpoint = last_whole_checkpoint(folder)
        if checkpoint is not None and written["trainer"].get("save_only_model"):
            raise ValueError(
                f"{checkpoint} was saved with trainer.save_only_model=true: without the optimizer's state it cannot be "
                "continued as if nothing had been interrupted. Use it as the model of a new run."
            )
    return None if checkpoint is None else str(checkpoint)


def step_of(checkpoint: str | Path) -> int | None:
    """Returns the global step of a checkpoint that was written to its end, or `None`.

    Trainer writes its state last, so that a checkpoint whose state can be read is whole.
    """
    try:
        return int(json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError):
        return None


def last_whole_checkpoint(folder: str | Path) -> Path | None:
    """Returns the latest checkpoint-N in a folder that was written to its end, or `None`."""
    steps = {step_of(path): path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    whole = {step: path for step, path in steps.items() if step is not None}
    return whole[max(whole)] if whole else None


def finished_weights(checkpoint: str, best: bool) -> str | None:
    """Returns the checkpoint that holds what a run ended with, or `None` while steps are left.

    Args:
        checkpoint: the last of the run.
        best: whether the run ends with its best weights instead of the last ones.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    if state.global_step < state.max_steps:
        return None
    return state.best_model_checkpoint if best and state.best_model_checkpoint else checkpoint


def write_recipe(written: Mapping[str, Any], output_dir: str) -> None:
    """Writes what a run is known by into its folder, all of it or nothing."""
    made = Path(output_dir, f".{RECIPE_FILE}")
    made.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    made.replace(Path(output_dir, RECIPE_FILE))


def check_space(model: torch.nn.Module, output_dir: str, merging: bool) -> None:
    """Checks that the disk has room for one checkpoint: trained weights and two moments of each.

    Args:
        model: what is trained.
        output_dir: where checkpoints go.
        merging: the whole model is saved at the end, although only adapters are trained.

    Raises:
        OSError: it has not.
    """
    sizes = [(weight.numel() * weight.element_size(), weight.requires_grad) for weight in model.parameters()]
    needed = 3 * sum(size for size, trained in sizes if trained)
    if merging:
        needed += sum(size for size, _ in sizes)
    free = shutil.disk_usage(output_dir).free
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
    """Saves a trained model at the root of the run's folder; nothing there changes until all of it is written.

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
