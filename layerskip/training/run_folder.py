"""The folder of a run: whether it may be used, where it goes on, and what stands in it at the end."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from layerskip.model.adapters import CONFIG_FILE
from layerskip.model.draft_head import write_draft_token_ids
from layerskip.training.checkpoint import saved_with, write_adapter_metadata

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECIPE_FILE = "recipe.json"
_SAVING = ".saving-"


def earlier_run(output_dir: str, written: Mapping[str, Any], resume: bool) -> str | None:
    """Returns the data's fingerprint of the run in a folder that is to be continued, or `None` where one begins.

    Args:
        output_dir: the run's folder.
        written: the recipe, as `write_recipe` writes it.
        resume: whether a run that is there may be continued.

    Raises:
        ValueError: the folder holds something else than the run that is asked for.
    """
    folder, recipe_file = Path(output_dir), Path(output_dir, RECIPE_FILE)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not recipe_file.is_file():
        raise ValueError(f"output_dir={output_dir!r} is not empty and holds no run; choose another folder.")
    if not resume:
        raise ValueError(
            f"output_dir={output_dir!r} holds another run; continue it with resume=true, or choose another folder."
        )
    try:
        stored = json.loads(recipe_file.read_text(encoding="utf-8"))
        recipe, fingerprint = dict(stored["recipe"]), str(stored["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{recipe_file} is damaged ({error}); choose another output_dir.") from error
    changed = _differences(recipe, written)
    if changed:
        raise ValueError(
            f"output_dir={output_dir!r} holds a run with another recipe ({', '.join(changed)} differ); to continue it, "
            "give its own recipe; for a new run choose another folder."
        )
    return fingerprint


def checkpoint_to_continue(output_dir: str, before: str, now: str) -> str | None:
    """Returns the checkpoint from which the run in a folder goes on, or `None` where it has none yet.

    Args:
        output_dir: the run's folder.
        before: fingerprint of the run's data.
        now: fingerprint of the data as they are.

    Raises:
        ValueError: the data have changed, or the run is finished and left no checkpoint.
    """
    if before != now:
        raise ValueError(
            f"output_dir={output_dir!r} holds a run on other data: what data.train names has changed since. Put it "
            "back, or choose another folder for a new run."
        )
    checkpoint = last_whole_checkpoint(output_dir)
    if checkpoint is not None:
        return str(checkpoint)
    if has_result(output_dir):
        raise ValueError(
            f"output_dir={output_dir!r} holds a finished run and no checkpoint to continue from; choose another folder."
        )
    return None


def has_result(output_dir: str) -> bool:
    """Whether a run in a folder came to its end and saved what it trained."""
    return any(Path(output_dir, name).is_file() for name in ("config.json", CONFIG_FILE))


def step_of(checkpoint: str | Path) -> int | None:
    """Returns the global step of a checkpoint that was written to its end, or `None`.

    Trainer writes its state last, so that a checkpoint whose state can be read is whole, unless files in it were cut
    later.
    """
    try:
        for path in Path(checkpoint).glob("*.safetensors"):
            safe_open(path, "pt").keys()
        if not all(zipfile.is_zipfile(path) for path in Path(checkpoint).glob("*.pt")):
            return None
        return int(json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, SafetensorError):
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


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], place: str = "") -> list[str]:
    """Returns the dotted keys in which two recipes differ."""
    found = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(old, new, f"{place}{key}.")
        elif old != new:
            found.append(f"{place}{key}")
    return found


def write_recipe(written: Mapping[str, Any], fingerprint: str, output_dir: str) -> None:
    """Writes what a run is known by into its folder, all of it or nothing."""
    made = Path(output_dir, f".{RECIPE_FILE}")
    made.write_text(json.dumps({"recipe": written, "data": fingerprint}, indent=2) + "\n", encoding="utf-8")
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
    draft_token_ids: torch.Tensor | None = None,
) -> None:
    """Saves a trained model at the root of the run's folder; nothing there changes until all of it is written.

    Args:
        model: a causal LM, or a PEFT model, of which only the adapters are saved.
        tokenizer: saved beside it.
        output_dir: the run's folder.
        metadata: what the checkpoint says of itself.
        state_dict: the weights, where they are not the model's own, as with sharded ones.
        draft_token_ids: what drafts may choose from; `None` for the whole vocabulary.

    Raises:
        OSError: it could not be written.
    """
    for left in Path(output_dir).glob(f"{_SAVING}*"):
        shutil.rmtree(left)  # by a run that was killed here
    try:
        with tempfile.TemporaryDirectory(prefix=_SAVING, dir=output_dir) as made:
            if is_peft_model(model):
                model.save_pretrained(made, state_dict=state_dict)
                write_adapter_metadata(made, metadata)
            else:
                with saved_with(model.config, metadata):
                    model.save_pretrained(made, state_dict=state_dict)
            tokenizer.save_pretrained(made)
            if draft_token_ids is not None:
                write_draft_token_ids(made, draft_token_ids)
            for path in Path(made).iterdir():
                path.replace(Path(output_dir, path.name))
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the trained model could not be written to {output_dir!r}; checkpoints there are whole. Free some space "
            f"and continue with resume=true. The cause: {error}"
        ) from error
